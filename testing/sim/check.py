"""Checks that nothing is left over anywhere once the faults have stopped and everybody has had time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from kvbridge_proto.peer import PROBE_LANES

from kvbridge.agent.outgoing_peers import OutgoingPeer
from kvbridge.agent.peers import IncomingPeer, Peers
from kvbridge.routes.choice import NOT_CONNECTED
from kvbridge.state_machines import SessionState

if TYPE_CHECKING:
    from .links import SimLink
    from .process import Process
    from .world import World


def look_for_leaks(world: World) -> None:
    """Fail the run with the first thing that is left over.

    Transfers in quarantine may stay at an agent without an engine. It says no Hello, so it cannot ask its peers
    yet.
    """
    for text in _left_over(world):
        world.foul(text)


def _left_over(world: World) -> Iterator[str]:
    yield from world.unended()
    for engine in world.engines.values():
        if engine.is_dead:
            continue
        if not all(rank.is_here for rank in engine.ranks):
            yield f"{engine.name}: a rank is not attached"
        if len(engine.free) != engine.shape[2]:
            yield f"{engine.name}: {engine.shape[2] - len(engine.free)} blocks are not free"
    for process in world.processes.values():
        for what in _kept(process):
            yield f"{process.name}: {what}"


def _kept(process: Process) -> Iterator[str]:
    receiving, sending, data_plane = process.receiving, process.sending, process.data_plane
    by_slots: Any = receiving._route_of["nixl"]
    slots, has_engine = process.slots.counts(), process.current.engine is not None
    if slots.free + (0 if has_engine else slots.quarantined) != len(process.slots):
        yield f"slots: {slots}"
    gathered = data_plane.send_orders.slots
    if gathered.free != len(gathered):
        yield f"slots to gather into: {gathered.counts()}"
    for name, left in (
        ("wants", receiving.wants),
        ("requests that are expected", receiving.expected),
        ("transfers in", receiving.incoming_transfers),
        ("zeros to write", receiving._filled_by),
        ("transfers in quarantine", has_engine and by_slots.unconfirmed._of),
        ("slots of transfers", has_engine and process.slots._of_transfer),
        ("offers", sending.offers),
        ("transfers out", sending.outgoing_transfers),
        ("rendezvous_ids", sending._rendezvous._offers),
        ("transfers that wait for an offer", sending._waiting),
        ("receivers that claim", sending._of_receiver),
        (
            "transfers that wait for a slot",
            (*data_plane.send_orders._awaiting._of, *by_slots.awaiting._of),
        ),
        ("orders to send", data_plane.send_orders.open),
        ("chunks on their way", data_plane.send_orders.moving),
        ("moves", data_plane._moving or data_plane._moved),
        ("endpoints of before", data_plane._resources is not None and data_plane._resources.retired),
        ("writes", data_plane._writing),
        ("waits for a fence", data_plane._fenced),
        ("targets that leave", data_plane._jobs._leaving),
        ("uses of targets", +data_plane._jobs._users),
        ("memory that is left", data_plane._pulling.closing),
        ("receivers that wait for an answer", sending._pending),
        ("answers that are kept", process.engines._sender.kept.ours),
        ("answers that others keep", any(process.engines._sender.kept._theirs.values())),
    ):
        if left:
            yield f"{name}: {left}"
    for key in (*receiving._deadlines._at, *sending._deadlines._at):
        if has_engine or key[0] != "quarantine":
            yield f"a deadline for {key}"
    for number in (*receiving._want_deadlines._at, *sending._holds._at):
        yield f"a deadline for offer or want {number}"
    for address, dialled in process.peers.outgoing.sessions.items():
        if dialled.state is not SessionState.OPEN:
            yield f"a session with {address} that is {dialled.state.name}"
    if process.engines.leaving is not None:
        yield "an engine that is still leaving"
    attached: Any = process.current.memory
    opened: dict[Any, Any] = dict(data_plane._pulling._peers)
    for memory in process.mapped:
        is_read = any(memory is each.memory for each in opened.values())
        if memory.is_open and not is_read and (attached is None or memory is not attached.memory):
            yield f"the memory of {memory.blocks.name} is mapped"
    yield from _between_agents(process)


def _between_agents(process: Process) -> Iterator[str]:
    """What is kept for sessions but not needed by an open one."""
    peers, jobs, resources = process.peers, process.data_plane._jobs, process.data_plane._at_work
    reached = {incarnation: target.serial for incarnation, target in jobs._targets.items()}
    written = ((incarnation, each.connected.serial) for incarnation, each in peers.incoming.sessions.items())
    sessions = {incarnation: serial for incarnation, serial in written if serial != NOT_CONNECTED}
    if reached != sessions:
        yield f"targets {reached}, sessions {sessions}"
    joined = Counter((target.endpoint.name, target.name) for target in jobs._targets.values())
    if resources._joined != joined:
        yield f"peers that are joined: {resources._joined} for {joined}"
    for called, fabric in process.fabrics.items():
        connected = {name for at, name in joined if at == called}
        if fabric._peers != connected:
            yield f"{called}: connected to {fabric._peers}, for {connected}"
    opened = {each.opened for each in peers.outgoing.sessions.values() if each.opened}
    if opened != (mapped := {*process.data_plane._pulling._peers}):
        yield f"memory of {mapped} is mapped, for {opened}"
    for name, left in (
        ("lanes that are out", PROBE_LANES - len(peers.outgoing._lanes)),
        ("sessions without a lane", peers.outgoing._without_lane),
        ("Hellos being answered", peers.incoming._hellos_by),
        ("deadlines of handshakes", peers.outgoing._deadlines._at),
    ):
        if left:
            yield f"{name}: {left}"
    for link in process.links.open:  # a link without a session may stay open for the next one
        if link.peer is None or link.peer.is_lost:
            yield f"a link {'to' if link.is_dialled else 'from'} {link.address} without another end"
    for session in _sessions(peers):
        theirs: Any = cast("SimLink", session.link).peer
        if theirs is None or all(each.link is not theirs for each in _sessions(theirs.links.process.peers)):
            yield f"a session over the link with {session.link.address} that is none at its other end"


def _sessions(peers: Peers) -> list[OutgoingPeer | IncomingPeer]:
    return [*peers.outgoing.sessions.values(), *peers.incoming.sessions.values()]
