"""Rendezvous ids: equal requests meet, others never do. Ids are spelled as in vLLM 0.32."""

from __future__ import annotations

import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.adapters.engine.prompts import DIGEST_BYTES
from kvbridge.adapters.vllm.rendezvous import (
    Named,
    has_media_hashes,
    is_for,
    is_rendezvous,
    message_name,
    named,
    offered_rendezvous,
    prompt_digest,
    prompt_rendezvous,
    wanted_rendezvous,
    why_not_carried,
)

HEADER = "5d3c9f0e-8f1a-4a8e-9f0b-0a1b2c3d4e5f"


def media(
    identifier: str = "3f2a", offset: int = 4, length: int = 9, modality: str = "image", mm_hash: str = ""
) -> SimpleNamespace:
    """One image of a request; `mm_hash` leaves out an adapter of the vision tower, which `identifier` has in front."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position, modality=modality, mm_hash=mm_hash, data=None)


def adapter(name: str = "sql", path: str = "/adapters/sql", number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


def request(tokens: Any = (5, 6, 7), **more: Any) -> SimpleNamespace:
    """What rooms are made of, as vLLM's Request has it."""
    plain = {"prompt_embeds": None, "mm_features": [], "lora_request": None, "cache_salt": None}
    return SimpleNamespace(prompt_token_ids=tokens and list(tokens), **plain | more)


def digest(*tokens: int) -> str:
    return prompt_digest(request(tokens))


PROMPT = digest(5, 6, 7)
OTHER = digest(5, 6, 8)


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


# What the decode side does with what it was told: the room it wants (None: it computes at once), and whether it may
# decline the told one. Engines without a common id call one request P and D. What prefill offered under its prompt
# alone, because nobody had tagged it, nobody declines for others of the same prompt.
TOLD = {
    "one id": ("h/0/{A}", "cmpl-h-0-a1b2c3d4", "A", "h/0/{A}", True),
    "one id, a later prompt": ("h/0/{A}", "cmpl-h-2-a1b2c3d4", "B", "h/2/{B}", False),
    "one id, another prompt": ("h/0/{A}", "cmpl-h-0-a1b2c3d4", "B", None, True),
    "one id, a sample": ("h/0/{A}", "3_cmpl-h-0-a1b2c3d4", "A", "h/0/{A}", True),
    "one id, a sample of a later prompt": ("h/0/{A}", "3_cmpl-h-1-a1b2c3d4", "B", "h/1/{B}", False),
    "one id, chat": ("h/0/{A}", "chatcmpl-h-a1b2c3d4", "A", "h/0/{A}", True),
    "one id, another chat": ("h/0/{A}", "chatcmpl-h-a1b2c3d4", "B", None, True),
    "two ids": ("P/0/{A}", "cmpl-D-0-a1b2c3d4", "A", "P/0/{A}", False),
    "two ids, a later prompt": ("P/0/{A}", "cmpl-D-1-a1b2c3d4", "B", "P/1/{B}", False),
    "two ids, a later prompt that equals the first": ("P/0/{A}", "cmpl-D-1-a1b2c3d4", "A", "P/1/{A}", False),
    "two ids, a sample of a later prompt": ("P/0/{A}", "1_cmpl-D-1-a1b2c3d4", "B", "P/1/{B}", False),
    "two ids, another prompt: perhaps a sibling's": ("P/0/{A}", "cmpl-D-0-a1b2c3d4", "B", None, False),
    "two ids, chat": ("P/0/{A}", "chatcmpl-D-a1b2c3d4", "A", "P/0/{A}", False),
    "two ids, another chat": ("P/0/{A}", "chatcmpl-D-a1b2c3d4", "B", None, False),
    "two ids, a proxy that asks for each prompt by itself": ("P/2/{A}", "cmpl-D-0-a1b2c3d4", "A", "P/2/{A}", False),
    "two ids, another prompt, asked for by itself": ("P/2/{A}", "cmpl-D-0-a1b2c3d4", "B", None, False),
    "an id of the caller's own that ends like a place": ("job/7/{A}", "cmpl-job-7-a1b2c3d4", "A", "job/7/{A}", True),
    "both asked at once": ("h", "cmpl-h-1-a1b2c3d4", "B", "h/1/{B}", False),
    "both asked at once, two ids": ("P", "cmpl-D-1-a1b2c3d4", "B", "P/1/{B}", False),
    "both asked at once, an offline engine": ("17", "17-a1b2c3d4", "A", "17/0/{A}", False),
    "untagged": ("prompt-{A}", "cmpl-D-0-a1b2c3d4", "A", "prompt-{A}", False),
    "untagged, a sample": ("prompt-{A}", "1_chatcmpl-D-a1b2c3d4", "A", "prompt-{A}", False),
    "untagged, another prompt": ("prompt-{A}", "cmpl-D-0-a1b2c3d4", "B", None, False),
    "untagged, another chat": ("prompt-{A}", "chatcmpl-D-a1b2c3d4", "B", None, False),
    "untagged, a later prompt": ("prompt-{A}", "cmpl-D-1-a1b2c3d4", "B", "prompt-{B}", False),
    "an id of the caller's own": ("prompt-{A}", "chatcmpl-prompt-{A}-a1b2c3d4", "B", "prompt-{A}/0/{B}", False),
    "no prompt's room": ("prompt-{A}0", "cmpl-D-0-a1b2c3d4", "A", "prompt-{A}0/0/{A}", False),
}


