"""Quarantined slots whose sender is there but refuses a session: it can still say what it is writing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.peer import Cancel, Drained, ProcessCard
from msgspec import structs

from kvbridge.exchange.actions import Send
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.session import Session, accept, answer, hello, welcome
from kvbridge.routes.registry import sending_routes
from kvbridge.routes.slots.halves import UnconfirmedTransfers
from testing.halves import by_slots
from tests.unit.exchange.world import World

PROCESS = ProcessCard(pid=42, started=7)

pytestmark = pytest.mark.proves("G5")


def with_a_slot_out(
    key: str = "",
    machines: tuple[str, str] = ("", ""),
    namespaces: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    is_on_gpu: bool = False,
) -> World:
    """A want that failed with its slots lent, because its sender was lost.

    `machines` are the sender's and its own, and so are `namespaces`. `is_on_gpu` says where its own slots are.
    """
    world = World(slots=4)
    world.senders_key = key
    for node, machine, its in zip((world.sender, world.receiver), machines, namespaces, strict=True):
        site = replace(node.engine.site, machine=machine, namespaces=its, process=PROCESS)
        if is_on_gpu:
            site = replace(site, fabric=structs.replace(site.fabric, memory="vram"))
        node.engine = replace(node.engine, site=site)
    world.hold.add("write")
    world.begin("r", 16)
    world.do(world.receiver, world.receiver.receiving.unreachable("P0", "peer_lost", "test", world.now))
    world.settle()
    assert world.receiver.slots.counts().quarantined > 0
    return world


def test_a_sender_that_refuses_is_asked_for_what_is_unconfirmed() -> None:
    world = with_a_slot_out()
    receiving = world.receivers[0].receiving
    incarnation = world.senders[0].engine.agent.incarnation
    actions = receiving.refused("P0", incarnation)
    (asked,) = [action.body for action in actions if isinstance(action, Send)]
    assert isinstance(asked, Cancel)
    assert by_slots(receiving).slots.counts().quarantined > 0  # to refuse proves nothing
    receiving.drained(incarnation, asked.transfer, "", "", world.now)
    assert by_slots(receiving).slots.counts().free == 4


@pytest.mark.proves("G6")
@pytest.mark.parametrize(
    ("machines", "namespaces", "is_far"),
    [
        (("", ""), ((1, 2), (3, 4)), False),
        (("", "m"), ((1, 2), (3, 4)), False),
        (("m", ""), ((1, 2), (3, 4)), False),
        (("m", "m"), ((), ()), False),
        (("m", "n"), ((), ()), True),
        (("m", "n"), ((1, 2), (1, 2)), True),
        (("m", "m"), ((1, 2), (1, 2)), False),
        (("m", "m"), ((1, 2), (3, 2)), False),
        (("m", "m"), ((1, 2), (1, 4)), False),
        (("m", "m"), ((1, 2), ()), False),
        (("m", "m"), ((1,), (3,)), False),
        (("m", "m"), ((1, 2), (3, 4)), True),
        # Within an IPC namespace only memory of the host is reached.
        (("GPU", "GPU"), ((1, 2), (3, 2)), True),
        (("GPU", "GPU"), ((1, 2), (1, 4)), False),
        (("GPU", "GPU"), ((1, 2), (1, 2)), False),
        (("GPU", "GPU"), ((1, 2), (3, 4)), True),
    ],
)
def test_only_who_is_known_to_be_elsewhere_reaches_no_slot_without_the_fabric(
    machines: tuple[str, str], namespaces: tuple[tuple[int, ...], tuple[int, ...]], is_far: bool
) -> None:
    """On another machine, or in another container of this one."""
    world = with_a_slot_out(machines=machines, namespaces=namespaces, is_on_gpu=machines[0] == "GPU")
    receiving = world.receiver.receiving
    quarantined = by_slots(receiving).slots.quarantined()
    assert receiving.quarantined("far") == (quarantined if is_far else frozenset())
    world.do(world.receiver, receiving.unreachable_from_far(world.receiver.engine, world.now))
    assert by_slots(receiving).slots.quarantined() == (frozenset() if is_far else quarantined)
    assert not receiving.quarantined("far")


@pytest.mark.proves("G6")
@pytest.mark.parametrize(
    ("machines", "namespaces", "is_seen"),
    [
        (("m", "m"), ((1, 2), (1, 2)), True),
        (("m", "m"), ((1, 2), (1, 4)), True),
        (("m", "m"), ((1, 2), (3, 2)), False),
        (("m", "m"), ((1, 2), ()), False),
        (("m", "m"), ((), ()), False),
        (("m", "n"), ((1, 2), (1, 2)), False),
        (("", ""), ((1, 2), (1, 2)), False),
    ],
)
def test_the_end_of_a_process_that_we_can_see_frees_what_it_was_lent(
    machines: tuple[str, str], namespaces: tuple[tuple[int, ...], tuple[int, ...]], is_seen: bool
) -> None:
    """A number means another process in another PID namespace, and on another machine."""
    world = with_a_slot_out(machines=machines, namespaces=namespaces)
    receiving = world.receiver.receiving
    assert receiving.writing_processes() == ({PROCESS} if is_seen else set())
    quarantined = by_slots(receiving).slots.quarantined()
    world.do(world.receiver, receiving.cannot_write(structs.replace(PROCESS, started=8)))
    assert by_slots(receiving).slots.quarantined() == quarantined, "it was another process"
    world.do(world.receiver, receiving.cannot_write(PROCESS))
    assert by_slots(receiving).slots.quarantined() == (frozenset() if is_seen else quarantined)
    assert not (receiving.writing_processes() and is_seen)


def test_a_sender_is_watched_while_it_may_be_lent_slots() -> None:
    """That is for as long as its session is open or a slot is quarantined. Who is only read is not watched."""
    world = World()
    ours, sender = (
        replace(node.engine, site=replace(node.engine.site, machine="m", namespaces=(1, 2), process=PROCESS))
        for node in (world.receiver, world.sender)
    )
    receiving = world.receiver.receiving
    agreed = answer(hello(ours), sender)
    assert isinstance(agreed, Session)
    session = accept(welcome(agreed, sender), ours)
    assert isinstance(session, Session) and not receiving.writing_processes()
    receiving.opened("P0", session, world.now)
    assert receiving.writing_processes() == {PROCESS}
    receiving.opened("P0", replace(session, routed=replace(session.routed, route="pull")), world.now)
    assert not receiving.writing_processes()


def test_who_writes_directly_is_on_this_machine_whatever_it_says() -> None:
    world = World()
    ours, sender = (
        world.receiver.engine,
        replace(world.sender.engine, site=replace(world.sender.engine.site, machine="n")),
    )
    ours = replace(ours, site=replace(ours.site, machine="m"))
    agreed = answer(hello(ours), sender)
    assert isinstance(agreed, Session)
    for route, is_far in (("direct", False), ("nixl", True)):
        session = accept(structs.replace(welcome(agreed, sender), route=route), ours)
        assert isinstance(session, Session) and session.is_far == is_far


def ask(world: World, before: set[str]) -> bool:
    """Another start of the agent, that knows these to be dead, refuses a session. Whether it could say something."""
    receiving, successor = world.receivers[0].receiving, Sender(sending_routes, before=before)
    asked = [action.body for action in receiving.refused("P0", "next") if isinstance(action, Send)]
    assert asked
    said = [each for body in asked if isinstance(body, Cancel) for each in successor.cancel("D0", body, world.now)]
    for each in said:
        assert isinstance(each, Send) and isinstance(each.body, Drained)
        receiving.drained("next", each.body.transfer, "", "", world.now)
    return bool(said)


def test_that_another_start_answers_at_the_address_proves_nothing() -> None:
    """The address may lead elsewhere now, and the one before it may stand still only."""
    world = with_a_slot_out()
    assert not ask(world, {"older"})
    assert world.receivers[0].slots.counts().quarantined > 0
    assert ask(world, {world.senders[0].engine.agent.incarnation})


def test_a_transfer_of_a_dead_start_is_nobody_elses() -> None:
    sending = Sender(sending_routes, before={"dead"})
    assert sending.renounce("D0", Cancel(transfer="t", code="", incarnation="dead"))
    assert not sending.renounce("D0", Cancel(transfer="t", code="", incarnation="alive"))
    assert sending.cancel("D0", Cancel(transfer="t", code="", incarnation="alive"), 0.0) == []


def kept(world: World) -> int:
    """How much is kept of agents, sessions and unconfirmed transfers."""
    receiving = world.receivers[0].receiving
    parts = [each for part in (receiving._senders, by_slots(receiving).unconfirmed) for each in vars(part).values()]
    return sum(len(kept) for kept in parts if not isinstance(kept, int))


@pytest.mark.proves("T6")
def test_who_answers_is_kept_only_where_something_is_unconfirmed_and_so_long() -> None:
    world = with_a_slot_out()
    receiving, before = world.receivers[0].receiving, kept(world)
    for number in range(500):  # names that a client made up; they lead to agents that refuse
        receiving.refused(f"name-{number}", "next")
    assert kept(world) == before
    assert ask(world, {world.senders[0].engine.agent.incarnation})
    assert kept(world) == 0 and by_slots(receiving).slots.counts().free == 4


def test_another_agent_that_refuses_proves_nothing() -> None:
    world = with_a_slot_out()
    receiving = world.receivers[0].receiving
    assert not receiving.refused("P1", "another incarnation")
    (transfer,) = by_slots(world.receivers[0].receiving).unconfirmed._of
    receiving.drained("another incarnation", transfer, "", "", world.now)
    assert by_slots(receiving).slots.counts().quarantined > 0


@pytest.mark.parametrize("key", ["of another", ""])
@pytest.mark.parametrize("is_itself", [True, False])
def test_who_has_another_key_is_neither_asked_nor_believed_whatever_incarnation_and_address_it_has(
    key: str, is_itself: bool
) -> None:
    world = with_a_slot_out("of P0")
    receiving, itself = world.receivers[0].receiving, world.senders[0].engine.agent.incarnation
    incarnation, address = (itself, "elsewhere") if is_itself else ("next", "P0")
    (transfer,) = by_slots(receiving).unconfirmed._of
    assert not receiving.refused(address, incarnation, key)
    receiving.drained(incarnation, transfer, "", "", world.now, key)
    assert by_slots(receiving).slots.counts().quarantined > 0
    (asked,) = [action.body for action in receiving.refused("P0", "next", "of P0") if isinstance(action, Send)]
    assert isinstance(asked, Cancel) and asked.incarnation == itself
    receiving.drained("next", transfer, "", "", world.now, key)
    assert by_slots(receiving).slots.counts().quarantined > 0
    receiving.drained("next", transfer, "", "", world.now, "of P0")
    assert by_slots(receiving).slots.counts().free == 4


def test_a_successor_may_answer_for_one_of_its_addresses_by_the_connection_to_another() -> None:
    world = with_a_slot_out()
    receiving = world.receivers[0].receiving
    receiving.refused("also P0", "next")  # its session is with this address, and P0 turns out to be the same agent
    (asked,) = [action.body for action in receiving.refused("P0", "next") if isinstance(action, Send)]
    assert isinstance(asked, Cancel)
    receiving.drained("next", asked.transfer, "", "", world.now)
    assert by_slots(receiving).slots.counts().free == 4


def test_of_any_number_of_agents_with_one_key_each_is_asked_once_and_may_answer() -> None:
    """Each is asked about what ended since, too, and no more."""
    unconfirmed, agents = UnconfirmedTransfers(), [(f"at {number}", f"incarnation {number}") for number in range(300)]
    unconfirmed.add("first", "P0", "dead", "key")
    for address, incarnation in agents:
        assert unconfirmed.meet(address, incarnation, "key") == [("first", "dead")]
    for transfer in ("first", "second"):
        unconfirmed.add(transfer, "P0", "dead", "key")
        assert [unconfirmed.meet_again(*each, "key") for each in agents] == [[(transfer, "dead")]] * len(agents)
        assert not any(unconfirmed.meet_again(*each, "key") for each in agents)
        assert all(unconfirmed.can_settle(transfer, incarnation, "key") for _, incarnation in agents)
    assert not unconfirmed.can_settle("first", "another", "key") and not unconfirmed.can_settle(
        "first", "dead", "other"
    )


def test_agents_that_were_asked_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.routes.slots.halves.MOST_ASKED", 3)
    unconfirmed = UnconfirmedTransfers()
    unconfirmed.add("t", "P0", "dead", "key")
    for number in range(9):
        unconfirmed.meet("elsewhere", f"{number}", "key")
    assert len(unconfirmed._asked) == 3 and unconfirmed.can_settle("t", "8", "key")
    unconfirmed.settle("t")
    assert not unconfirmed._asked
