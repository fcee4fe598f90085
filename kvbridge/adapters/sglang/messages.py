"""Messages between kvbridge's adapters in two SGLang servers, over SGLang's own control sockets. Pure.

The KV goes through the agents. These messages carry the question that starts a prefill (`Asked`), and
the answer's first token (`Metadata` in metadata.py). All input comes from the network: an unreadable message raises
BadMessage, and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")
TAG = b"KVBRIDGE"
STATUS_TAG = b"KVBRIDGE_STATUS"
MESSAGE_BYTES = 16 << 20
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Text = Annotated[str, Meta(max_length=256)]
Host = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_.:%\[\]-]+\Z")]


class BadMessage(Exception):
    """The frames are not one of our messages."""


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Decode to prefill: we have pages for this prompt from `first_token` on. `ranks` of our ranks send you this.

    `endpoint` and `dst_port` are where the answer goes.
    """

    room: int
    prompt: Text
    first_token: Count
    endpoint: Host
    dst_port: Port
    rank: Count
    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]


def pack(message: msgspec.Struct) -> list[bytes]:
    return [TAG, msgspec.msgpack.encode(message)]


def unknown(frames: Sequence[bytes]) -> BadMessage:
    """The error for frames of an unknown kind."""
    return BadMessage(f"{len(frames)} frames beginning with {bytes(frames[0][:32]) if frames else b''!r}")


def unpack(frames: Sequence[bytes], kind: type[T] | UnionType) -> T:
    """Decode a message of this kind, or of one of these. Raises BadMessage."""
    if len(frames) != 2 or frames[0] != TAG or len(frames[1]) > MESSAGE_BYTES:
        raise unknown(frames)
    try:
        return msgspec.msgpack.decode(frames[1], type=kind)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise BadMessage(str(error)) from error


def shares(mine: int, size: int, theirs: int) -> range:
    """Which of the other side's `theirs` ranks our rank `mine` of `size` talks to. Every rank gets a partner.

    >>> [list(shares(mine, 2, 3)) for mine in range(2)]
    [[0, 1], [1, 2]]
    >>> [list(shares(mine, 4, 2)) for mine in range(4)]
    [[0], [0], [1], [1]]
    """
    return range(mine * theirs // size, -(-(mine + 1) * theirs // size))
