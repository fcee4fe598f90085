"""Chats between the two engines: whichever decodes keeps its answers, and the other's prefill fetches them.

Each answer must be the one that an engine alone gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from demo.model import prompt
from tests.system.cross.fleet import Cross, decode_body, fetch_params, prefill_body
from tests.system.engines import fleet as vllm
from tests.system.sglang.fleet import Answer, answer_of, assert_same_tokens
from tests.system.sglang.server import ServerConfig

pytestmark = [pytest.mark.cross, pytest.mark.timeout(900)]
ANSWER, SAYS, TURNS = 90, 50, 4
KEEP_S = 600.0
KEEPS = ServerConfig("decode", environment={"KVBRIDGE_ENGINE_RETURN_S": str(KEEP_S)})


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cross]:
    of_vllm: dict[str, Any] = {"options": {"kvbridge_return_s": KEEP_S}, "start": ("small",)}
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("fleet")
        others = {"others": {"d16-keeps": KEEPS}}
        yield Cross(folder, stack, ("p16", "d16-keeps", "alone"), of_vllm=of_vllm, of_sglang=others)


def to_sglang(cross: Cross, said: list[int], count: int) -> tuple[list[int], int]:
    """What SGLang answers, and how many of the prompt's tokens vLLM did not compute."""
    room = cross.room()
    params = vllm.PREFILL | {"bootstrap_room": room, "fetched_by": "sglang"}
    prefilled = cross.vllm["small"].run(cross.vllm.name("p-small"), said, 1, params)
    status, taken = cross.sglang["d16-keeps"].generate(decode_body(said, room, prefilled, count))
    assert status == 200, taken
    return list(answer_of(taken).tokens), prefilled.cached


def to_vllm(cross: Cross, said: list[int], count: int) -> tuple[list[int], int]:
    """What vLLM answers, and how many of the prompt's tokens SGLang did not compute."""
    room, request = cross.room(), cross.vllm.name("d-small")
    with closing(cross.sglang["p16"].begin(prefill_body(said, room))) as begun:
        answer = cross.vllm["small"].run(request, said, count, fetch_params(cross.sglang.agents["p16"][0], room))
        given = begun.getresponse()
        assert given.status == 200 and answer.cached == len(said) - 1
        return list(answer.tokens), answer_of(json.loads(given.read())).cached


@pytest.mark.parametrize(("turn", "own", "theirs"), [(to_sglang, 32, 16), (to_vllm, 16, 32)], ids=["back", "forth"])
def test_a_chat_computes_only_what_is_new(cross: Cross, turn: Any, own: int, theirs: int) -> None:
    seed = 11 if turn is to_sglang else 12
    said, found, expected = prompt(100, seed=seed), [], [0]
    for number in range(TURNS):
        said += prompt(SAYS, seed=seed + 1000 * (number + 1))
        tokens, cached = turn(cross, said, ANSWER)
        assert_same_tokens(cross.sglang.alone(said, ANSWER), Answer(tuple(tokens), (), 0, None))
        found.append(cached)
        there, kept = len(said) // own * own, len(said) + ANSWER - 1
        for size in (1 if turn is to_vllm else theirs, PREFIX_TOKENS, own):
            kept -= kept % size
        expected.append(kept if kept - there >= PREFIX_TOKENS else there)
        said += tokens
        # By when a later prompt has gone the same way, the prefill engine has heard what is kept.
        turn(cross, prompt(20, seed=seed + 7 * number), 2)
    # Before the first answer that is kept, a vLLM at rest does not ask before each prompt.
    assert found[2:] == expected[2:-1], (found, expected)
