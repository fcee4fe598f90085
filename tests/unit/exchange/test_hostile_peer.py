"""A receiver, a sender or an engine says what cannot be true: it is soon refused by name, and leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvbridge_proto.codec import BadFrame, decode, encode
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Failed, Released, ToAgent, Want
from kvbridge_proto.peer import (
    BlockTables,
    Cancel,
    Claim,
    Drained,
    Envelope,
    Failing,
    Grant,
    Refuse,
    Renew,
    SlotLease,
    Take,
)

from kvbridge.exchange.actions import Action, Send, Tell
from kvbridge.exchange.leases import LEASE_HEARD_S, LEASE_S
from kvbridge.exchange.orders import SendOrder, Watch
from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import Session
from tests.unit.exchange.world import BLOCKS, HEADS, LAYERS, Node, World

QUICK_S = 2.0  # for what must not be worked through, however long it says it is
HUGE = (1 << 62) + 1


class Scene:
    """One sender with an offer of 64 tokens in 16 blocks, and a session with a receiver that may say anything."""

    def __init__(self) -> None:
        self.world = World()
        self.world.offer("r", 64, 16)
        self.world.run()
        self.receiver = self.world.receivers[0]
        self.world._greet(self.receiver, "P0")
        self.session: Session = self.sender.accepted[self.receiver.engine.agent.incarnation]

    @property
    def sender(self) -> Node:
        return self.world.senders[0]

    def claim(self, **changes: Any) -> Claim:
        first, end = changes.get("first_token", 0), changes.get("end_token", 64)
        takes = changes.get("takes", (Take(0, LAYERS, 0, HEADS),))
        plan = changes.pop("plan", None)
        if plan is None:
            plan = self.session.planner.plan(takes, first, end, self.session.slot_bytes).digest
        fields: dict[str, Any] = {
            "transfer": "x",
            "want": "w",
            "receiver": 0,
            "receivers": 1,
            "rendezvous": "r",
            "sender_epoch": 1,
            "receiver_epoch": 1,
            "first_token": first,
            "end_token": end,
            "takes": takes,
            "plan": plan,
            "token": b"t" * 16,
            "leases": (),
            "deadline_s": 50.0,
        }
        return Claim(**fields | changes)

    def say(self, claim: Claim) -> list[Action]:
        began = time.monotonic()
        actions = self.sender.sending.claim(claim, self.session, self.sender.engine, self.world.now)
        assert time.monotonic() - began < QUICK_S
        return actions

    def refusal(self, claim: Claim) -> str:
        """The code; and the claim has left nothing behind."""
        (action,) = self.say(claim)
        assert isinstance(action, Send) and isinstance(action.body, Refuse), action
        assert action.body.about == claim.transfer and not self.sender.sending.outgoing_transfers
        return action.body.code

    def still_works(self) -> None:
        self.world.want("r", 64)
        self.world.run()
        assert type(self.world.answers()["r"]).__name__ == "Done"
        self.world.check_rest()


BAD_CLAIMS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers that do not exist": ("bad_take", {"takes": (Take(0, LAYERS + 1, 0, HEADS),)}),
    "heads that do not exist": ("bad_take", {"takes": (Take(0, LAYERS, 0, HEADS + 1),)}),
    "layers beyond all": ("bad_take", {"takes": (Take(HUGE, HUGE + 1, 0, HEADS),)}),
    "heads beyond all": ("bad_take", {"takes": (Take(0, 1, HUGE, HUGE + 1),)}),
    "no layers": ("bad_take", {"takes": (Take(1, 1, 0, HEADS),)}),
    "layers turned round": ("bad_take", {"takes": (Take(2, 1, 0, HEADS),)}),
    "heads turned round": ("bad_take", {"takes": (Take(0, 1, 3, 1),)}),
    "tokens turned round": ("bad_tokens", {"first_token": 9, "end_token": 3}),
    "another plan": ("plan_mismatch", {"plan": "0" * 16}),
    "another plan for all tokens there could be": ("plan_mismatch", {"end_token": HUGE, "plan": "0" * 16}),
    "another engine's epoch": ("stale_epoch", {"sender_epoch": 2}),
    "another epoch of its own": ("stale_epoch", {"receiver_epoch": 2}),
    "leases for chunks that are none": ("bad_lease", {"leases": tuple(SlotLease(0, i + 1) for i in range(4096))}),
    "leases for nothing": ("bad_lease", {"takes": (), "leases": (SlotLease(0, 1),)}),
}


@pytest.mark.parametrize("case", BAD_CLAIMS)
def test_a_claim_that_cannot_be_is_refused(case: str) -> None:
    scene = Scene()
    code, changes = BAD_CLAIMS[case]
    if code in ("bad_take", "bad_tokens"):
        changes = {"plan": "", **changes}
    assert scene.refusal(scene.claim(**changes)) == code
    scene.still_works()


def test_slots_that_are_lent_where_blocks_are_read_are_refused() -> None:
    """A sender that shipped as well would lose count of who still reads."""
    scene = Scene()
    scene.session = replace(scene.session, routed=Routed("pull"))
    assert scene.refusal(scene.claim(leases=(SlotLease(0, 1),))) == "bad_lease"
    scene.say(scene.claim())
    sending, incarnation = scene.sender.sending, scene.receiver.engine.agent.incarnation
    (told,) = sending.answers(scene.world.now, scene.world.now, lambda count: True)
    assert isinstance(told, Send) and isinstance(told.body, BlockTables) and told.body.is_last
    (failing,) = sending.grant(incarnation, Grant(transfer="x", leases=(SlotLease(0, 1),)))
    assert isinstance(failing, Send) and isinstance(failing.body, Failing) and failing.body.code == "bad_lease"
    ended = sending.cancel(incarnation, Cancel(transfer="x", code="bad_lease"))
    kinds = [type(each.body if isinstance(each, Send) else each.message) for each in ended]
    assert kinds == [Drained, Released] and not sending.offers and not sending.outgoing_transfers


@pytest.mark.parametrize("end", ["settled", "cancel", "lease"])
def test_blocks_that_are_read_are_released_when_nobody_counts_on_them(end: str) -> None:
    """Not before, though their engine takes them back; what is said of another's transfer changes nothing."""
    scene = Scene()
    scene.session = replace(scene.session, routed=Routed("pull"))
    scene.say(scene.claim())
    sending, incarnation, now = scene.sender.sending, scene.receiver.engine.agent.incarnation, scene.world.now
    # Its engine may have said something since.
    assert sending.answers(now, now - LEASE_HEARD_S, lambda count: True) == []
    assert sending.answers(now, now, lambda count: False) == [Watch(0)]
    assert sending.answers(now, now, lambda count: True)
    said = sending.withdraw("r", "aborted", now)
    assert [type(each.body) for each in said if isinstance(each, Send)] == [Failing]
    assert not any(isinstance(each, Tell) for each in said) and sending.is_promised
    sending.renew(incarnation, Renew(transfer="x", number=1))
    assert sending.settled("another", "x") == [] and sending.answers(now, now, lambda count: True) == []
    match end:
        case "settled":
            said = sending.settled(incarnation, "x")
        case "cancel":
            said = sending.cancel(incarnation, Cancel(transfer="x", code="aborted"))
        case _:
            assert not any(isinstance(each, Tell) for each in sending.tick(now + LEASE_S - 0.01))
            said = sending.tick(now + LEASE_S + 0.01)
    assert any(isinstance(each, Tell) and isinstance(each.message, Released) for each in said)
    assert not sending.is_promised and not sending.outgoing_transfers and not sending.offers


