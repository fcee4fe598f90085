"""A model with Gated DeltaNet states, from vLLM to SGLang and back: each goes on from the state that it needs.

vLLM continues from the state before the prompt's last token, SGLang from that after it. The engines keep states in
other dtypes, and compute on a CPU in other orders: so what came is compared with what was sent, byte for byte, and with
what the receiving engine itself has after as many tokens, about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from testing.waiting import wait_for
from tests.system.cross.fleet import TOKENS, Cross
from tests.system.engines.fleet import PREFILL
from tests.system.engines.states import CONV_ROWS, of_one_rank
from tests.system.engines.test_states import MORE
from tests.system.sglang.fleet import assert_idle, prompt
from tests.system.sglang.rows import assert_carried
from tests.system.sglang.states import write
from tests.system.sglang.test_states import SERVERS

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

LENGTHS = [1, 2, CONV_ROWS + 1, CONV_ROWS + 2, 65, 129, 300]
NEAR = 0.1  # of the norm: bf16 in another order, through some layers
States = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cross]:
    servers = {name: replace(SERVERS[name], dtype="bfloat16") for name in ("p16", "d64")}
    with ExitStack() as stack:
        yield Cross(
            tmp_path_factory.mktemp("fleet"),
            stack,
            start=tuple(servers),
            write=write,
            of_vllm={"dtype": "bfloat16", "more": MORE},
            of_sglang={"others": servers},
        )


def kept(sides: Cross, side: str, room: int) -> States:
    path = sides.sglang.kept / f"{side}-states-{room}-0.npz"
    wait_for(path.exists, 20)
    return dict(np.load(path))


def numbers(raw: np.ndarray) -> torch.Tensor:
    """Of bf16 or fp32, whose bytes are the last axis."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[raw.shape[-1]]
    return torch.from_numpy(np.ascontiguousarray(raw)).view(dtype)[..., 0]


def assert_came(given: States, taken: States) -> None:
    assert given.keys() == taken.keys() and given
    for key, rows in given.items():
        ours, theirs = numbers(rows), numbers(taken[key])
        assert ours.any(), f"{key}: zeros"
        assert torch.equal(ours.to(theirs.dtype), theirs), key


def assert_near(found: States, own: States, tokens: int, other: States) -> None:
    """What came is what the engine itself has after as many tokens, and not what it has after one less or more."""
    for key in own:
        ours, near, far = (numbers(each[key]).float() for each in (found, own, other))
        size = float(near.norm())
        error, step = float((ours - near).norm()) / size, float((ours - far).norm()) / size
        assert error < NEAR and 2 * error < step, f"{tokens} tokens: {key}: {error:.3f}, {step:.3f} of another length"


@pytest.mark.parametrize("length", LENGTHS)
def test_vllm_computes_all_of_a_prompt_that_sglang_decodes(sides: Cross, length: int) -> None:
    tokens = prompt(length, seed=7000 + length)
    sides.vllm.start("small")
    request, body = sides.for_sglang("small", tokens)
    given = of_one_rank(sides.vllm["small"].states(request, length, sides.vllm.folder / "given.npz"))
    rows = sides.vllm.rows("small", request, 0, length)
    status, said = sides.sglang["d64"].generate(body)
    assert status == 200 and len(said["output_ids"]) == TOKENS, said
    taken = kept(sides, "decode", body["bootstrap_room"])
    assert_came(given, taken)
    assert_carried(rows, sides._kept("decode", "d64", body["bootstrap_room"]))
    if length > 2:
        assert_near(taken, of_sglang(sides, tokens), length, of_sglang(sides, tokens[:-1]))
    assert_idle(sides.sglang, "d64")


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_sglang_computes_a_prompt_without_its_last_token_for_vllm(sides: Cross, length: int) -> None:
    tokens = prompt(length, seed=8000 + length)
    sides.vllm.start("small")
    begun, params = sides.for_vllm("p16", tokens)
    request = sides.vllm.name("d-small")
    answer = sides.vllm["small"].run(request, tokens, TOKENS, params)
    assert begun.getresponse().status == 200
    begun.close()
    assert answer.cached == length - 1 and len(answer.tokens) == TOKENS, "it did not travel"
    given = kept(sides, "prefill", params["bootstrap_room"])
    taken = of_one_rank(sides.vllm["small"].states(request, length - 1, sides.vllm.folder / "taken.npz"))
    assert_came(given, taken)
    if length > 2:
        assert_near(taken, of_vllm(sides, tokens[:-1]), length - 1, of_vllm(sides, tokens))
    assert_idle(sides.sglang, "p16")


def test_a_prompt_of_one_token_is_computed_where_vllm_decodes(sides: Cross) -> None:
    sides.vllm.start("small")
    begun, params = sides.for_vllm("p16", [77])
    answer = sides.vllm["small"].run(sides.vllm.name("one"), [77], TOKENS, params)
    assert begun.getresponse().status == 200 and answer.cached == 0 and len(answer.tokens) == TOKENS
    begun.close()
    assert_idle(sides.sglang, "p16")


def of_sglang(sides: Cross, tokens: list[int]) -> States:
    """What its prefill server has after these tokens: another SGLang fetches them."""
    room = sides.room()
    body = sides.sglang.body("p16", tokens, room, 1)
    (_, given), (status, said) = sides.sglang.both("p16", "d64", body)
    assert status == 200, (said, given)
    return kept(sides, "prefill", room)


def of_vllm(sides: Cross, tokens: list[int]) -> States:
    """What it has after these tokens: nobody fetches them."""
    request = sides.vllm.name("p-own")
    sides.vllm["small"].run(request, [*tokens, 5], 1, PREFILL)
    return of_one_rank(sides.vllm["small"].states(request, len(tokens), sides.vllm.folder / "own.npz"))
