"""Agent <-> agent messages, over ZeroMQ, and the notice that travels with the data. Pure.

The receiver's agent dials the sender's; every message goes in an `Envelope` that names both incarnations.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from .common import AgentCard, Blocks, Code, Incarnation, Prefixes, Ranks, Reasons, RendezvousId, Seconds, VersionRange
from .door import Ticket
from .pool import Bytes, Count, Name, PartName, Pool, Positive

TransferId = Annotated[str, Meta(min_length=1, max_length=64)]
Digest = Annotated[str, Meta(max_length=64)]
Route = Literal["pull", "direct", "nixl", "host"]  # from best to worst
ROUTES: tuple[Route, ...] = get_args(Route)

# Lanes of the slot that probes are written to: this many senders may prove their routes at once.
PROBE_LANES = 64
MAX_HOLD_RENDEZVOUS = 1024  # in one message
MAX_SUMS = 1024  # in one message
LINK_OVER = 1 << 40  # the number of a Goodbye that ends its link, whatever number comes next


class FabricCard(Struct, frozen=True, kw_only=True):
    """How to reach an agent's staging. `descriptor` is the fabric's own; slot i starts at `base + i * slot_bytes`.

    One more slot follows the others, cut into PROBE_LANES lanes: only probes are written there. `name` is what the
    descriptor calls this staging: the agent's incarnation, perhaps with a dot and more behind it. An agent that has no
    slots yet says of which kind, in which memory and how large they would be.
    """

    kind: Name
    name: Name
    memory: Literal["dram", "vram"] = "dram"
    descriptor: Annotated[bytes, Meta(max_length=1 << 16)]
    base: Bytes
    slot_bytes: Positive
    slots: Count


class DeviceCard(Struct, frozen=True, kw_only=True):
    """The GPU that holds a staging, for agents of the same machine.

    `machine` is its kernel's boot id, `payload` the 64-byte CUDA IPC handle of the allocation that begins at the card's
    `base`.
    """

    machine: Name
    uuid: Name
    payload: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """Receiver to sender: who I am, my engine's pool, where you may write. Answered by Welcome or Refuse.

    `fabric` is my staging, `host` its twin in host memory if there is one, `device` the GPU it is on. The sender
    chooses a route and proves it in lane `probe_lane` before it sends Welcome; `pull` it only names, as I prove that.
    `machine` is the boot id of my kernel, "" if I cannot read it. A sender with the same one can open its memory door
    for me, unless `shares_memory` is false.

    `address` is how I reached you: one session is enough, whatever addresses you have. `serial` numbers the
    connections that I made: of those at one address the latest counts. I have given up all before `oldest`, except
    this one. With `moves_units` I plan to move whole units of tokens between blocks of different sizes, if you do too.
    With `reads_ahead` I want to hear what my claims may ask for (Announce).
    """

    versions: VersionRange
    agent: AgentCard
    epoch: Count
    pool: Pool
    fabric: FabricCard
    digests: Annotated[tuple[Name, ...], Meta(max_length=16)]
    host: FabricCard | None = None
    device: DeviceCard | None = None
    routes: Annotated[tuple[Route, ...], Meta(max_length=len(ROUTES))] = ("direct", "nixl", "host")
    machine: Annotated[str, Meta(max_length=256)] = ""
    probe_lane: Count = 0
    address: Annotated[str, Meta(max_length=256)] = ""
    serial: Count = 0
    oldest: Count = 0
    shares_memory: bool = True
    moves_units: bool = False
    reads_ahead: bool = False


class Probe(Struct, frozen=True, kw_only=True):
    """What the sender wrote into the receiver's `lane` to prove its route: `size_bytes` of SHAKE128 of the seed."""

    lane: Count
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]
    size_bytes: Count
    bytes_per_s: Annotated[float, Meta(ge=0)]


class ProcessCard(Struct, frozen=True, kw_only=True):
    """A process, as those of its PID namespace see it. `started` tells it from others that have the number later.

    It is the 22nd field of /proc/PID/stat: clock ticks since the boot.
    """

    pid: Positive
    started: Count


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """Sender to receiver: agreed. `ranks` are the agents of my whole engine, as far as it has told me.

    `slot_bytes` bounds the chunks of every plan of this session: the smaller of both stagings' slots. `route` is how
    the chunks will come, `why` says what stood against the better ones, `probe` is what the receiver must find. On the
    route `pull` the receiver opens `door` instead, and says Hello again without that route if it cannot. `machine` is
    as in Hello. `namespaces` are the inode numbers of my PID and my IPC namespace, if I can read them: who has neither
    in common with me, and is not written by `direct`, knows that I write through its fabric only. `process` is mine:
    who shares my PID namespace can see its end, after which I write nothing. `moves_units` is as in Hello. With
    `takes_kept` my engine wants to hear what yours keeps (Keeps).
    """

    version: int
    agent: AgentCard
    epoch: Count
    pool: Pool
    digest: Name
    slot_bytes: Positive
    ranks: Ranks
    route: Route = "nixl"
    why: Annotated[str, Meta(max_length=1024)] = ""
    probe: Probe | None = None
    door: Ticket | None = None
    machine: Annotated[str, Meta(max_length=256)] = ""
    namespaces: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()
    process: ProcessCard | None = None
    moves_units: bool = False
    takes_kept: bool = False


