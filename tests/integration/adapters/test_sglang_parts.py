"""The parts of the SGLang adapter that need no SGLang: messages, who asks whom, names of prompts."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvbridge.adapters.engine.prompts import rendezvous
from kvbridge.adapters.sglang.messages import MESSAGE_BYTES, TAG, Asked, BadMessage, pack, shares, unpack
from kvbridge.adapters.sglang.metadata import Metadata
from kvbridge.adapters.sglang.prompts import prompt_digest, prompt_tokens, why_not_carried

ASKED = Asked(room=7, prompt="ab", first_token=16, endpoint="127.0.0.1", dst_port=4000, rank=1, ranks=2)


# Messages:


@pytest.mark.parametrize("message", [ASKED, Metadata(room=7, prompt="ab", fields=(b"first", b"", b"\0" * 64))])
def test_a_message_comes_as_it_went(message: Asked | Metadata) -> None:
    assert unpack(pack(message), type(message)) == message


@pytest.mark.proves("T13")
@pytest.mark.parametrize(
    "frames",
    [
        [],
        [TAG],
        [b"ABORT", b"7"],
        [TAG, b""],
        [TAG, b"\x91" * 2000],
        [TAG, msgspec.msgpack.encode(["asked", 7, "ab"])],
        [TAG, msgspec.msgpack.encode(["asked", 7, "ab", -1, "127.0.0.1", 4000, 1, 2])],
        [TAG, msgspec.msgpack.encode(["asked", 7, "ab", 16, "127.0.0.1", 4000, 1, 0])],
        [TAG, msgspec.msgpack.encode(["row", 7, "ab", "text"])],
        [TAG, bytes(MESSAGE_BYTES + 1)],
        [TAG, pack(ASKED)[1], b"more"],
    ],
    ids=range(11),
)
def test_what_is_no_message_is_said_to_be_none(frames: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        unpack(frames, Asked | Metadata)


@pytest.mark.proves("T13")
@pytest.mark.parametrize(("message", "kind"), [(ASKED, Metadata), (Metadata(7, "ab", (b"x",)), Asked)])
def test_what_the_other_side_hears_is_none_of_ours(message: Asked | Metadata, kind: type[Asked | Metadata]) -> None:
    with pytest.raises(BadMessage):
        unpack(pack(message), kind)


@pytest.mark.proves("T13")
def test_whatever_comes_is_a_message_or_none() -> None:
    numbers = random.Random(0)
    good = pack(ASKED)[1]
    for _ in range(20_000):
        frames = [numbers.randbytes(numbers.randrange(40)) for _ in range(numbers.randrange(4))]
        at = numbers.randrange(len(good))
        bent = good[:at] + numbers.randbytes(1) + good[at + 1 :]
        for each in (frames, [TAG, *frames], [TAG, bent], [TAG, good[:at]]):
            with contextlib.suppress(BadMessage):
                unpack(each, Asked | Metadata)


@pytest.mark.parametrize(("decode", "prefill"), list(itertools.product(range(1, 9), repeat=2)))
def test_every_rank_asks_and_every_rank_is_asked(decode: int, prefill: int) -> None:
    asked = [set(shares(rank, decode, prefill)) for rank in range(decode)]
    assert all(asked) and set.union(*asked) == set(range(prefill))
    assert sum(map(len, asked)) <= decode + prefill - 1, "no more messages than that takes"


# Names:


@dataclass
class Item:
    hash: int
    modality: str = "image"
    offsets: list[Any] = field(default_factory=lambda: [(3, 9)])


@dataclass
class Media:
    mm_items: list[Item]


@dataclass
class Req:
    """As much of SGLang's as decides the KV of a prompt."""

    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    lora_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    input_embeds: Any = None
    token_type_ids: Any = None
    multimodal_inputs: Media | None = None
    pd_rebootstrap_in_progress: bool = False


UNLIKE = {
    "plain": (Req([1, 2, 3]), ()),
    "other tokens": (Req([1, 2, 4]), ()),
    "fewer tokens": (Req([1, 2]), ()),
    "an adapter": (Req([1, 2, 3], lora_id="u1", extra_key="u1"), ("poet", "v1")),
    "another version of it": (Req([1, 2, 3], lora_id="u1", extra_key="u1"), ("poet", "v2")),
    "another adapter": (Req([1, 2, 3], lora_id="u2", extra_key="u2"), ("cook", "v1")),
    "an extra key": (Req([1, 2, 3], extra_key="tenant"), ()),
    "an adapter and an extra key": (Req([1, 2, 3], lora_id="u1", extra_key="tenantu1"), ("poet", "v1")),
    "a salt": (Req([1, 2, 3], cache_salt="tenant"), ()),
    "an image": (Req([1, 2, 3], multimodal_inputs=Media([Item(5)])), ()),
    "another image": (Req([1, 2, 3], multimodal_inputs=Media([Item(6)])), ()),
    "two images": (Req([1, 2, 3], multimodal_inputs=Media([Item(5), Item(6)])), ()),
    "types of tokens": (Req([1, 2, 3], token_type_ids=[0, 0, 1]), ()),
    "other types of tokens": (Req([1, 2, 3], token_type_ids=[0, 1, 1]), ()),
}


@pytest.mark.proves("G9")
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(UNLIKE, 2)))
def test_no_two_prompts_of_unlike_kv_have_one_name(one: str, other: str) -> None:
    first, second = (rendezvous(7, prompt_digest(*UNLIKE[name])) for name in (one, other))
    assert first != second


def test_what_is_of_no_account_for_the_kv_does_not_change_the_name() -> None:
    """Both engines number an adapter for themselves; what was said already is not part of a fresh prompt."""
    here = prompt_digest(Req([1, 2, 3], lora_id="u1", extra_key="tenantu1"), ("poet", "v1"))
    there = prompt_digest(Req([1, 2, 3], [9, 9], lora_id="u7", extra_key="tenantu7"), ("poet", "v1"))
    assert here == there


def test_what_nothing_tells_apart_stays_where_it_is() -> None:
    assert why_not_carried(Req([1, 2, 3])) == ""
    assert "embeddings" in why_not_carried(Req([1, 1, 1], input_embeds=[[0.5], [0.25], [1.0]]))


def test_a_prompt_that_is_prefilled_again_has_grown() -> None:
    """After a retraction the decode side asks for what it had said too; to the prefill side that is the prompt."""
    retracted = Req([1, 2, 3], [9, 8], pd_rebootstrap_in_progress=True)
    assert prompt_tokens(retracted) == [1, 2, 3, 9, 8]
    assert prompt_digest(retracted, ()) == prompt_digest(Req([1, 2, 3, 9, 8]), ())
