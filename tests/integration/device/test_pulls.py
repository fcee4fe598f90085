"""Pulls from one engine's mapped memory into another's: shards, windows and states, against the oracle.

Layouts, widths, codecs and latents are pulled in test_porter_cpu.py and test_row_scales.py, beside their slots.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from kvbridge_kernels.segment import Span

from kvbridge.device.memory import AttachedPool
from kvbridge.device.porter_cpu import CpuPorter
from kvbridge.device.pulls import Pulls
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from tests.integration.device.attached import attached
from tests.integration.device.moving import pull
from tests.support.oracle import Shape, block_table, build_all, fill, mismatch, mla, tables_of, tail_of

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


CONVERTED = Shape(codec="fp8_e4m3", layout="hnd", block_tokens=64), Shape(block_tokens=32, layout="packed")


@pytest.mark.parametrize("case", [*CASES, "converted"])
def test_what_is_pulled_has_the_digest_that_its_sender_finds(case: str) -> None:
    """And another one once a row is another."""
    ours, theirs = CASES.get(case, CONVERTED)
    sources, end = build_all(ours), 75
    source_table = tables_of(sources[0].pool, end, seed=1)
    for source in sources:
        fill(source, source_table, range(end))
    sink = build_all(theirs)[0]
    slot = torch.zeros(1 << 14, dtype=torch.uint8)
    with ExitStack() as stack:
        opened = [stack.enter_context(attached(source)) for source in sources]
        _, pool = stack.enter_context(attached(sink))
        table = block_table(sink.pool, tables_of(sink.pool, end, seed=2), 0, end)
        takes = assign([source.pool for source in sources], sink.pool)
        compared = 0
        for (held, source), taken in zip(opened, takes, strict=True):
            planned = plan(source.pool, sink.pool, taken, 0, end, 1 << 14)
            for chunk in (planned.chunk(index) for index in range(planned.chunks)):
                its = Part(planned, chunk, block_table(source.pool, source_table, 0, end), True)
                receiver, sender = CpuPorter(), CpuPorter()
                receiver.pull(source, its, pool, Part(planned, chunk, table, False), has_digest=True)
                (read,) = receiver.poll()
                found = [_gathered(sender, source, its, slot)]
                sender.digest(source, its)
                assert [each.digest for each in sender.poll()] == found, "without a slot it is the same"
                for region in held.memory:
                    region ^= 1
                found.append(_gathered(sender, source, its, slot))
                for region in held.memory:
                    region ^= 1
                assert read.digest == found[0] != found[1]
                compared += 1
        assert compared


def _gathered(porter: CpuPorter, source: AttachedPool, part: Part, slot: torch.Tensor) -> int:
    porter.gather(source, part, Span(slot.data_ptr(), part.chunk.size_bytes), "sum64")
    (moved,) = porter.poll()
    return moved.digest