def test_rows_that_are_taken_twice_are_refused_or_planned_once() -> None:
    """Overlapping takes would have one row written by two moves."""
    scene = Scene()
    take = Take(0, LAYERS, 0, HEADS)
    assert scene.refusal(scene.claim(takes=(take, take), plan="")) in ("bad_take", "plan_mismatch")
    assert scene.refusal(scene.claim(takes=(take,) * 4096, plan="")) in ("bad_take", "plan_mismatch")
    scene.still_works()


def test_a_claim_of_more_tokens_than_there_are_ends_when_all_is_offered() -> None:
    scene = Scene()
    actions = scene.say(scene.claim(end_token=1 << 40))
    assert [a.body.code for a in actions if isinstance(a, Send) and isinstance(a.body, Drained)] == ["tokens_missing"]
    assert not scene.sender.sending.outgoing_transfers and not any(isinstance(a, SendOrder) for a in actions)


def test_more_slots_than_chunks_end_the_transfer() -> None:
    scene = Scene()
    scene.say(scene.claim(rendezvous="nothing here yet"))
    incarnation, chunks = (
        scene.receiver.engine.agent.incarnation,
        scene.sender.sending.outgoing_transfers["x"].plan.chunks,
    )
    for generation in range(chunks):
        assert (
            scene.sender.sending.grant(incarnation, Grant(transfer="x", leases=(SlotLease(0, generation + 1),))) == []
        )
    (ended,) = scene.sender.sending.grant(incarnation, Grant(transfer="x", leases=(SlotLease(0, 99),)))
    assert isinstance(ended, Send) and isinstance(ended.body, Drained) and ended.body.code == "bad_lease"
    assert not scene.sender.sending.outgoing_transfers
    scene.still_works()


