"""Prefill in one engine, decode in the other: every kind of cache, with one rank or two on either side.

Rows are compared where both engines still have them when they are looked at. Tokens are compared with engines alone:
not with vLLM's where its CPU backend for latents decodes (see engines/test_latents.py), nor where SGLang keeps bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.model import LAYERS
from demo.vllm_rows import LATER
from tests.support import index_keys
from tests.system.cross.fleet import SEEDS, TOKENS, Cross, prompts
from tests.system.cross.halfway import Interrupted, Pair
from tests.system.engines.kinds import (
    SEEN,
    WINDOW,
    write_alike_halves,
    write_gemma3,
    write_latent,
    write_plain_sparse,
    write_sparse,
)
from tests.system.engines.test_index_keys import INDEXED
from tests.system.engines.test_index_keys import PLUGIN as DSA
from tests.system.engines.test_latents import BACKEND
from tests.system.engines.test_plain_index_keys import CHOOSING
from tests.system.engines.test_plain_index_keys import PLUGIN as MINIMAX
from tests.system.sglang import test_index_keys as of_dsa
from tests.system.sglang import test_plain_index_keys as of_minimax
from tests.system.sglang.fleet import Answer, assert_idle, assert_same_tokens, prompt
from tests.system.sglang.rows import SavedRows, assert_carried, assert_parts_carried, assert_windows_carried
from tests.system.sglang.test_latents import YARN

pytestmark = [pytest.mark.cross, pytest.mark.timeout(900)]

Came = Callable[[SavedRows, SavedRows, bool], None]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Kind:
    """Engines of a model (`options` of Cross), and between which of them its rows go: one rank each, from two, to two.

    came          raises AssertionError unless the rows that were given came, to SGLang or not
    alone         by whose tokens the tokens are judged that SGLang decodes, and those that vLLM decodes
    lengths       of prompts. The last one ends soon after a block of any side, so that both have the same prefix of it:
                  what the sender computes again may be rounded otherwise
    has_prefixes  on both sides. vLLM's CPU backend for latents computes a prefix anew and rounds otherwise
    """

    options: Mapping[str, Any]
    to_sglang: Pairs
    to_vllm: Pairs
    lengths: tuple[int, ...]
    came: Came
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    has_prefixes: bool = False


def all_came(given: SavedRows, taken: SavedRows, to_sglang: bool) -> None:
    assert_carried(given, taken)


def windows_came(windowed: tuple[int, ...], seen: int, given: SavedRows, taken: SavedRows, to_sglang: bool) -> None:
    tokens = len(next(iter(given.rows.values())))
    assert_windows_carried(given, taken, windowed, max(0, tokens + LATER + 1 - seen))


def latents_came(given: SavedRows, taken: SavedRows, to_sglang: bool) -> None:
    assert set(taken.rows) == {(layer, "latent") for layer in range(LAYERS)}
    assert_carried(given, taken)


def plain_index_keys_came(given: SavedRows, taken: SavedRows, to_sglang: bool) -> None:
    """vLLM keeps index keys in bf16, whatever K and V are in."""
    kinds = {(layer, part) for layer in range(LAYERS) for part in "kv"}
    assert set(taken.rows) == kinds | {(layer, "index_key") for layer in CHOOSING}
    codecs = ("bf16", "fp32") if to_sglang else ("fp32", "bf16")
    assert_parts_carried(given, taken, {("k", "v"): ("fp32", "fp32"), ("index_key",): codecs})


def index_keys_came(given: SavedRows, taken: SavedRows, to_sglang: bool) -> None:
    """Latents are converted, index keys and their scales come byte for byte."""
    assert {layer for layer, part in taken.rows if part == "index_key"} == set(INDEXED)
    codecs = ("fp32", "bf16") if to_sglang else ("bf16", "fp32")
    as_they_are = ("index_key", "index_key_scale")
    assert_parts_carried(given, taken, {("latent",): codecs, as_they_are: ("bytes", "bytes")})


def rotated_index_keys_came(given: SavedRows, taken: SavedRows, to_sglang: bool) -> None:
    """Index keys are what the oracle makes of those that were given, byte for byte."""
    expected = dict(given.rows)
    for layer in INDEXED:
        keys, scales = given.rows[layer, "index_key"], given.rows[layer, "index_key_scale"]
        keys, scales = index_keys.received(keys, scales, "pow2_fp32", "pow2_fp32", rotates=True)
        assert not np.array_equal(keys, given.rows[layer, "index_key"])
        expected[layer, "index_key"], expected[layer, "index_key_scale"] = keys, scales
    index_keys_came(SavedRows(expected, given.codec), taken, to_sglang)


def of_vllm(*start: str, plugin: Path | None = None, backend: str = "") -> dict[str, Any]:
    """`plugin` stands in for what vLLM has for GPUs only."""
    return {
        "start": start,
        "more": {"attention_backend": backend} if backend else {},
        "environment": {"PYTHONPATH": str(plugin)} if plugin else {},
    }


WHOLE = "whole windows"
BOTH, SGLANG = ("sglang", "vllm"), ("sglang",)
SPARSE: dict[str, Any] = dict(
    of_vllm=of_vllm("sixteen", "two-sixteen", plugin=DSA, backend=BACKEND),
    of_sglang={"changes": of_dsa.CHANGES},
    start=("d64", "p64", "d64-two", "p64-two"),
)
SPARSE_PAIRS: tuple[Pairs, Pairs] = (
    (("sixteen", "d64"), ("two-sixteen", "d64"), ("sixteen", "d64-two")),
    (("p64", "sixteen"), ("p64-two", "sixteen"), ("p64", "two-sixteen")),
)
KINDS = {
    "full attention": Kind(
        dict(of_vllm=of_vllm("small", "alone"), start=("d16", "p16", "alone")),
        (("small", "d16"), ("two", "d16"), ("large", "d16-two")),
        (("p16", "small"), ("p16-two", "large"), ("p16", "two")),
        (2, 15, 16, 17, 33, 64, 300, 652),
        all_came,
        (BOTH, BOTH),
        has_prefixes=True,
    ),
    # vLLM takes windows in whole blocks of 32 tokens, so SGLang's pages are as large.
    # With 111 tokens, as with every 32nd number, vLLM gives up a block that it would need for the last token itself.
    # It keeps the window of 712 tokens from 608 on, as far as one begins that ends with its last whole block.
    "windows": Kind(
        dict(
            write=write_alike_halves,
            of_vllm=of_vllm("small", "two", "alone"),
            start=("d16", "p32", "d16-two", "p32-two", "alone"),
        ),
        (("small", "d16"), ("two", "d16"), ("small", "d16-two")),
        (("p32", "small"), ("p32-two", "small"), ("p32", "two")),
        (2, 79, 80, 81, 111, 112, 300, 712),
        partial(windows_came, (1, 2), SEEN),
        (BOTH, BOTH),
        has_prefixes=True,
    ),
    # SGLang keeps all tokens of these windows, in one pool with the other layers, and vLLM does not: one way only.
    WHOLE: Kind(
        dict(write=write_gemma3, of_vllm=of_vllm("small", "alone"), start=("d16", "p32", "alone")),
        (),
        (("p32", "small"),),
        (2, WINDOW + 1, 300),
        partial(windows_came, (0, 2), WINDOW),
        ((), BOTH),
    ),
    "plain index keys": Kind(
        dict(
            write=write_plain_sparse,
            of_vllm=of_vllm("large", "two-large", plugin=MINIMAX),
            of_sglang={"changes": of_minimax.CHANGES, "write": of_minimax.write},
            start=("d128", "p64", "d16-two", "p64-two", "alone"),
        ),
        (("large", "d128"), ("two-large", "d128"), ("large", "d16-two")),
        (("p64", "large"), ("p64-two", "large"), ("p64", "two-large")),
        (2, 129, 268),
        plain_index_keys_came,
        (SGLANG, SGLANG),
        has_prefixes=True,
    ),
    "latents": Kind(
        dict(
            write=partial(write_latent, rope_scaling=YARN),
            of_vllm=of_vllm("sixteen", "two-sixteen", backend=BACKEND),
            start=("d16", "p16", "d16-two", "p16-two", "alone"),
        ),
        (("sixteen", "d16"), ("two-sixteen", "d16"), ("sixteen", "d16-two")),
        (("p16", "sixteen"), ("p16-two", "sixteen"), ("p16", "two-sixteen")),
        (2, 17, 300),
        latents_came,
        (SGLANG, ()),
    ),
    # SGLang does not rotate the index keys of the first, and rotates those of the second.
    "index keys": Kind(SPARSE | {"write": of_dsa.write}, *SPARSE_PAIRS, (2, 65, 300), index_keys_came),
    "rotated index keys": Kind(
        SPARSE | {"write": partial(write_sparse, rope_scaling=YARN)},
        *SPARSE_PAIRS,
        (2, 65, 300),
        rotated_index_keys_came,
    ),
}


BOTH_WAYS = tuple(name for name in KINDS if name != WHOLE)


class Ran(Cross):
    """The engines of a kind."""

    def __init__(self, kind: Kind, folder: Path, stack: ExitStack) -> None:
        self.kind = kind
        super().__init__(folder, stack, **kind.options)

    def prompts(self, number: int) -> list[list[int]]:
        """Fewer where a side has two ranks."""
        return prompts(self.kind.lengths[-3 if number else 0 :])[: None if self.kind.has_prefixes else -1]

    def judge(self, tokens: list[int], found: Sequence[int], to_sglang: bool) -> None:
        """By each engine alone whose tokens are those of the pair."""
        engines = self.kind.alone[not to_sglang]
        if engines:
            alone = self.sglang.alone(tokens, TOKENS)
            assert_same_tokens(alone, Answer(tuple(found), (), 0, None))
        if "vllm" in engines:
            assert_same_tokens(alone, Answer(tuple(self.vllm.alone(tokens, TOKENS)), (), 0, None))


RANKS = pytest.mark.parametrize("number", range(3), ids=["one", "from_two", "to_two"])


def only(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ran", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    with ExitStack() as stack:
        yield Ran(KINDS[request.param], tmp_path_factory.mktemp("fleet"), stack)


@RANKS
@only(*BOTH_WAYS)
def test_vllm_prefills_and_sglang_decodes(ran: Ran, number: int) -> None:
    sender, receiver = ran.kind.to_sglang[number]
    for tokens in ran.prompts(number):
        answer, given, taken = ran.to_sglang(sender, receiver, tokens)
        ran.kind.came(given, taken, True)
        ran.judge(tokens, answer.tokens, to_sglang=True)
    if ran.kind.has_prefixes:
        ran.assert_prefix_stayed()
    assert_idle(ran.sglang, receiver)
    ran.vllm[sender].wait_empty()


@RANKS
@only(*BOTH_WAYS)
def test_sglang_prefills_and_vllm_decodes(ran: Ran, number: int) -> None:
    sender, receiver = ran.kind.to_vllm[number]
    ran.sglang.start(sender)
    for tokens in ran.prompts(number):
        found, cached, given, taken = ran.to_vllm(sender, receiver, tokens)
        assert cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        ran.kind.came(given, taken, False)
        ran.judge(tokens, found, to_sglang=False)
    if ran.kind.has_prefixes:
        ran.assert_prefix_stayed()
    assert_idle(ran.sglang, sender)
    ran.vllm[receiver].wait_empty()


@only("windows", "plain index keys")
class TestInterrupted(Interrupted):
    @pytest.fixture
    def pair(self, ran: Ran) -> Pair:
        return Pair(ran, ran.kind.to_sglang[0], ran.kind.to_vllm[0])


@only(WHOLE)
def test_sglang_gives_whole_windows(ran: Ran) -> None:
    test_sglang_prefills_and_vllm_decodes(ran, 0)


@only(WHOLE)
def test_sglang_prefills_and_decodes_whole_windows(ran: Ran) -> None:
    for length in ran.kind.lengths:
        tokens = prompt(length, seed=next(SEEDS))
        (answer,) = ran.sglang.crossed("p32", "d16", tokens)
        ran.sglang.assert_same_as_alone(tokens, answer)
    assert_idle(ran.sglang, "p32", "d16")


@only(WHOLE)
def test_windows_that_vllm_has_not_kept_whole_are_refused(ran: Ran) -> None:
    """SGLang would need what is before them."""
    ran.sglang.start("d16")
    _, body = ran.for_sglang("small", prompt(300, seed=next(SEEDS)))
    status, said = ran.sglang["d16"].generate(body)
    assert status != 200 and f"kind: sender sliding {WINDOW}, receiver full" in str(said), said
    assert_idle(ran.sglang, "d16")
    ran.vllm["small"].wait_empty()
