"""What receiver and sender have done is noted, even if what comes next fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Offer, Want, Withdraw
from kvbridge_proto.peer import Claim, Drained

from kvbridge.dataplane.attached import AttachedMemory, Attachment, CurrentEngine, EngineLiveness
from kvbridge.exchange.orders import Broken, SendOrder, StopReceiving
from kvbridge.loopback.messages import number_of
from kvbridge.transport.local import LocalConnection
from tests.integration.agent.player import Whole, Wire, hello_from, welcomed
from tests.unit.exchange.claimant import Claimant
from tests.unit.exchange.world import World

BLOCKS = (Blocks(0, 0, (0, 1, 2, 3)),)


class Unwell(Whole):
    """It cannot say anything of the request "bad" to its engine, nor give its data plane orders of kind `no_orders`."""

    no_orders: type = type(None)

    def tell(self, message: Any) -> None:
        if message.request == "bad":
            raise RuntimeError("no")
        super().tell(message)

    def give(self, order: Any, attached: Any) -> None:
        if isinstance(order, self.no_orders):
            raise RuntimeError("no")
        super().give(order, attached)

    def want(self, request: str) -> None:
        tokens = {"first_token": 0, "end_token": 16, "blocks": BLOCKS}
        want = Want(
            number=number_of(request), request=request, rendezvous=request, sender="P0", **tokens, deadline_s=100.0
        )
        self.receiver.want(want, self.engine)

    def offer(self, request: str) -> None:
        names = {"number": number_of(request), "request": request, "rendezvous": request}
        offer = Offer(**names, tokens=16, blocks=BLOCKS, is_last=True, hold_s=60.0)
        self.sender.offer(offer, self.engine)

    def noted(self, request: str) -> set[str]:
        return {entry.what for entry in self.journal.about({request})}


def test_a_failure_that_our_engine_heard_is_noted_if_it_cannot_hear_the_next(world: World) -> None:
    player = Unwell(world.receivers[0].engine)
    for request in ("first", "bad", "last"):
        player.want(request)
    with pytest.raises(RuntimeError):
        player.receiver.unreachable("P0", "peer_unreachable", "nobody answers")
    assert [message.request for message in player.told] == ["first"]
    assert [player.noted(request) for request in ("first", "bad", "last")] == [
        {"wanted", "failed"},
        {"wanted"},
        {"wanted"},
    ]
    assert player.metrics.values()["kvbridge_wants_total{outcome=peer_unreachable}"] == 1


def test_a_release_that_our_engine_heard_is_noted_if_it_cannot_hear_the_next(world: World) -> None:
    player = Unwell(world.senders[0].engine)
    for request in ("first", "bad", "last"):
        player.offer(request)
    with pytest.raises(RuntimeError):
        player.sender.do(player.sender.sending.rescaled("other scales", player.sender._clock()))
    assert [message.request for message in player.told] == ["first"]
    found = [player.noted(request) for request in ("first", "bad", "last")]
    assert found == [{"offered", "released"}, {"offered"}, {"offered"}]


async def test_a_claim_is_noted_with_what_was_done_for_it_before_a_failure(world: World) -> None:
    player, wire = Unwell(world.senders[0].engine), Wire("D0", "", "D")
    await player.takes(wire, hello_from(world, "D"))
    player.offer("r")
    player.no_orders = SendOrder
    session = player.peers.incoming.sessions["D"].session
    plan = session.planner.plan(Claimant().claim().takes, 0, 16, session.slot_bytes).digest
    claim: Claim = Claimant().claim(end_token=16, plan=plan)
    with pytest.raises(RuntimeError):
        player.sender.from_receiver(session, claim)
    assert player.noted("r") == {"offered", "claimed", "met"}


async def test_what_the_data_plane_reported_is_noted_if_what_follows_from_it_fails(world: World) -> None:
    player = Unwell(world.receivers[0].engine)
    player.want("r")
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    (transfer,) = player.receiving.wants[number_of("r")].incoming_transfers
    player.no_orders = StopReceiving
    with pytest.raises(RuntimeError):
        player.receiver.on_reports([Broken(transfer, "bad_digest", "not what was sent")])
    assert player.noted("r") == {"wanted", "claimed", "broken"}


async def test_an_answer_that_is_due_is_sent_later_if_what_comes_before_it_fails(world: World) -> None:
    """A refusal here. Block tables that were counted as sent would never have been sent again."""
    player, wire = Unwell(world.senders[0].engine), Wire("D0", "", "D")
    await player.takes(wire, hello_from(world, "D"))
    player.memory = memory = AttachedMemory(1, cast(Any, None), None, EngineLiveness(0.0))
    player.now = 1.0
    session = player.peers.incoming.sessions["D"].session
    player.sender.from_receiver(session, Claimant().claim(rendezvous="unknown", end_token=16, is_offered=True))
    player.offer("bad")
    assert not wire.said(Drained)
    memory.liveness.heard_at = 2.0
    with pytest.raises(RuntimeError):
        player.sender.withdraw(Withdraw(number=number_of("bad"), reason="aborted"))
    player.sender.tick()
    assert [said.code for said in wire.said(Drained)] == ["unknown_offer"]


def test_what_is_attached_is_never_missing_while_something_of_it_changes(world: World) -> None:
    """Metrics ask on another thread whether an engine is attached."""
    seen = set()

    class Watched(CurrentEngine):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            seen.add((name, value is None))

    engine, connection = world.senders[0].engine, cast(LocalConnection, object())
    current = Watched(lambda: 0.0)
    attachment = Attachment(engine, AttachedMemory(engine.epoch, cast(Any, None), None), connection, 1)
    current.change(attachment)
    seen.clear()
    current.change(replace(attachment, version=2))
    assert seen == {(name, False) for name in ("attachment", "engine", "memory", "connection")}
