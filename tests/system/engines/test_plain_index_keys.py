"""Real engines of MiniMax M3: plain index keys travel beside K and V, in the layers that choose blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.model import KV_HEADS, LAYERS
from testing.kept import kept
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.kinds import write_plain_sparse
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

PLUGIN = Path(__file__).parent / "minimax_plugin"
ROOT = Path(__file__).parents[3]
CHOOSING, WIDTH = range(1, LAYERS), 128

# Rows of K and V are in fp32 here, those of index keys in bf16, whatever the others are.
minimax = kept(
    Fleet,
    dtype="float32",
    write=write_plain_sparse,
    environment={"PYTHONPATH": str(PLUGIN)},
    options={"kvbridge_deadline_s": 10},
    start=("large", "two-large"),
)


@pytest.mark.parametrize(("sender", "receiver"), [("large", "two-large"), ("two-large", "large")])
def test_rows_go_from_any_ranks_and_blocks_to_any(minimax: Fleet, sender: str, receiver: str) -> None:
    """128 tokens in a block on one rank, 256 on two. Read by the tests' own reader, in every rank."""
    minimax.assert_known_beforehand(sender)
    for length in (2, 129, 300):
        tokens = prompt(length, seed=length + 1 + (sender == "large"))
        answer, ours, theirs = minimax.crossed(sender, receiver, tokens)
        assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert_carried(ours, theirs)
        parts = {(layer, part) for layer in range(LAYERS) for part in "kv"}
        assert set(ours.rows) == parts | {(layer, "index_key") for layer in CHOOSING}
        for layer in CHOOSING:
            assert ours.rows[layer, "index_key"].shape == (length - 1, 1, WIDTH * 2)
            assert ours.rows[layer, "k"].shape == (length - 1, KV_HEADS, WIDTH * 4)
            assert ours.rows[layer, "index_key"].any(), "nothing was written"
        own = minimax[sender].run(minimax.name("own"), tokens, len(answer.tokens))
        assert answer.tokens == own.tokens, "what the sender itself goes on with"


def test_what_the_receiver_has_in_its_prefix_cache_is_not_fetched_again(minimax: Fleet) -> None:
    first = prompt(300, seed=7)
    minimax.crossed("large", "two-large", first)
    longer = first[:290] + prompt(120, seed=8)
    answer, ours, theirs = minimax.crossed("large", "two-large", longer)
    assert answer.cached == len(longer) - 1
    assert_carried(ours, theirs)


@pytest.mark.parametrize("block_tokens", [128, 256])
def test_vllms_model_runner_writes_rows_where_the_planes_say(tmp_path: Path, block_tokens: int) -> None:
    write_plain_sparse(tmp_path)
    command = [sys.executable, "-m", "tests.system.engines.minimax_runner", str(tmp_path), str(block_tokens)]
    environment = {**os.environ, "PYTHONPATH": f"{PLUGIN}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