@pytest.mark.proves("G11")
@pytest.mark.parametrize(("told", "request_id", "digest", "wants", "may_decline"), TOLD.values(), ids=TOLD)
def test_what_a_request_wants_and_what_it_may_decline(
    told: str, request_id: str, digest: str, wants: str | None, may_decline: bool
) -> None:
    of = {"A": PROMPT, "B": OTHER}
    told, request_id = told.format(**of), request_id.format(**of)
    assert wanted_rendezvous(told, request_id, 0, of[digest]) == (wants and wants.format(**of))
    assert is_for(told, request_id, 0) is may_decline
    assert is_rendezvous(told) is ("/" in told)


@pytest.mark.proves("G11")
@pytest.mark.parametrize("ids", [(HEADER, HEADER), ("made-by-prefill", "made-by-decode")], ids=["one id", "two ids"])
@pytest.mark.parametrize("prompts", [([1, 2], [3, 4], [5, 6]), ([1, 2], [1, 2], [5, 6])], ids=["unlike", "alike"])
def test_each_prompt_of_a_call_meets_its_own(ids: tuple[str, str], prompts: Any) -> None:
    digests = [digest(*prompt) for prompt in prompts]
    offered = [offered_rendezvous(f"cmpl-{ids[0]}-{i}-1a2b3c4d", each) for i, each in enumerate(digests)]
    handed_on = offered[0]  # a completion's answer has the first prompt's parameters only
    wanted = [wanted_rendezvous(handed_on, f"cmpl-{ids[1]}-{i}-a1b2c3d4", 0, each) for i, each in enumerate(digests)]
    assert wanted == offered and len(set(offered)) == 3
    assert not any(is_for(handed_on, f"cmpl-{ids[1]}-{i}-a1b2c3d4", 0) for i in (1, 2)), "the first one's, not theirs"


def test_a_header_that_looks_like_a_room_is_a_name() -> None:
    header = f"a/1/{OTHER}"
    offered = offered_rendezvous(f"chatcmpl-{header}-1a2b3c4d", PROMPT)
    assert wanted_rendezvous(header, f"chatcmpl-{header}-a1b2c3d4", 0, PROMPT) == offered
    assert not is_for(header, f"chatcmpl-{header}-a1b2c3d4", 0), "whose room that would be nobody knows"


@pytest.mark.parametrize("index", ["0", "9", "999999999"])
def test_a_told_room_of_any_length_makes_one_that_fits_a_message(index: str) -> None:
    told = f"{index}/{PROMPT}"
    told = "x" * (256 - len(told) - 1) + "/" + told
    for place in (0, 1, 999_999_999):
        room = wanted_rendezvous(told, f"cmpl-D-{place}-a1b2c3d4", 0, PROMPT)
        assert room and len(room) <= 256


LONG = ["9" * 200_000, "1_" * 100_000, "x-" + "9" * 5000, "-99999999" * 20_000, "x" * 5000]


@pytest.mark.parametrize("header", [*LONG, "naïve-日本語", f"a/1/{OTHER}", ""], ids=range(8))
@pytest.mark.parametrize("kind", ["cmpl-{}-0", "chatcmpl-{}", "cmpl-{}", "{}"])
def test_any_header_makes_a_room_that_fits_a_message_and_holds_up_nobody(kind: str, header: str) -> None:
    began = time.process_time()
    request_id = kind.format(header) + "-1a2b3c4d"
    offered = offered_rendezvous(request_id, PROMPT)
    assert len(offered.encode()) <= 256 and wanted_rendezvous(offered, request_id, 0, PROMPT) == offered
    assert 1 <= len(message_name(request_id)) <= 256
    assert time.process_time() - began < 1, "half a minute, when each digit was looked at from each before it"


