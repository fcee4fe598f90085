"""Whatever arrives, the codec raises only BadFrame, and memory stays in proportion to the frame.

Frames at random are in tests/integration/fuzz/test_fuzz.py.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgpack
import msgspec
import pytest
from kvbridge_proto import engine, peer
from kvbridge_proto.common import MAX_BLOCKS, Blocks
from kvbridge_proto.framing import BadFrame, Limits, decode, encode, unpack

from tests.unit.proto.samples import BODIES, TO_AGENT, enveloped, frames, tag

FRAMES = frames()
WANT = next(message for message in TO_AGENT if isinstance(message, engine.Want))


def plain(message: Any) -> Any:
    return msgpack.unpackb(encode(message))


def code_of(frame: bytes, kind: Any, **limits: int) -> str:
    with pytest.raises(BadFrame) as caught:
        decode(frame, kind, Limits(**limits))
    assert str(caught.value)
    return caught.value.code


@pytest.mark.parametrize("name", FRAMES)
def test_refuses_a_frame_truncated_at_any_length(name: str) -> None:
    message, kind = FRAMES[name]
    frame = encode(message)
    for size in range(len(frame)):
        assert code_of(frame[:size], kind) == "frame_malformed"


@pytest.mark.parametrize("name", FRAMES)
def test_refuses_bytes_after_the_message(name: str) -> None:
    message, kind = FRAMES[name]
    assert code_of(encode(message) + b"\x00", kind) == "frame_malformed"


@pytest.mark.parametrize("name", FRAMES)
def test_survives_any_byte_changed_to_any_of_a_few(name: str) -> None:
    message, kind = FRAMES[name]
    frame = bytearray(encode(message))
    for place, was in enumerate(frame):
        for other in (0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC9, 0xCB, 0xD6, 0xDB, 0xDD, 0xDF, 0xFF):
            frame[place] = other
            _only_bad_frame(bytes(frame), kind)
        frame[place] = was


TOO_MUCH = {
    "too large": (b"\x00" * 2000, dict(frame_bytes=1999), "frame_too_large"),
    "long text": (msgpack.packb("x" * 101), dict(text_bytes=100), "frame_malformed"),
    "long bytes": (msgpack.packb(b"x" * 101), dict(binary_bytes=100), "frame_malformed"),
    "long array": (msgpack.packb([0] * 101), dict(array_items=100), "frame_malformed"),
    "long map": (msgpack.packb({str(i): 0 for i in range(101)}), dict(map_items=100), "frame_malformed"),
    "deep arrays": (b"\x91" * 3000 + b"\x00", {}, "frame_too_deep"),
    "deep maps": (b"\x81\xa1k" * 3000 + b"\x00", {}, "frame_too_deep"),
    "reserved byte": (b"\xc1", {}, "frame_malformed"),
    "empty": (b"", {}, "frame_malformed"),
    "ext": (msgpack.packb(msgpack.ExtType(5, b"abc")), {}, "frame_malformed"),
    "ext of nothing": (b"\xc7\x00\xff", {}, "frame_malformed"),
    "ext all ones": (b"\xc7\x0c\xff" + b"\xff" * 12, {}, "frame_malformed"),
    "timestamp": (msgpack.packb(msgpack.Timestamp(1, 2)), {}, "frame_malformed"),
    "text that is not utf-8": (b"\xa2\xff\xfe", {}, "frame_malformed"),
    "number as a key": (b"\x81\x01\x02", {}, "frame_malformed"),
    "announced 4 GiB array": (b"\xdd\xff\xff\xff\xff", {}, "frame_malformed"),
    "announced 4 GiB text": (b"\xdb\xff\xff\xff\xff", {}, "frame_malformed"),
    "no map": (msgpack.packb([1, 2, 3]), {}, "message_invalid"),
    "announced 4 GiB map": (b"\xdf\xff\xff\xff\xff", {}, "frame_malformed"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_refuses_what_is_too_much(case: str) -> None:
    frame, limits, code = TOO_MUCH[case]
    assert code_of(frame, engine.ToAgent, **limits) == code


def test_limits_are_inclusive() -> None:
    assert unpack(msgpack.packb([0] * 100), Limits(array_items=100)) == (0,) * 100
    assert unpack(b"\xa3abc", Limits(frame_bytes=4, text_bytes=3)) == "abc"


def test_holds_a_million_token_want_of_one_token_blocks() -> None:
    ids = tuple(range(MAX_BLOCKS))
    want = msgspec.structs.replace(WANT, blocks=(Blocks(0, 0, ids),), end_token=MAX_BLOCKS)
    assert decode(encode(want), engine.ToAgent) == want


ATTACH = next(message for message in TO_AGENT if isinstance(message, engine.Attach))
OFFER = next(message for message in TO_AGENT if isinstance(message, engine.Offer))
CLAIM = next(body for body in BODIES if isinstance(body, peer.Claim))
RENEW = next(body for body in BODIES if isinstance(body, peer.Renew))
RESCALE = engine.Rescale(revision=2, scales=(engine.Scales(0, "k", (0.5,)),))
# What a message has instead, or lacks (...).
WRONG: dict[Any, dict[str, dict[str, Any]]] = {
    WANT: {
        "unknown tag": {"type": "atach"},
        "no tag": {"type": ...},
        "tag of another type": {"type": 7},
        "tag of the other direction": {"type": "done"},
        "missing field": {"rendezvous": ...},
        "text for a number": {"end_token": "40"},
        "half a token": {"end_token": 40.5},
        "negative token": {"first_token": -1},
        "nothing for a number": {"end_token": None},
        "number for a text": {"rendezvous": 7},
        "empty name": {"request": ""},
        "long name": {"request": "r" * 257},
        "bytes for a text": {"rendezvous": b"rendezvous"},
        "negative block": {"blocks": [[0, 0, [-1]]]},
        "block id beyond 31 bits": {"blocks": [[0, 0, [1 << 31]]]},
        "block table too short": {"blocks": [[0, 0]]},
        "too many groups": {"blocks": [[0, 0, []]] * 257},
    },
    RESCALE: {
        "revision nought": {"revision": 0},
        "no revision": {"revision": ...},
        "no scales of a plane": {"scales": [[0, "k", []]]},
        "too many scales of a plane": {"scales": [[0, "k", [1.0] * 4097]]},
        "text for a scale": {"scales": [[0, "k", ["1"]]]},
        "scales cut short": {"scales": [[0, "k"]]},
        "layer beyond 16 bits": {"scales": [[1 << 16, "k", [1.0]]]},
        "long part": {"scales": [[0, "k" * 33, [1.0]]]},
    },
    CLAIM: {
        "negative slot": {"leases": [[-1, 1]]},
        "slot beyond 20 bits": {"leases": [[1 << 20, 1]]},
        "generation nought": {"leases": [[0, 0]]},
        "generation beyond 62 bits": {"leases": [[0, 1 << 62]]},
        "too many leases": {"leases": [[0, 1]] * 4097},
        "too many takes": {"takes": [[0, 1, 0, 1]] * 4097},
        "negative layer": {"takes": [[-1, 1, 0, 1]]},
        "take cut short": {"takes": [[0, 1, 0]]},
        "negative tokens": {"first_token": -1},
        "short token": {"token": b"t" * 15},
        "long token": {"token": b"t" * 17},
        "no receivers": {"receivers": 0},
        "negative receiver": {"receiver": -1},
        "long rendezvous": {"rendezvous": "r" * 257},
        "long transfer": {"transfer": "t" * 65},
    },
    RENEW: {"renewal nought": {"number": 0}, "renewal that its answer cannot name": {"number": (1 << 40) + 1}},
    ATTACH: {
        "a policy that is none": {"policy": "ignore"},
        # Which tokens are kept is full or sliding there; the layer says that its rows are latents.
        "a group of latents": {
            "pool": plain(ATTACH.pool) | {"groups": [{"kind": "mla", "block_tokens": 1, "blocks": 1}]}
        },
    },
}
# A year, no number, endless, negative, larger than anything.
NO_TIMES = [3.2e7, float("nan"), float("inf"), -1.0, 1e300]
for timed, name in ((WANT, "deadline_s"), (CLAIM, "deadline_s"), (OFFER, "hold_s")):
    WRONG.setdefault(timed, {}).update({f"{name} of {each}": {name: each} for each in NO_TIMES})
CASES = [(message, case) for message, cases in WRONG.items() for case in cases]


@pytest.mark.proves("T19")
@pytest.mark.parametrize(("message", "case"), CASES, ids=[f"{tag(message)}: {case}" for message, case in CASES])
def test_refuses_a_message_with_such_a_field(message: Any, case: str) -> None:
    value = plain(message)
    value = {k: v for k, v in {**value, **WRONG[message][case]}.items() if v is not ...}
    whole, kind, good = value, engine.ToAgent, message
    if message in BODIES:
        good = enveloped(message)
        whole, kind = plain(good) | {"body": value}, peer.Envelope
    assert decode(encode(good), kind)
    assert code_of(msgpack.packb(whole), kind) == "message_invalid"


def test_a_policy_that_is_not_named_is_to_requantize() -> None:
    attach = plain(ATTACH)
    del attach["policy"]
    assert decode(msgpack.packb(attach), engine.ToAgent).policy == "requantize"


def test_refusal_names_the_field() -> None:
    value = plain(WANT) | {"end_token": -5}
    with pytest.raises(BadFrame, match="end_token"):
        decode(msgpack.packb(value), engine.ToAgent)


@pytest.mark.parametrize("name", FRAMES)
def test_ignores_fields_it_does_not_know(name: str) -> None:
    """The evolution rule: a newer side may add fields with defaults without a new version."""
    message, kind = FRAMES[name]
    assert decode(msgpack.packb(_with_extras(plain(message))), kind) == message


COUNTS = ("counters", "computed", "released")


def _with_extras(value: Any) -> Any:
    """`value` with a field added to every record of it; positional records are only added to at the root.

    `COUNTS` are no records: their keys are names of what is counted.
    """
    if isinstance(value, dict):
        grown = {k: v if k in COUNTS else _with_extras(v) for k, v in value.items()}
        return {**grown, "new_in_v9": {"a": [1]}}
    if isinstance(value, list) and value and all(isinstance(item, dict | None) for item in value):
        return [_with_extras(item) for item in value]
    return value


def test_ignores_elements_it_does_not_know_at_the_end_of_positional_records() -> None:
    value = plain(WANT)
    value["blocks"] = [[*piece, "new", {"x": 1}] for piece in value["blocks"]]
    assert decode(msgpack.packb(value), engine.ToAgent) == WANT


def test_a_key_may_not_be_bytes() -> None:
    value = {key.encode(): item for key, item in plain(WANT).items()}
    assert code_of(msgpack.packb(value), engine.ToAgent) == "message_invalid"


def _only_bad_frame(frame: bytes, kind: Any) -> None:
    try:
        message = decode(frame, kind)
    except BadFrame:
        return
    assert decode(encode(message), kind) == message or "nan" in repr(message)


BOMB = """
import resource, struct, sys
from kvbridge_proto.framing import BadFrame, unpack
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = 1 << 20
header = bytes.fromhex(sys.argv[1]) + struct.pack(">I", size - 6)
frame = header * 500
try:
    unpack(frame + bytes(size - len(frame)))
except BadFrame as bad:
    print(bad.code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.proves("T3")
@pytest.mark.parametrize("header", ["dd", "df"])
def test_announced_lengths_cost_no_memory(header: str) -> None:
    """500 nested arrays (maps) of a million items each, none of them there: 4 GB with msgpack alone before 1.2.4."""
    told = subprocess.run([sys.executable, "-c", BOMB, header], capture_output=True, text=True, check=True)
    code, grown_kib = told.stdout.split()
    assert code == "frame_malformed"
    assert int(grown_kib) < 16 * 1024