class Refuse(Struct, frozen=True, kw_only=True, tag="refuse"):
    """A session or transfer is refused. `about` names the transfer, or is empty for the session."""

    code: Code
    reasons: Reasons
    about: Name = ""


class Take(Struct, frozen=True, array_like=True):
    """Rows a receiver takes from one sender: layers [first_layer, end_layer) x global heads [first_head, end_head).

    `part` is the part whose rows they are, or empty for every part that the receiver has of these layers.
    """

    first_layer: Count
    end_layer: Count
    first_head: Count
    end_head: Count
    part: PartName = ""


class SlotLease(Struct, frozen=True, array_like=True):
    """A slot of the receiver's staging, lent for one write under one generation."""

    slot: Annotated[int, Meta(ge=0, lt=1 << 20)]
    generation: Annotated[int, Meta(ge=1, lt=1 << 62)]


Leases = Annotated[tuple[SlotLease, ...], Meta(max_length=4096)]
Tables = Annotated[tuple[Blocks, ...], Meta(max_length=256)]


class Claim(Struct, frozen=True, kw_only=True, tag="claim"):
    """Receiver to sender: I take these rows of this rendezvous. Sent to every rank of the sender engine.

    `want` is one name for all `receivers` ranks of the receiver engine, so that the sender knows when all have claimed.
    No takes means that this receiver needs nothing from you. `plan` is the digest of the plan that the receiver
    derived. `token` must come back in every notice. With `is_offered` every offer under this id was made before: the
    claim is refused if none is there for this want, instead of waiting for one (see `Want`).
    """

    transfer: TransferId
    want: Name
    receiver: Count
    receivers: Positive
    rendezvous: RendezvousId
    sender_epoch: Count
    receiver_epoch: Count
    first_token: Count
    end_token: Count
    takes: Annotated[tuple[Take, ...], Meta(max_length=4096)]
    plan: Digest
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    leases: Leases
    deadline_s: Seconds
    is_offered: bool = False


class BlockTables(Struct, frozen=True, kw_only=True, tag="tables"):
    """Sender to receiver, on the route `pull`: tokens up to `tokens` of this transfer lie in these blocks; read them.

    The answer to the claim (`renewal` 0) or to the renewal of that number, and sent again when more tokens are there.
    `blocks` go on where those of the last one ended. With `is_last` no more will come. The lease begins when the claim
    or renewal is sent; what was read counts if it was read before the lease ended. `announced` is the number of the
    last Announce of this offer, 0 if there was none: what was read ahead by that one counts as if it was read now.
    """

    transfer: TransferId
    tokens: Count
    is_last: bool
    renewal: Count
    blocks: Tables = ()
    announced: Count = 0


class Announce(Struct, frozen=True, kw_only=True, tag="announce"):
    """Sender to receiver, on the route `pull`, unasked: all that I offer under this id lies in these blocks.

    They are the tokens [first_token, tokens), computed once my engine's fence, whose page came by the door, has reached
    `fence`; 0: they are computed. A claim may be read ahead of my answers to it. That counts only if the first one has
    this `number`.
    """

    number: Positive
    rendezvous: RendezvousId
    first_token: Count
    tokens: Count
    fence: Count
    blocks: Tables


class Renew(Struct, frozen=True, kw_only=True, tag="renew"):
    """Receiver to sender, on the route `pull`: I am still reading. Answered by BlockTables if the blocks are there.

    `number` counts the renewals of this transfer from 1.
    """

    transfer: TransferId
    number: Positive


class Sum(Struct, frozen=True, array_like=True):
    """The sum64 of a chunk as it would be in a slot."""

    chunk: Count
    digest: Annotated[int, Meta(ge=0)]  # 64 bits, as in Notice


Sums = Annotated[tuple[Sum, ...], Meta(min_length=1, max_length=MAX_SUMS)]


class Check(Struct, frozen=True, kw_only=True, tag="check"):
    """Receiver to sender, on the route `pull`: digests of what I read of these chunks. Each chunk once.

    Answered by Checked; the receiver says Settled only after that.
    """

    transfer: TransferId
    digests: Sums


