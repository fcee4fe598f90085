"""Pulls from one engine's mapped memory into another's have the digest of what their sender reads.

Where their rows go is in test_carried.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from kvbridge_kernels.segment import Span

from kvbridge.device.copier_cpu import CpuBlockCopier
from kvbridge.device.memory import AttachedPool
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from tests.integration.device.attached import attached
from tests.support.oracle import Shape, block_table, build_all, fill, mla, tables_of

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


CONVERTED = Shape(codec="fp8_e4m3", layout="hnd", block_tokens=64), Shape(block_tokens=32, layout="packed")


@pytest.mark.parametrize("case", [*CASES, "converted"])
def test_what_is_pulled_has_the_digest_that_its_sender_finds(case: str) -> None:
    """And another one once a row is another."""
    ours, theirs = CASES.get(case, CONVERTED)
    senders, end = build_all(ours), 75
    sender_table = tables_of(senders[0].pool, end, seed=1)
    for sender in senders:
        fill(sender, sender_table, range(end))
    receiver = build_all(theirs)[0]
    slot = torch.zeros(1 << 14, dtype=torch.uint8)
    with ExitStack() as stack:
        opened = [stack.enter_context(attached(sender)) for sender in senders]
        _, pool = stack.enter_context(attached(receiver))
        table = block_table(receiver.pool, tables_of(receiver.pool, end, seed=2), 0, end)
        takes = assign([sender.pool for sender in senders], receiver.pool)
        compared = 0
        for (held, given), taken in zip(opened, takes, strict=True):
            planned = plan(given.pool, receiver.pool, taken, 0, end, 1 << 14)
            for chunk in (planned.chunk(index) for index in range(planned.chunks)):
                its = Part(planned, chunk, block_table(given.pool, sender_table, 0, end), True)
                pulling, digesting = CpuBlockCopier(), CpuBlockCopier()
                pulling.pull(given, its, pool, Part(planned, chunk, table, False), has_digest=True)
                (read,) = pulling.poll()
                found = [_gathered(digesting, given, its, slot)]
                digesting.digest(given, its)
                assert [each.digest for each in digesting.poll()] == found, "without a slot it is the same"
                for region in held.memory:
                    region ^= 1
                found.append(_gathered(digesting, given, its, slot))
                for region in held.memory:
                    region ^= 1
                assert read.digest == found[0] != found[1]
                compared += 1
        assert compared


def _gathered(copier: CpuBlockCopier, sender: AttachedPool, part: Part, slot: torch.Tensor) -> int:
    copier.gather(sender, part, Span(slot.data_ptr(), part.chunk.size_bytes), "sum64")
    (moved,) = copier.poll()
    return moved.digest
