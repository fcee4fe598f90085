"""Pulls from one engine's mapped memory into another's: shards, windows and states, against the oracle.

Layouts, widths, codecs and latents are pulled in test_porter_cpu.py and test_row_scales.py, beside their slots.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvbridge.device.pulls import Pulls
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign
from tests.device.attached import attached
from tests.device.moving import pull
from tests.oracle import Shape, block_table, build_all, fill, mismatch, mla, tables_of, tail_of

HYBRID = Shape(layers=4, kinds=("full", "sliding", "state", "chunked"), window=24, blocks=16)
CASES = {
    "tensor parallel": (Shape(tp_size=4, kv_heads=8), Shape(tp_size=1, kv_heads=8, layout="hnd", block_tokens=64)),
    "repeated heads": (Shape(tp_size=8, kv_heads=4), Shape(tp_size=2, kv_heads=4, layout="hnd")),
    "pipeline": (Shape(layers=7, pp_size=3), Shape(layers=7, pp_size=2, layout="cross_layer", block_tokens=8)),
    "context parallel": (Shape(cp_size=2), Shape(cp_size=4, cp_interleave=16, layout="hnd", block_tokens=8)),
    "context and tensor": (Shape(cp_size=2, tp_size=2), Shape(tp_size=4, layout="packed", block_tokens=32)),
    "windows and states": (HYBRID, replace(HYBRID, layout="hnd", block_tokens=8, blocks=24)),
    "states of two ranks": (replace(HYBRID, tp_size=2), replace(HYBRID, tp_size=2, block_tokens=8, blocks=24)),
    "latents": (mla("fp8_ds_mla", layers=3), mla("fp8_ds_mla", layers=3, block_tokens=64, pad_bytes=64)),
    "odd heads": (Shape(kv_heads=3, key_width=7, value_width=9), Shape(kv_heads=3, key_width=7, value_width=9,
                  layout="packed_hnd", block_tokens=24)),
    "scales beside rows": (Shape(codec="fp8_row_scale"), Shape(codec="fp8_row_scale", layout="hnd", tp_size=2)),
}  # fmt: skip


@pytest.mark.parametrize("tokens", [range(75), range(37, 75), range(33, 34)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_pulled_to_where_the_oracle_has_them(case: str, tokens: range) -> None:
    ours, theirs = CASES[case]
    sources, end = build_all(ours), tokens.stop
    source_table = tables_of(sources[0].pool, end, seed=1)
    for source in sources:
        fill(source, source_table, range(end))
    with ExitStack() as stack:
        opened = [stack.enter_context(attached(source))[1] for source in sources]
        for sink in build_all(theirs):
            table, before, pulls = tables_of(sink.pool, end, seed=2), sink.copy(), Pulls()
            engine, pool = stack.enter_context(attached(sink))
            takes = assign([source.pool for source in sources], sink.pool)
            for source, taken in zip(opened, takes, strict=True):
                planned = plan(source.pool, sink.pool, taken, tokens.start, end, 1 << 14)
                tables = block_table(source.pool, source_table, 0, end), block_table(sink.pool, table, 0, end)
                for index in range(planned.chunks):
                    pull(pulls, planned.chunk(index), planned, source, tables[0], pool, tables[1])
                pulls.forget(source)
            assert mismatch(engine, before, table, tokens, tail_of(sources, sink, table, tokens)) == ""
