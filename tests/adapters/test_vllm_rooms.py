"""Rooms: requests that are the same meet, others never do. Ids are spelled as vLLM 0.32 spells them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvbridge.adapters.vllm_rooms import Named, message_name, named, offered_room, prompt_room, wanted_room

HEADER = "5d3c9f0e-8f1a-4a8e-9f0b-0a1b2c3d4e5f"
PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        (f"cmpl-{HEADER}-0-1a2b3c4d", Named(HEADER, 0)),
        (f"cmpl-{HEADER}-3-1a2b3c4d", Named(HEADER, 3)),
        (f"chatcmpl-{HEADER}-1a2b3c4d", Named(HEADER, 0)),
        (f"generate-tokens-{HEADER}-1a2b3c4d", Named(HEADER, 0)),
        (f"0_cmpl-{HEADER}-0-1a2b3c4d", Named(HEADER, 0)),  # n > 1: samples of one prompt
        (f"12_chatcmpl-{HEADER}-1a2b3c4d", Named(HEADER, 0)),
        ("17-1a2b3c4d", Named("17", 0)),  # offline engine
        ("cmpl-no-index-1a2b3c4d", Named("no-index", 0)),
        (f"chatcmpl-{HEADER}-7-1a2b3c4d", Named(f"{HEADER}-7", 0)),  # chats have no index
    ],
)
def test_finds_what_the_caller_named(request_id: str, expected: Named) -> None:
    assert named(request_id) == expected


@pytest.mark.parametrize("kind", ["cmpl-{}-0", "chatcmpl-{}", "{}"])
def test_both_sides_meet_whichever_way_the_proxy_goes(kind: str) -> None:
    prefill, decode = (f"{kind.format(HEADER)}-{digits}" for digits in ("1a2b3c4d", "a1b2c3d4"))
    offered = offered_room(prefill, PROMPT)
    assert wanted_room(offered, decode, PROMPT) == offered, "in sequence: decode is told the offered room"
    assert wanted_room(HEADER, decode, PROMPT) == offered, "at once: decode is told the header"


def test_a_proxy_may_name_the_two_requests_differently() -> None:
    offered = offered_room("cmpl-prefill-77-0-1a2b3c4d", PROMPT)
    assert wanted_room(offered, "cmpl-decode-78-0-a1b2c3d4", PROMPT) == offered


def test_each_prompt_of_a_call_meets_its_own() -> None:
    first, second = ([1, 2], [3, 4])
    offered = [offered_room(f"cmpl-{HEADER}-{i}-1a2b3c4d", prompt) for i, prompt in enumerate((first, second))]
    handed_on = offered[0]  # a completion's answer has the first prompt's parameters only
    wanted = [wanted_room(handed_on, f"cmpl-{HEADER}-{i}-a1b2c3d4", prompt) for i, prompt in enumerate((first, second))]
    assert wanted == offered and offered[0] != offered[1]


def test_a_name_used_twice_does_not_mix_two_prompts() -> None:
    assert offered_room("chatcmpl-same-1a2b3c4d", [1]) != offered_room("chatcmpl-same-1a2b3c4d", [2])


def test_knows_at_once_that_the_other_side_had_another_prompt() -> None:
    offered = offered_room("cmpl-prefill-0-1a2b3c4d", [1, 2, 3])
    assert wanted_room(offered, "cmpl-decode-0-a1b2c3d4", [1, 2, 4]) is None


@pytest.mark.parametrize("header", ["x" * 5000, "naïve-日本語", "a/1/0123456789abcdef", ""])
def test_any_header_makes_a_room_that_fits_a_message(header: str) -> None:
    offered = offered_room(f"chatcmpl-{header}-1a2b3c4d", PROMPT)
    assert len(offered.encode()) <= 256
    for told in (offered, header):
        assert wanted_room(told, f"chatcmpl-{header}-a1b2c3d4", PROMPT) == offered
    assert 1 <= len(message_name(f"chatcmpl-{header}-1a2b3c4d", 12)) <= 256


@pytest.mark.parametrize("header", ["9" * 200_000, "1_" * 100_000, "x-" + "9" * 5000, "-99999999" * 20_000])
@pytest.mark.parametrize("kind", ["cmpl-{}-0", "chatcmpl-{}", "cmpl-{}", "{}"])
def test_no_header_holds_the_engine_up(kind: str, header: str) -> None:
    began = time.process_time()
    request_id = kind.format(header) + "-1a2b3c4d"
    offered = offered_room(request_id, PROMPT)
    assert len(offered) <= 256 and wanted_room(offered, request_id, PROMPT) == offered
    assert time.process_time() - began < 1, "half a minute, when each digit was looked at from each before it"


def test_names_of_messages_tell_attempts_apart() -> None:
    assert message_name("r") == "r" and message_name("r", 2) != message_name("r", 1) != message_name("r")


def request(prompt: list[int] | None, image: str = "", lora: str = "") -> SimpleNamespace:
    feature = SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=4))
    return SimpleNamespace(
        prompt_token_ids=prompt,
        prompt_embeds=None,
        mm_features=[feature] if image else [],
        lora_request=SimpleNamespace(lora_name=lora) if lora else None,
    )


def test_prompt_rooms_know_all_that_determines_the_kv() -> None:
    one = prompt_room(request(PROMPT))
    assert one == prompt_room(request(list(PROMPT)))
    others = [request([5, 6]), request(PROMPT, image="a"), request(PROMPT, image="b"), request(PROMPT, lora="a")]
    assert len({one, *map(prompt_room, others)}) == 5
    assert prompt_room(request(None)) is None
