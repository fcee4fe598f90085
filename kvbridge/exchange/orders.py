"""What the exchange asks of the data plane, and what that reports: one queue each way, in order. Records only. Pure.

A transfer is ordered once. After `Stop` there is always one `Quiet`, and nothing of that transfer after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge_proto.peer import Lease, Route

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable

# To the data plane:


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Put the chunks of a transfer that land in our slots into the engine's blocks, not before the fence says so.

    Given before the sender is asked for anything. It is over once all chunks are in the blocks.
    """

    transfer: str
    plan: Plan
    tables: Mapping[int, BlockTable]
    token: bytes
    source_boot: str
    sink_boot: str
    source_epoch: int
    sink_epoch: int
    digest_kind: str
    route: Route
    fence: int


@dataclass(frozen=True, slots=True)
class Lend:
    """The sender may write these slots, each once. Given before the sender hears of it."""

    transfer: str
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Begin nothing more of this transfer, and end what waits for the engine's fence. What is being moved goes on."""

    transfer: str
    code: str
    reason: str


# From it:


@dataclass(frozen=True, slots=True)
class Landed:
    """Writes under these leases have arrived whole, and are read no more; so many chunks of them are in the blocks."""

    transfer: str
    leases: tuple[Lease, ...]
    chunks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A chunk could not be taken over. Others of the transfer may be under way."""

    transfer: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """After `Stop`: the engine's blocks are not touched for this transfer, and will not be."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A notice came that no order waits for."""

    transfer: str
    slot: int


Report = Landed | Broken | Quiet | Dropped
