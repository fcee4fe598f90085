"""A receiver that says to one sender whatever the test wants it to say."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from kvbridge_proto.peer import Cancel, Claim, Grant, Refuse, SlotLease, Take

from kvbridge.exchange.actions import Action, Send
from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import Session
from tests.unit.exchange.world import HEADS, LAYERS, World

QUICK_S = 2.0  # for what must not be worked through, however long it says it is
ALL = (Take(0, LAYERS, 0, HEADS),)


class Claimant:
    """D0 as P0 knows it. P0 has offered 64 tokens in 16 blocks, as "r"."""

    def __init__(self, is_pulling: bool = False) -> None:
        self.world = World()
        self.world.serve("r", 64, 16)
        (self.sender,), (self.receiver,) = self.world.senders, self.world.receivers
        self.sending, self.incarnation = self.sender.sending, self.receiver.engine.agent.incarnation
        self.world._hello(self.receiver, "P0")
        self.session: Session = self.sender.accepted[self.incarnation]
        if is_pulling:
            self.session = replace(self.session, routed=Routed("pull"))

    def claim(self, **changes: Any) -> Claim:
        first, end, takes = changes.get("first_token", 0), changes.get("end_token", 64), changes.get("takes", ALL)
        if "plan" not in changes:
            changes["plan"] = self.session.planner.plan(takes, first, end, self.session.slot_bytes).digest
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
            "token": b"t" * 16,
            "leases": (),
            "deadline_s": 50.0,
        }
        return Claim(**fields | changes)

    def say(self, **changes: Any) -> list[Action]:
        claim, began = self.claim(**changes), time.monotonic()
        actions = self.sending.claim(claim, self.session, self.sender.engine, self.world.now)
        assert time.monotonic() - began < QUICK_S
        return actions

    def waits(self, transfer: str, **changes: Any) -> bool:
        """Claims of an offer that nobody makes."""
        return self.say(transfer=transfer, rendezvous="nobody's", **changes) == []

    def refusal(self, transfer: str = "x", **changes: Any) -> str:
        """The code; and the claim has left nothing behind."""
        (action,) = self.say(transfer=transfer, **changes)
        assert isinstance(action, Send) and isinstance(action.body, Refuse), action
        assert action.body.about == transfer not in self.sending.outgoing_transfers
        return action.body.code

    def grant(self, transfer: str, *leases: SlotLease, incarnation: str = "") -> list[Action]:
        return self.sending.on_message(incarnation or self.incarnation, Grant(transfer=transfer, leases=leases))

    def cancel(self, code: str, incarnation: str = "") -> list[Action]:
        return self.sending.cancel(incarnation or self.incarnation, Cancel(transfer="x", code=code), self.world.now)

    def still_works(self) -> None:
        self.world.fetch("r", 64)
        assert type(self.world.answers()["r"]).__name__ == "Done"
        self.world.check_rest()


def leases(count: int) -> tuple[SlotLease, ...]:
    return tuple(SlotLease(slot, 1) for slot in range(count))
