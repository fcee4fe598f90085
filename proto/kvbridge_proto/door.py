"""Agent <-> agent messages of one host, over the sender's door: handles to its engine's memory. Pure.

One connection is one epoch of one engine's memory in one receiver. It lasts as long as the memory is mapped there.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .common import VersionRange
from .engine import Descriptors, Refused
from .pool import Count, Handle, Name

DOOR_SUFFIX = ".door"  # a receiver connects to no socket without it, whatever path it is told
TOKEN_BYTES = 32
SessionName = Annotated[str, Meta(min_length=1, max_length=128)]
Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Ticket(Struct, frozen=True, kw_only=True):
    """Where the handles of one epoch are handed over, once, to the agent with this `token`. Never leaves the session.

    Only for agents of the same `machine`, which is its kernel's boot id. `path` ends with DOOR_SUFFIX. In another
    container the path may lead to another socket, or to none: `socket` is what `stat` says of the right one (device and
    inode, in hexadecimal, joined by a dot), "" from an agent that does not say.
    """

    machine: Name
    path: Annotated[str, Meta(min_length=1, max_length=107)]
    session: SessionName
    epoch: Count
    token: Token
    socket: Annotated[str, Meta(max_length=64)] = ""


class OpenMemory(Struct, frozen=True, kw_only=True, tag="open_memory"):
    """Hand over the memory of your engine, as a ticket promised. Answered by MemoryOpened or Refused.

    `agent` is my name, for people. I say nothing else on this connection, and end it once the memory is unmapped.
    """

    versions: VersionRange
    session: SessionName
    epoch: Count
    token: Token
    agent: Name


class MemoryOpened(Struct, frozen=True, kw_only=True, tag="memory_opened"):
    """The handles. Their fds come with this message, those of shared memory for reading only.

    `pipe` is the fd of a unix stream socket, if the sender gives one: envelopes of the session's link may go by it.
    `fence` is that of the engine's fence, if it has one that can be given for reading only.
    """

    version: int
    epoch: Count
    handles: Annotated[tuple[Handle, ...], Meta(max_length=4096)]
    pipe: Count | None = None
    fence: Count | None = None


class MemoryEnding(Struct, frozen=True, kw_only=True, tag="memory_ending"):
    """Begin no new read; unmap the memory when none is under way, and end the connection."""

    reason: Annotated[str, Meta(max_length=1024)]


ToDoor = OpenMemory
FromDoor = Descriptors | MemoryOpened | MemoryEnding | Refused