def test_another_receiver_cannot_touch_a_transfer() -> None:
    scene = Scene()
    scene.say(scene.claim(rendezvous="nothing here yet"))
    out = scene.sender.sending.outgoing_transfers["x"]
    assert scene.sender.sending.grant("another incarnation", Grant(transfer="x", leases=(SlotLease(0, 1),))) == []
    assert scene.sender.sending.cancel("another incarnation", Cancel(transfer="x", code="c")) == []
    assert not out.early and "x" in scene.sender.sending.outgoing_transfers


def test_another_sender_cannot_touch_a_transfer() -> None:
    world = World(senders=2)
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.hold = {"gather"}
    world.run()
    receiving = world.receivers[0].receiving
    of_p0 = next(t for t, wanted in receiving._wanted_by.items() if wanted.incoming_transfers[t].address == "P0")
    before, other = receiving.slots.counts(), world.nodes["P1"].engine.agent.incarnation
    for hear in (
        lambda: receiving.drained(other, of_p0, "c", "not mine", 0.0),
        lambda: receiving.failing(other, of_p0, "c", "not mine", 0.0),
        lambda: receiving.drained("nobody", of_p0, "c", "not mine", 0.0),
        lambda: receiving.ready(other, of_p0, 10**9),
    ):
        assert not [a for a in hear() if not isinstance(a, Send)]
    assert receiving.slots.counts() == before
    world.hold = set()
    world.run()
    assert type(world.answers()["r"]).__name__ == "Done"
    world.check_rest()


def test_a_sender_that_promises_more_than_there_is_gets_no_more_slots() -> None:
    world = World(slots=64)
    world.want("r", 64)
    world.run()
    receiving, incarnation = world.receivers[0].receiving, world.senders[0].engine.agent.incarnation
    (transfer,) = receiving._wanted_by
    chunks = receiving._wanted_by[transfer].incoming_transfers[transfer].plan.chunks
    for told in (1 << 62, -1, 0):
        receiving.ready(incarnation, transfer, told)
        assert receiving.slots.lent_to(transfer) <= chunks
    receiving.ready(incarnation, "no such transfer", 5)


# The frames themselves: what no field may hold never comes as far as the machines.

LIES: dict[str, dict[str, Any]] = {
    "deadline that is no number": {"deadline_s": float("nan")},
    "endless deadline": {"deadline_s": float("inf")},
    "negative deadline": {"deadline_s": -1.0},
    "deadline of a year": {"deadline_s": 3.2e7},
    "negative slot": {"leases": [[-1, 1]]},
    "slot beyond 20 bits": {"leases": [[1 << 20, 1]]},
    "generation nought": {"leases": [[0, 0]]},
    "generation beyond 62 bits": {"leases": [[0, 1 << 62]]},
    "too many leases": {"leases": [[0, 1]] * 4097},
    "too many takes": {"takes": [[0, 1, 0, 1]] * 4097},
    "negative layer": {"takes": [[-1, 1, 0, 1]]},
    "take cut short": {"takes": [[0, 1, 0]]},
    "negative tokens": {"first_token": -1},
    "short token": {"token": b"t" * 15},
    "long token": {"token": b"t" * 17},
    "no receivers": {"receivers": 0},
    "negative receiver": {"receiver": -1},
    "long rendezvous": {"rendezvous": "r" * 257},
    "long transfer": {"transfer": "t" * 65},
}


