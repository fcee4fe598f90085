"""What a receiving engine finishes on its GPU: scores that another kind of engine has kept, and the last block."""

from __future__ import annotations

import pytest
import torch
from kvbridge_proto.common import Blocks

from kvbridge.adapters.engine.scores import Compressor, Scores
from kvbridge.loopback.messages import want_of
from tests.unit.test_last_blocks import LAYOUTS, cleared

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

BLOCKS, BLOCK, WIDTH, FIRST, END = 64, 8, 256, 5, 301


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("ratio", [4, 128])
def test_scores_are_those_of_the_processor_behind_what_the_gpu_does(sign: int, ratio: int) -> None:
    """The rows are written by a stream that is still busy when `finish` is called, and it does not wait for that."""
    generator = torch.Generator().manual_seed(7)
    rows, weight = (torch.randn(shape, generator=generator) for shape in ((BLOCKS, BLOCK, WIDTH), (ratio, WIDTH // 2)))
    ids = torch.randperm(BLOCKS, generator=generator)[: -(-END // BLOCK)].tolist()
    pieces = Blocks(0, 0, tuple(ids)), Blocks(1, 0, (1,))
    want = want_of("r", "", range(FIRST, END), (), BLOCK, blocks=pieces)
    expected = rows.clone()
    for token in range(FIRST, END):
        expected[ids[token // BLOCK], token % BLOCK, WIDTH // 2 :] += sign * weight[token % ratio]
    ours, theirs, there = torch.zeros_like(rows, device="cuda"), rows.cuda(), weight.cuda()
    Scores((Compressor(ours, 0, lambda: there),), sign).finish(want)  # its kernels are loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    ours.copy_(theirs)
    busy = torch.cuda.Event()
    busy.record()
    Scores((Compressor(ours, 0, lambda: there),), sign).finish(want)
    assert not busy.query(), "it waited for the device"
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_block_is_cleared_on_the_gpu(layout: str) -> None:
    assert cleared(layout, 0, 10, 3, 1, 4, device="cuda") == {4}
