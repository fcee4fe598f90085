"""When slots of a sender that is gone are free again: every order of what may happen to it and to its successors.

A model of all agents says who may still write. The receiver is the real one, and so is what a successor knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from kvbridge_proto.peer import Cancel, Drained
from msgspec import structs

from kvbridge.exchange.actions import Action, Send
from kvbridge.exchange.sender import Sender
from kvbridge.routes.registry import sending_routes
from kvbridge.routes.slots.halves import CONFIRM_AGAIN_S
from testing.halves import by_slots
from tests.unit.exchange.world import World

KEY, SLOTS = "of the sender", 4
# What may happen, each at most once. The first three are the sender's: it may be alive when its link is lost.
EVENTS = (
    "its link is lost",
    "it dies",
    "it comes back",
    "its successor is met at its address",
    "its successor is met elsewhere",
    "an agent with its key is met elsewhere",  # another replica, or a new pod with a lock of its own
    "a liar with another key is met at its address",
    "time passes",
)


class Story:
    """One transfer with slots lent. `may_write` is what is true, whatever anybody knows."""

    def __init__(self) -> None:
        self.world = World(slots=SLOTS)
        self.world.senders_key = KEY
        self.world.hold.add("write")
        self.world.begin("r", 16)
        self.receiving = self.world.receiver.receiving
        self.old = self.world.sender.engine.agent.incarnation
        self.session = self.receiving._senders.open["P0"]
        (self.transfer,) = self.receiving.incoming_transfers
        self.agents: dict[str, tuple[str, str, Sender | None]] = {}
        self.is_alive = self.may_write = True
        self.is_lost = False

    def play(self, event: str) -> bool:
        """Whether it can happen now."""
        match event:
            case "its link is lost" if not self.is_lost:
                self.is_lost = True
                self.world.do(
                    self.world.receiver, self.receiving.unreachable("P0", "peer_lost", "test", self.world.now)
                )
                self.world.settle()
            case "it dies" if self.is_alive:
                self.is_alive = self.may_write = False
            case "it comes back" if self.is_lost and self.is_alive:
                self.meets("P0", self.old, KEY, None)
            case "its successor is met at its address" if self.is_lost and not self.is_alive:
                self.meets("P0", "next", KEY, Sender(sending_routes, before={self.old}))
            case "its successor is met elsewhere" if not self.is_alive:
                self.meets("P1", "next", KEY, Sender(sending_routes, before={self.old}))
            case "an agent with its key is met elsewhere":
                self.meets("P2", "replica", KEY, Sender(sending_routes, before={"of its own"}))
            case "a liar with another key is met at its address" if self.is_lost:
                self.meets("P0", "liar", "another", Sender(sending_routes, before={self.old}))
                self.hears("liar", "another", [Drained(transfer=self.transfer)])
            case "time passes":
                self.world.now += CONFIRM_AGAIN_S
                self.take(self.receiving.tick(self.world.now))
            case _:
                return False
        return True

    def meets(self, address: str, incarnation: str, key: str, sending: Sender | None) -> None:
        """A session opens. The agent at the address answers with what `sending` knows; None is the old one itself."""
        self.agents[address] = incarnation, key, sending
        peer = structs.replace(self.session.peer, incarnation=incarnation)
        self.take(self.receiving.opened(address, replace(self.session, peer=peer, key=key), self.world.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, Send) or not isinstance(action.body, Cancel) or action.peer not in self.agents:
                continue
            incarnation, key, sending = self.agents[action.peer]
            if sending is None:  # it has stopped writing
                assert not action.body.incarnation
                self.may_write = False
                self.hears(incarnation, key, [Drained(transfer=action.body.transfer)])
            elif action.body.incarnation:
                said = [
                    each.body for each in sending.cancel("D0", action.body, self.world.now) if isinstance(each, Send)
                ]
                self.hears(incarnation, key, [body for body in said if isinstance(body, Drained)])

    def hears(self, incarnation: str, key: str, said: list[Drained]) -> None:
        for body in said:
            self.take(self.receiving.drained(incarnation, body.transfer, "", "", self.world.now, key))

    @property
    def is_free(self) -> bool:
        return by_slots(self.receiving).slots.counts().free == SLOTS

    def check(self) -> None:
        assert not (self.is_free and self.may_write), "a slot is free that may be written"


def stories(most: int) -> Iterator[tuple[str, ...]]:
    for size in range(1, most + 1):
        for events in combinations(EVENTS, size):
            yield from permutations(events)


def told(events: tuple[str, ...]) -> Story | None:
    """None if something of it cannot happen."""
    story = Story()
    for event in events:
        if not story.play(event):
            return None
        story.check()
    return story


@pytest.mark.proves("G5")
def test_slots_are_free_once_a_successor_is_met_anywhere_and_never_while_they_may_be_written() -> None:
    count = free = 0
    for events in stories(4):
        if (story := told(events)) is None or not story.is_lost:
            continue
        count += 1
        met = [event for event in events if event.startswith(("its successor", "it comes back"))]
        story.play("time passes")
        story.check()
        assert story.is_free == bool(met), events
        free += story.is_free
    assert count > 200 and 50 < free < count


@pytest.mark.parametrize("key", ["", KEY])
def test_without_keys_only_who_answers_at_the_address_is_asked(key: str) -> None:
    """Anybody could say that it is the successor."""
    story = Story()
    story.world.senders_key = key
    unconfirmed = by_slots(story.receiving).unconfirmed
    unconfirmed.add("t", "P0", "old", key)
    assert bool(unconfirmed.meet("P1", "next", key)) == bool(key) == unconfirmed.can_settle("t", "next", key)
    assert unconfirmed.meet("P0", "next", key) == [("t", "old")] and unconfirmed.can_settle("t", "next", key)


def test_who_has_been_asked_is_not_asked_again_until_it_is_met_anew() -> None:
    unconfirmed = by_slots(Story().receiving).unconfirmed
    for transfer in ("t", "u"):
        unconfirmed.add(transfer, "P0", "old", KEY)
        assert unconfirmed.meet_again("P1", "next", KEY) == [(transfer, "old")]
        assert not unconfirmed.meet_again("P1", "next", KEY)
    assert unconfirmed.meet("P1", "next", KEY) == [("t", "old"), ("u", "old")]
    unconfirmed.settle("t")
    assert not unconfirmed.can_settle("t", "next", KEY) and unconfirmed.can_settle("u", "next", KEY)
    unconfirmed.settle("u")
    assert not any(vars(unconfirmed).values())
