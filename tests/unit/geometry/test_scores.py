"""Scores with a weight on one side only: carried if the receiving engine finishes them, which it is told."""

from __future__ import annotations

import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Pool
from msgspec.structs import replace

from kvbridge.adapters.engine.scores import Compressor, Scores
from kvbridge.errors import PeerError
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.compat import Convertible, Incompatible, changes, has_other_scores, verdict
from kvbridge.geometry.explain import sentence
from kvbridge.loopback.messages import want_of
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse
from testing.refusals import refused
from tests.unit.models.test_models import DEEPSEEK_V4

ENGINES = "vllm -tp 2", "sglang"
BLOCKS, BLOCK, WIDTH = 8, 4, 6


def pool(command: str, is_decoder: bool = False) -> Pool:
    model = read({"text_config": DEEPSEEK_V4})
    return pools_of(model, parse(command), "m", command, is_decoder)[0]


@pytest.mark.parametrize(("sender", "receiver"), [ENGINES, ENGINES[::-1]])
def test_scores_of_the_other_form_need_an_engine_that_finishes_them(sender: str, receiver: str) -> None:
    ours, theirs = pool(sender), pool(receiver, is_decoder=True)
    assert isinstance(verdict(ours, theirs), Convertible) and has_other_scores([ours], theirs)
    (change,) = (each for each in changes(ours, theirs) if each.field == "scores")
    assert "the receiver's engine adds" in sentence(change, ours, theirs)
    found = verdict(ours, replace(theirs, finishes_scores=False))
    assert isinstance(found, Incompatible) and "scores: sender" in found.reasons[0], found


@pytest.mark.parametrize(
    ("sender", "receiver"), [("vllm -tp 2 -pp 2", "sglang --tp 4 --pp-size 2"), ("sglang --pp-size 4", "vllm -tp 4")]
)
def test_every_rank_is_told_whatever_ranks_the_other_side_has(sender: str, receiver: str) -> None:
    model = read({"text_config": DEEPSEEK_V4})
    ours = pools_of(model, parse(sender), "m", "e")
    for theirs in pools_of(model, parse(receiver), "m", "d", is_decoder=True):
        assert theirs.finishes_scores and has_other_scores(ours, theirs)
        assert not any(isinstance(verdict(each, theirs), Incompatible) for each in ours)


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_of_one_form_are_left_alone(engine: str) -> None:
    ours, theirs = pool(engine), replace(pool(engine, is_decoder=True), finishes_scores=False)
    assert not has_other_scores([ours], theirs) and not isinstance(verdict(ours, theirs), Incompatible)


def test_ranks_and_layers_are_of_one_form() -> None:
    ours, theirs = pool(ENGINES[0]), pool(ENGINES[1])
    with refused(PeerError, "sender_ranks_mismatch", "raw and with a weight added, must be alike on all ranks"):
        has_other_scores([ours, theirs], theirs)
    first = next(plane for plane in ours.planes if plane.part == "compressor")
    planes = tuple(replace(each, part="raw_compressor") if each is first else each for each in ours.planes)
    assert "scores: raw in some parts, with a weight added in others" in check_pool(replace(ours, planes=planes))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("first", "end"), [(0, 3), (0, 9), (8, 9), (8, 19), (16, 19)])
def test_only_what_a_want_has_brought_is_changed(sign: int, first: int, end: int) -> None:
    rows, weight = torch.randn(BLOCKS, BLOCK, WIDTH), torch.randn(4, WIDTH // 2)
    entry = 1  # the want names blocks from this entry on
    ids = tuple(range(BLOCKS - 1, BLOCKS - 1 - (-(-end // BLOCK) - entry), -1))
    blocks = (Blocks(0, 0, (5,)), Blocks(2, entry, ids))
    want = want_of("r", "tcp://h:1", range(first, end), (), BLOCK, blocks=blocks)
    expected = rows.clone()
    for token in range(max(first, entry * BLOCK), end):
        block, place = ids[token // BLOCK - entry], token % BLOCK
        expected[block, place, WIDTH // 2 :] += sign * weight[token % 4]
    scores = Scores.of([Compressor(rows, 2, lambda: weight)], sign)
    assert scores is not None
    scores.finish(want)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (torch.zeros(2, 4, 6, dtype=torch.bfloat16), torch.zeros(4, 3)),
        (torch.zeros(2, 4, 6), torch.zeros(4, 3, dtype=torch.bfloat16)),
        (torch.zeros(2, 4, 6), torch.zeros(4, 6)),
        (torch.zeros(2, 4, 6), torch.zeros(2, 3)),
        (torch.zeros(2, 4, 6), torch.zeros(4, 3, device="meta")),
    ],
)
def test_rows_or_weights_of_another_form_are_not_finished(rows: torch.Tensor, weight: torch.Tensor) -> None:
    known = Compressor(torch.zeros(2, 4, 6), 2, lambda: torch.zeros(4, 3))
    assert Scores.of([known], 1) is not None
    assert Scores.of([known, Compressor(rows, 2, lambda: weight)], 1) is None
    assert Scores.of([known, None], 1) is None and Scores.of([], 1) is None