class Checked(Struct, frozen=True, kw_only=True, tag="checked"):
    """Sender to receiver: digests of what is in my engine's blocks."""

    transfer: TransferId
    digests: Sums


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """Sender to receiver: chunks [0, chunks) of this transfer can be gathered; lend slots."""

    transfer: TransferId
    chunks: Count


class Grant(Struct, frozen=True, kw_only=True, tag="grant"):
    """Receiver to sender: more slots for this transfer."""

    transfer: TransferId
    leases: Leases


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """Receiver to sender: stop. Answered by Drained, once no write of this transfer is under way.

    On the route `pull` it also says that nothing of this transfer is being read any more. With the code `forgotten` it
    asks about a transfer that was claimed by an earlier link.

    `incarnation` is that of the agent from which it was claimed, if that is not the one which is asked (which has its
    key, or its address). Then the answer is Drained if that incarnation is known to be dead, and there is none
    otherwise.
    """

    transfer: TransferId
    code: Code
    reason: Annotated[str, Meta(max_length=1024)] = ""
    incarnation: Incarnation = ""


class Drained(Struct, frozen=True, kw_only=True, tag="drained"):
    """Sender to receiver: nothing of this transfer will be written any more; all its leases are void.

    A sender says this only when every write it posted has ended. With a code it is also the transfer's failure. Over
    TCP the rest of a failed write may still land, out of a kernel: the digest guards against that.
    """

    transfer: TransferId
    code: Code = ""
    reason: Annotated[str, Meta(max_length=1024)] = ""


class Failing(Struct, frozen=True, kw_only=True, tag="failing"):
    """Sender to receiver: this transfer fails, but writes may be under way; Drained follows when they end."""

    transfer: TransferId
    code: Code
    reason: Annotated[str, Meta(max_length=1024)] = ""


class Hold(Struct, frozen=True, kw_only=True, tag="hold"):
    """Receiver to sender: requests of my engine wait for the offers under these rendezvous ids.

    An id is named once for each request that waits. Each holds its offer for another `hold_s`. Sent again every few
    seconds, for all that wait at once.
    """

    rendezvous_ids: Annotated[tuple[RendezvousId, ...], Meta(min_length=1, max_length=MAX_HOLD_RENDEZVOUS)]


class Keeps(Struct, frozen=True, kw_only=True, tag="keeps"):
    """Receiver to sender: my engine keeps the KV of these prefixes under this id; without any: no longer.

    It is for the prefill of a request that goes on from there: my agent is then the sender. See KeptBy in engine.py.
    """

    rendezvous: RendezvousId
    prefixes: Prefixes = ()


class Settled(Struct, frozen=True, kw_only=True, tag="settled"):
    """Receiver to sender: every chunk of this transfer landed and was taken over; on the route `pull`, all was read."""

    transfer: TransferId


class Ping(Struct, frozen=True, kw_only=True, tag="ping"):
    """Answered by Pong with the same number. The dialling side pings; the other may, to see who is still there."""

    number: Count


class Pong(Struct, frozen=True, kw_only=True, tag="pong"):
    number: Count


class Goodbye(Struct, frozen=True, kw_only=True, tag="goodbye"):
    """I am stopping, my engine left, or I give the session up: it ends here.

    Under the number LINK_OVER: I have no link by this connection (any more). Dial again for a new one.
    """

    reason: Annotated[str, Meta(max_length=1024)] = ""


# What only the route of its transfer understands.
RouteToReceiver = BlockTables | Checked | Ready
RouteToSender = Grant | Renew | Check | Settled
# What is said without a session, so without an agreed version: read whatever version its envelope names.
Sessionless = Hello | Refuse | Cancel | Drained | Ping | Pong | Goodbye
OfReceiver = Claim | Cancel | Hold | Keeps | RouteToSender  # what a receiver says in a session, and a sender below
OfSender = Refuse | Drained | Failing | Announce | RouteToReceiver
Body = Hello | OfReceiver | Welcome | OfSender | Ping | Pong | Goodbye


class Envelope(Struct, frozen=True, kw_only=True):
    """One message between two incarnations. `receiver` is empty while it is not known (Hello).

    `version` is the session's, and the oldest that the sender speaks while there is none.
    """

    version: int
    sender: Incarnation
    receiver: Incarnation
    number: Count
    body: Body


class Notice(Struct, frozen=True, array_like=True):
    """Travels with a chunk on the fabric. Everything in it must match before the chunk counts."""

    transfer: TransferId
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sender_incarnation: Incarnation
    receiver_incarnation: Incarnation
    sender_epoch: Count
    receiver_epoch: Count
    slot: Count
    generation: Count
    chunk: Count
    chunk_bytes: Count
    digest: Annotated[int, Meta(ge=0)]  # 64 bits: msgpack has no more, msgspec takes no bound beyond int64