@pytest.mark.parametrize("case", LIES)
def test_a_claim_with_such_a_field_is_no_message(case: str) -> None:
    claim = Scene().claim()
    envelope = Envelope(version=1, sender="a", receiver="b", number=0, body=claim)
    assert decode(encode(envelope), Envelope) == envelope
    body = {"type": "claim"} | {name: getattr(claim, name) for name in claim.__struct_fields__} | LIES[case]
    plain = {"version": 1, "sender": "a", "receiver": "b", "number": 0, "body": body}
    with pytest.raises(BadFrame) as caught:
        decode(encode(plain), Envelope)
    assert caught.value.code == "message_invalid"


# Our own engine:


def want(blocks: tuple[Blocks, ...], **changes: Any) -> Want:
    fields: dict[str, Any] = {"request": "r", "rendezvous": "r", "sender": "P0", "first_token": 0, "end_token": 64}
    return Want(**fields | {"blocks": blocks, "deadline_s": 50.0} | changes)


ENGINE_LIES: dict[str, tuple[str, Callable[[], Want]]] = {
    "a block beyond the pool": ("block_out_of_range", lambda: want((Blocks(0, 0, (0, 1, 2, BLOCKS)),))),
    "the largest block id": ("block_out_of_range", lambda: want((Blocks(0, 0, (0, 1, 2, (1 << 31) - 1)),))),
    "a negative block": ("block_out_of_range", lambda: want((Blocks(0, 0, (0, 1, 2, -1)),))),
    "a gap": ("blocks_not_contiguous", lambda: want((Blocks(0, 0, (0, 1)), Blocks(0, 3, (2, 3))))),
    "an overlap": ("blocks_not_contiguous", lambda: want((Blocks(0, 0, (0, 1)), Blocks(0, 1, (2, 3))))),
    "a group that is none": ("unknown_group", lambda: want((Blocks(1, 0, (0, 1, 2, 3)),))),
    "the last group there could be": ("unknown_group", lambda: want((Blocks(255, 0, (0,)),))),
    "too few blocks": ("blocks_too_few", lambda: want((Blocks(0, 0, (0, 1, 2)),))),
    "all tokens there could be": ("blocks_too_few", lambda: want((Blocks(0, 0, (0, 1)),), end_token=HUGE)),
    "blocks from the end of time": ("blocks_too_few", lambda: want((Blocks(0, HUGE, (0, 1)),))),
    "a range turned round": ("bad_range", lambda: want((), first_token=5, end_token=1)),
    "one block for two entries": ("block_repeated", lambda: want((Blocks(0, 0, (3, 3, 1, 2)),))),
}


@pytest.mark.parametrize("case", ENGINE_LIES)
def test_a_want_that_cannot_be_fails_alone(case: str) -> None:
    world = World()
    node = world.receivers[0]
    code, make = ENGINE_LIES[case]
    began = time.monotonic()
    (answer,) = node.receiving.want(make(), node.engine, 0.0)
    assert time.monotonic() - began < QUICK_S
    assert isinstance(answer.message, Failed) and answer.message.code == code, answer
    assert not node.receiving.wants and node.receiving.slots.free == len(node.receiving.slots)


@pytest.mark.parametrize("hold_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_an_offer_is_held_for_a_time_that_is_one(hold_s: float) -> None:
    body = {"type": "offer", "rendezvous": "r", "request": "r", "tokens": 4, "blocks": [[0, 0, [0]]], "is_last": True}
    decode(encode(body | {"hold_s": 1.0}), ToAgent)
    with pytest.raises(BadFrame):
        decode(encode(body | {"hold_s": hold_s}), ToAgent)
