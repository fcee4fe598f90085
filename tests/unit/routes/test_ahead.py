"""Reading ahead of the sender's answer: what is announced to whom, and which reads count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.peer import Announce, BlockTables, Check, Claim, Renew, Settled
from msgspec import structs

from kvbridge.exchange.actions import Action, Carried, ReadAhead, Send, Tell
from kvbridge.exchange.orders import AwaitedPull, Failure, Pull, Pulled, Quiet, StopReceiving, Summed
from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import Session, accept, answer, hello, welcome
from kvbridge.loopback.messages import number_of
from kvbridge.routes.pull.halves import LEASE_S, MOST_ANNOUNCED, MOST_ANNOUNCED_BLOCKS, MOST_READERS, READER_S
from kvbridge.state_machines import WantState
from testing.halves import make_receiver
from tests.unit.exchange.claimant import Claimant
from tests.unit.exchange.network import offer_of, want_of
from tests.unit.exchange.world import World

pytestmark = pytest.mark.proves("G3")

NOW = 10.0
KEY = "of P0"
BLOCKS = (Blocks(0, 0, tuple(range(16))),)
OTHERS = (Blocks(0, 0, tuple(range(16, 32))),)
LATE: Failure = ("fence_late", "test")


def announced(**changes: Any) -> Announce:
    fields: dict[str, Any] = {"number": 3, "rendezvous": "r", "first_token": 0, "tokens": 64, "fence": 7}
    return Announce(**fields | {"blocks": BLOCKS} | changes)


def of_type(kind: type, actions: list[Action]) -> list[Any]:
    sent = [each.body for each in actions if isinstance(each, Send)]
    told = [each.message for each in actions if isinstance(each, Tell)]
    return [each for each in (*actions, *sent, *told) if isinstance(each, kind)]


class AheadReceiver:
    """One that was told what P0 announces, and wants 64 tokens of it."""

    def __init__(
        self, announce: Announce | None = None, incarnation: str = "", check_every: int = 0, key: str = KEY
    ) -> None:
        world = World()
        engine, theirs = world.receivers[0].engine, world.senders[0].engine
        self.receiving = make_receiver(4, lambda: "x", lambda: b"t" * 16, check_every)
        self.incarnation = theirs.agent.incarnation
        session = answer(hello(engine), theirs)
        assert isinstance(session, Session) and session.reads_ahead
        agreed = accept(welcome(session, theirs), engine, KEY)
        assert isinstance(agreed, Session)
        self.receiving.opened("P0", replace(agreed, routed=Routed("pull")), NOW)
        self.receiving.announced(incarnation or self.incarnation, key, announce or announced())
        self.asked = self.receiving.want(want_of("r", 64), engine, NOW)

    @property
    def pull(self) -> Pull:
        (pull,) = of_type(Pull, self.asked)
        assert isinstance(pull, Pull)
        return pull

    def told(self, number: int = 3, blocks: tuple[Blocks, ...] = BLOCKS, **changes: Any) -> list[Action]:
        fields = {"transfer": "x", "tokens": 64, "is_last": True, "renewal": 0, "announced": number} | changes
        return self.receiving.on_message(self.incarnation, BlockTables(blocks=blocks, **fields), NOW, KEY)

    def pulled(self, failure: Failure = None) -> list[Action]:
        chunks = self.pull.plan.chunks
        digests = dict.fromkeys(self.pull.compared, 5) if failure is None else {}
        return self.receiving.on_reports([Pulled("x", chunks, chunks, 1, digests, failure, NOW)], NOW)


def test_what_was_announced_is_read_once_it_is_claimed() -> None:
    """And before that is answered."""
    receiver = AheadReceiver()
    claimed, pull = receiver.asked
    assert isinstance(claimed, Send) and isinstance(claimed.body, Claim) and isinstance(pull, Pull)
    assert (pull.first_chunk, pull.end_chunk, pull.peer_fence) == (0, pull.plan.chunks, 7)
    assert pull.peer_tables[0].ids.tolist() == list(range(16)) and not pull.lease.counts(NOW)
    assert receiver.told() == [] and pull.lease.counts(NOW)
    said = receiver.pulled()
    assert [type(each) for each in of_type(Done | Settled, said)] == [Settled, Done]
    assert of_type(ReadAhead, said) == [ReadAhead("x", counts=True)] and of_type(Carried, said)


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("compared", [0, 1])
def test_what_was_read_of_another_offer_is_read_again(number: int, compared: int) -> None:
    receiver = AheadReceiver(check_every=compared)
    first = receiver.pull
    assert bool(first.compared) is bool(compared)
    assert receiver.told(number, OTHERS) == [], "two reads into the same blocks"
    if compared:
        assert receiver.receiving.on_reports([Summed("x", {0: 5})], NOW) == []
    said = receiver.pulled()
    assert of_type(ReadAhead, said) == [ReadAhead("x", counts=False)] and not of_type(Carried, said)
    assert not of_type(Done, said) and not of_type(Check, said)
    (again,) = of_type(Pull, said)
    assert again.peer_tables[0].ids.tolist() == list(range(16, 32)) and again.peer_fence is None
    assert (again.first_chunk, again.end_chunk, again.lease) == (0, again.plan.chunks, first.lease)
    said = receiver.receiving.on_reports([Pulled("x", again.end_chunk, 1, 1, {}, None)], NOW)
    assert not of_type(ReadAhead, said) and of_type(Done, said) and of_type(Carried, said)


@pytest.mark.parametrize("number", [3, 4])
def test_a_read_ahead_that_ends_before_the_answer_waits_for_it_as_nothing(number: int) -> None:
    """The data plane has nothing of it under way: no other read waits, and a refusal is told at once."""
    receiver = AheadReceiver()
    assert receiver.pulled() == [] and not receiver.receiving.wants[number_of("r")].is_carried
    said = receiver.told(number)
    assert of_type(ReadAhead, said) == [ReadAhead("x", counts=number == 3)]
    assert bool(of_type(Done, said)) is bool(of_type(Carried, said)) is (number == 3)
    assert bool(of_type(Pull, said)) is (number == 4)


def test_what_ended_after_its_lease_waits_for_the_next_one() -> None:
    """Which is asked for, and proves that the blocks were held until then."""
    receiver = AheadReceiver()
    chunks = receiver.pull.plan.chunks
    receiver.told()
    late = NOW + LEASE_S
    assert [each.number for each in of_type(Renew, receiver.receiving.tick(late))] == [1]
    assert receiver.receiving.on_reports([Pulled("x", chunks, chunks, 1, {}, None, late)], late) == []
    said = receiver.told(blocks=(), renewal=1)
    assert of_type(ReadAhead, said) == [ReadAhead("x", counts=True)] and of_type(Done, said)


def test_a_read_ahead_that_fails_before_the_answer_is_made_again_from_it() -> None:
    """As if nothing had been announced: be it that the fence was not reached."""
    receiver = AheadReceiver()
    said = receiver.pulled(LATE)
    assert of_type(ReadAhead, said) == [ReadAhead("x", counts=False)] and not of_type(Failed, said)
    assert len(of_type(AwaitedPull, said)) == 1
    (again,) = of_type(Pull, receiver.told())
    assert again.peer_fence is None and again.end_chunk == again.plan.chunks
    said = receiver.receiving.on_reports([Pulled("x", again.end_chunk, 1, 1, {}, LATE)], NOW)
    assert [each.code for each in of_type(Failed, said)] == ["fence_late"]


@pytest.mark.parametrize("compared", [0, 1])
def test_one_that_fails_after_the_answer_fails_the_want_as_any_read(compared: int) -> None:
    """Its chunks may be compared already, and each is only once."""
    receiver = AheadReceiver(check_every=compared)
    receiver.told()
    if compared:
        assert len(of_type(Check, receiver.receiving.on_reports([Summed("x", {0: 5})], NOW))) == 1
    said = receiver.pulled(("pull_failed", "test"))
    assert [each.code for each in of_type(Failed, said)] == ["pull_failed"] and not of_type(Pull, said)


def test_an_answer_that_is_not_the_last_counts_as_another_offers() -> None:
    receiver = AheadReceiver()
    assert receiver.told(0, (Blocks(0, 0, tuple(range(4))),), tokens=16, is_last=False) == []
    said = receiver.pulled()
    (some,) = of_type(Pull, said)
    assert some.end_chunk < some.plan.chunks and of_type(ReadAhead, said) == [ReadAhead("x", counts=False)]


@pytest.mark.parametrize(
    "announce",
    [
        announced(rendezvous="another"),
        announced(tokens=60),
        announced(first_token=16),
        announced(blocks=(Blocks(1, 0, (1,)),)),
        announced(blocks=(Blocks(0, 0, (1 << 20,)),)),
        announced(blocks=(Blocks(0, 0, (1,)), Blocks(0, 3, (2,)))),
        announced(blocks=(Blocks(0, 0, tuple([1] * (MOST_ANNOUNCED_BLOCKS + 1))),)),
    ],
    ids=["rendezvous", "too few", "too late", "group", "outside", "gap", "too many"],
)
def test_what_does_not_hold_all_that_is_wanted_is_not_read_ahead(announce: Announce) -> None:
    receiver = AheadReceiver(announce)
    assert not of_type(Pull, receiver.asked) and len(of_type(AwaitedPull, receiver.asked)) == 1
    assert len(of_type(Pull, receiver.told())) == 1


def test_what_another_sender_announced_is_not_read() -> None:
    assert not of_type(Pull, AheadReceiver(incarnation="another").asked)


def test_an_announcement_serves_one_want_and_the_oldest_are_forgotten() -> None:
    receiver = AheadReceiver()
    engine = World().receivers[0].engine
    assert not of_type(Pull, receiver.receiving.want(want_of("s", 64, rendezvous="r"), engine, NOW))
    for number in range(MOST_ANNOUNCED + 1):
        receiver.receiving.announced(receiver.incarnation, KEY, announced(rendezvous=f"r{number}"))
    route: Any = receiver.receiving._route_of["pull"]
    assert len(route._announced[receiver.incarnation, KEY]) == MOST_ANNOUNCED
    assert not of_type(Pull, receiver.receiving.want(want_of("t", 64, rendezvous="r0"), engine, NOW))


def test_its_lease_is_renewed_once_it_has_one() -> None:
    receiver = AheadReceiver()
    assert of_type(Renew, receiver.receiving.tick(NOW + LEASE_S / 2)) == []
    receiver.told()
    assert [each.number for each in of_type(Renew, receiver.receiving.tick(NOW + LEASE_S / 2))] == [1]


def test_what_was_announced_is_forgotten_with_the_session_or_by_another_key() -> None:
    receiver = AheadReceiver()
    route: Any = receiver.receiving._route_of["pull"]
    receiver.receiving.announced(receiver.incarnation, KEY, announced(rendezvous="s"))
    receiver.receiving.unreachable("P0", "peer_lost", "test", NOW)
    assert not route._announced
    assert not of_type(Pull, AheadReceiver(key="of another").asked)


@pytest.mark.parametrize("is_answered", [True, False])
def test_after_the_answer_rows_may_be_there(is_answered: bool) -> None:
    """So the want ends with its session, which had taken it."""
    receiver = AheadReceiver()
    if is_answered:
        receiver.told()
    receiver.receiving.unreachable("P0", "peer_left", "test", NOW)
    wanted = receiver.receiving.wants[number_of("r")]
    assert wanted.state is (WantState.ENDING if is_answered else WantState.RETURNING)


def test_a_want_that_was_only_read_ahead_begins_again_with_the_senders_next_session() -> None:
    """As one of which nothing was read: those rows do not count."""
    receiver = AheadReceiver()
    said = receiver.receiving.unreachable("P0", "peer_left", "test", NOW)
    assert [type(each) for each in said] == [StopReceiving] and receiver.receiving.wants
    said = receiver.receiving.on_reports([Quiet("x")], NOW)
    assert not of_type(Failed, said) and receiver.receiving.wants


class Offering(Claimant):
    """A sender that receivers have claimed from."""

    def __init__(self) -> None:
        super().__init__(is_pulling=True)
        self.now = self.world.now
        assert self.session.reads_ahead
        self.say()

    def offer(self, request: str = "s", tokens: int = 64, *, at: float = 0.0, **more: Any) -> list[Announce]:
        prefixes = more.pop("prefixes", ())
        message = structs.replace(offer_of(request, tokens, BLOCKS, **more), fence=9, prefixes=prefixes)
        said = self.sending.offer(message, self.sender.engine, self.now + at)
        self.heard = [each.peer for each in said if isinstance(each, Send) and isinstance(each.body, Announce)]
        return of_type(Announce, said)


def test_who_has_claimed_hears_of_the_next_offer() -> None:
    sender = Offering()
    (heard,) = sender.offer()
    assert heard == Announce(number=1, rendezvous="s", first_token=0, tokens=64, fence=9, blocks=BLOCKS)
    assert sender.heard == [sender.incarnation]
    sender.say(transfer="y", want="v", rendezvous="s")
    (answered,) = of_type(BlockTables, sender.sending.answers(sender.now, sender.now, lambda count: count != 9))
    assert answered.transfer == "x" and answered.announced == 0  # its offer was made before anybody had claimed
    (answered,) = of_type(BlockTables, sender.sending.answers(sender.now, sender.now, lambda count: True))
    assert (answered.transfer, answered.announced) == ("y", 1)


@pytest.mark.parametrize("why", ["claimed", "kept", "not whole", "declined", "lost", "long ago", "too large"])
def test_nobody_hears_of_what_it_cannot_take_or_has_claimed(why: str) -> None:
    sender = Offering()
    match why:
        case "claimed":
            sender.say(transfer="y", want="v", rendezvous="s")
            found = sender.offer()
        case "kept":
            found = sender.offer(prefixes=(b"p" * 20,))
        case "not whole":
            found = sender.offer(last=False)
        case "declined":
            found = sender.offer(tokens=0)
        case "lost":
            sender.sending.lost(sender.incarnation)
            found = sender.offer()
        case "long ago":
            found = sender.offer(at=READER_S + 0.1)
        case _:
            route: Any = sender.sending._route_of["pull"]
            route._readers["another"] = sender.now
            assert len(sender.offer()) == 2
            many = structs.replace(
                offer_of("t", 64, BLOCKS), blocks=(Blocks(0, 0, (0,) * (MOST_ANNOUNCED_BLOCKS + 1)),)
            )
            found = of_type(Announce, sender.sending.offer(many, sender.sender.engine, sender.now))
    assert found == []


def test_an_offer_that_grows_after_all_is_announced_under_another_number() -> None:
    """Its states are of other tokens then."""
    sender = Offering()
    numbers = [each.number for each in sender.offer(tokens=60)]
    more = structs.replace(offer_of("s", 64, (), more=True), blocks=())
    numbers += [each.number for each in of_type(Announce, sender.sending.offer(more, sender.sender.engine, sender.now))]
    assert numbers == [1, 2]
    assert sender.sending.offers[number_of("s")].announced == 2


def test_the_receivers_that_claimed_last_hear_of_offers() -> None:
    sender = Offering()
    for number in range(MOST_READERS):
        agent = structs.replace(sender.session.peer, incarnation=f"i{number}")
        sender.session = replace(sender.session, peer=agent)
        sender.say(transfer=f"t{number}", want=f"w{number}")
    sender.offer()
    assert sender.heard == [f"i{number}" for number in range(MOST_READERS)]


def test_too_much_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.routes.pull.halves.MOST_AHEAD_BYTES", 100)
    assert not of_type(Pull, AheadReceiver().asked)
