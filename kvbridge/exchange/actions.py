"""What the exchange asks its shell to do. Records only; the shell does them in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge_proto.engine import ToEngine
from kvbridge_proto.peer import Body, Sum
from kvbridge_proto.peer import Lease as SlotLease

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from .orders import Lend, ReceiveOrder, Stop
from .reading import Lease
from .session import Whose
from .slots import LocalSlot


@dataclass(frozen=True, slots=True)
class Reach:
    """Open a session with the agent at this address, or say at once that there is one."""

    address: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Send Hello again to a peer whose engine had not yet named all its ranks."""

    address: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the peer: an address we dialled (sink), or the boot of one that dialled us (source)."""

    peer: str
    body: Body


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to our engine."""

    message: ToEngine


@dataclass(frozen=True, slots=True)
class Ship:
    """Gather a chunk into our slot `local`, then write it into the peer's leased slot, notice with it.

    On the direct route the gather is the write. Nothing is read before the engine's fence has reached `fence`.
    `request` is our engine's name for what it has offered.
    """

    transfer: str
    request: str
    boot: str
    plan: Plan
    tables: Mapping[int, BlockTable]
    chunk: int
    local: LocalSlot
    lease: SlotLease
    token: bytes
    sink_epoch: int
    digest_kind: str
    fence: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Read chunks [first_chunk, end_chunk) out of the blocks of the sender's engine into ours, on the route `pull`.

    Not before the fence says so. `peer_tables` are of the engine `whose` memory that is, `tables` of ours.
    What was read after the end of `lease` does not count. Chunks that are `compared` are digested as they are read.
    """

    transfer: str
    whose: Whose
    plan: Plan
    peer_tables: Mapping[int, BlockTable]
    tables: Mapping[int, BlockTable]
    first_chunk: int
    end_chunk: int
    lease: Lease
    fence: int
    compared: frozenset[int] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Of all its chunks."""
        return sum(self.plan.chunk(index).size_bytes for index in range(self.first_chunk, self.end_chunk))


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest a chunk that its receiver has read, `read` being what it found. It takes no slot.

    Its receiver was told of the blocks, so the engine's fence has reached them. `request` is as in Ship.
    """

    transfer: str
    request: str
    plan: Plan
    tables: Mapping[int, BlockTable]
    read: Sum


@dataclass(frozen=True, slots=True)
class Watch:
    """Say when our engine's fence has reached this count: readers wait for what was computed until then."""

    fence: int


@dataclass(frozen=True, slots=True)
class Recall:
    """End chunks of this transfer that still wait for the engine's fence: they have touched nothing, and are reported
    as ended with this code and reason. Chunks that are being moved go on."""

    transfer: str
    code: str
    reason: str


Action = Reach | Ask | Send | Tell | ReceiveOrder | Lend | Stop | Ship | Pull | Digest | Watch | Recall