UNLIKE = {
    "plain": request(),
    "longer": request((5, 6, 7, 0)),
    "shorter": request((5, 6)),
    "image": request(mm_features=[media()]),
    "another image": request(mm_features=[media("3f2b")]),
    "the image elsewhere": request(mm_features=[media(offset=5)]),
    "the image longer": request(mm_features=[media(length=10)]),
    "a video": request(mm_features=[media(modality="video")]),
    "two images": request(mm_features=[media(), media("3f2b", 14)]),
    "two images, the other way round": request(mm_features=[media("3f2b"), media("3f2a", 14)]),
    "the image under an adapter of its tower": request(mm_features=[media("sql:3f2a", mm_hash="3f2a")]),
    "adapter": request(lora_request=adapter()),
    "another adapter": request(lora_request=adapter("law")),
    "the adapter's name now means another": request(lora_request=adapter(path="/adapters/sql-v2")),
    "salt": request(cache_salt="s"),
    "another salt": request(cache_salt="t"),
    "a salt that spells an image": request(cache_salt="image3f2a49"),
    "an adapter that spells a salt": request(lora_request=adapter("salts", "")),
    "salt and adapter": request(lora_request=adapter(), cache_salt="s"),
    "salt and adapter, cut elsewhere": request(lora_request=adapter("sqls", "ql"), cache_salt="s"),
    "an adapter whose path spells a salt": request(lora_request=adapter("sql", "sqlsalts")),
}
LIKE = {
    "tokens in another list": (request(), request([5, 6, 7])),
    "an adapter under another number": (adapter(number=1), adapter(number=7)),
    "an adapter in another folder": (adapter(path="/adapters/sql"), adapter(path="/mnt/nfs/sql/")),
    "no salt": (request(cache_salt=None), request(cache_salt="")),  # as in vLLM's prefix cache
}


@pytest.mark.proves("G9", "T7")
def test_no_two_requests_of_unlike_kv_meet_in_any_way() -> None:
    digests = [prompt_digest(each) for each in UNLIKE.values()]
    for of in (
        prompt_rendezvous,
        lambda digest: offered_rendezvous("chatcmpl-one-1a2b3c4d", digest),
        lambda digest: wanted_rendezvous("one", "chatcmpl-one-1a2b3c4d", 0, digest),
    ):
        names = {name: of(each) for name, each in zip(UNLIKE, digests, strict=True)}
        assert len(set(names.values())) == len(UNLIKE), names
    for mine, theirs in product(digests, repeat=2):
        for told in (offered_rendezvous("cmpl-one-0-1a2b3c4d", theirs), prompt_rendezvous(theirs)):
            assert wanted_rendezvous(told, "cmpl-two-0-1a2b3c4d", 0, mine) == (told if mine == theirs else None)


@pytest.mark.parametrize("name", LIKE)
def test_what_differs_between_engines_but_not_in_kv_keeps_nobody_apart(name: str) -> None:
    one, other = (each if hasattr(each, "cache_salt") else request(lora_request=each) for each in LIKE[name])
    assert prompt_digest(one) == prompt_digest(other)


@pytest.mark.proves("T7")
def test_a_digest_is_long_enough_that_nobody_finds_two_prompts_of_one() -> None:
    assert len(PROMPT) == 2 * DIGEST_BYTES and DIGEST_BYTES >= 16


@pytest.mark.proves("G9")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (request(), ""),
        (request(mm_features=[media()], lora_request=adapter(), cache_salt="s", resumable=False), ""),
        (request(None, prompt_embeds=object()), "embeddings"),
        (request((0, 0, 0), prompt_embeds=object()), "embeddings"),  # text and embeddings in one prompt
        (request(resumable=True), "grow"),
    ],
)
def test_what_nothing_tells_apart_stays_where_it_is(given: Any, said: str) -> None:
    assert bool(why_not_carried(given)) == bool(said) and said in why_not_carried(given)


@pytest.mark.proves("G9")
@pytest.mark.parametrize(
    ("has_media", "cache_gb", "prefix_caching", "has_hashes"),
    [
        (True, 4, True, True),
        (True, 0, True, True),
        (True, 4, False, True),
        (True, 0, False, False),
        (False, 0, 0, True),
    ],
)
def test_images_that_are_only_numbered_stay_where_they_are(
    has_media: bool, cache_gb: float, prefix_caching: bool, has_hashes: bool
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb) if has_media else None
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert has_media_hashes(config) is has_hashes
    image, text = request(mm_features=[media("renderer0-mm-3-image-0")]), request()
    assert bool(why_not_carried(image, has_hashes)) is not has_hashes and not why_not_carried(text, has_hashes)
