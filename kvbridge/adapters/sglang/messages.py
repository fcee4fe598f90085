"""What kvbridge's halves in two SGLang servers say to each other over SGLang's own control sockets. Pure.

The KV goes through the agents. Here go the question that starts a prefill, and the auxiliary row: what SGLang's decode
side must know besides the KV (the first token, its log-probabilities, ...), one piece of bytes for each of its buffers.
Everything comes from the network: what cannot be read raises BadMessage, and is nobody's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

TAG = b"KVBRIDGE"
STATUS_TAG = b"KVBRIDGE_STATUS"
MOST_BYTES = 16 << 20
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Text = Annotated[str, Meta(max_length=256)]


class BadMessage(Exception):
    """What came is no message of ours."""


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Decode to prefill: I have places for this prompt from `first_token` on; `ranks` of my engine ask you so.

    `endpoint` and `dst_port` are where the answer goes (SGLang's names: its own code reads them).
    """

    room: int
    prompt: Text
    first_token: Count
    endpoint: Text
    dst_port: Port
    rank: Count
    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]

    @property
    def is_dummy(self) -> bool:
        """SGLang's word for a rank that asks without taking anything; ours all want the auxiliary row."""
        return False


class Row(msgspec.Struct, frozen=True, array_like=True, tag="row"):
    """Prefill to decode: the auxiliary row of this prompt."""

    room: int
    prompt: Text
    fields: Annotated[tuple[bytes, ...], Meta(max_length=256)]


_decoder: msgspec.msgpack.Decoder[Asked | Row] = msgspec.msgpack.Decoder(Asked | Row)


def pack(message: Asked | Row) -> list[bytes]:
    return [TAG, msgspec.msgpack.encode(message)]


def unknown(frames: Sequence[bytes]) -> BadMessage:
    """What came is nothing that we know."""
    return BadMessage(f"{len(frames)} frames beginning with {bytes(frames[0][:32]) if frames else b''!r}")


def unpack(frames: Sequence[bytes]) -> Asked | Row:
    """Raises BadMessage."""
    if len(frames) != 2 or frames[0] != TAG or len(frames[1]) > MOST_BYTES:
        raise unknown(frames)
    try:
        return _decoder.decode(frames[1])
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # text that is no UTF-8 is a ValueError
        raise BadMessage(str(error)) from error


def shares(mine: int, size: int, theirs: int) -> range:
    """Which of `theirs` ranks rank `mine` of `size` speaks to, so that each of either side is spoken to by one or more.

    >>> [list(shares(mine, 2, 3)) for mine in range(2)]
    [[0, 1], [1, 2]]
    >>> [list(shares(mine, 4, 2)) for mine in range(4)]
    [[0], [0], [1], [1]]
    """
    return range(mine * theirs // size, -(-(mine + 1) * theirs // size))
