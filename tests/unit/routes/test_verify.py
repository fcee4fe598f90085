"""Comparing pulled chunks with the sender's: what each side says and keeps, also with a peer that lies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Failed, Released
from kvbridge_proto.peer import MAX_SUMS, BlockTables, Cancel, Check, Checked, Claim, Failing, Renew, Settled, Sum

from kvbridge.exchange.actions import Action, Compared, Send, Tell, Uncompared
from kvbridge.exchange.orders import Digest, Digested, Failure, Pull, Pulled, Quiet, StopReceiving, Summed
from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import Session, accept, answer, hello, welcome
from kvbridge.loopback.messages import number_of
from kvbridge.routes.pull.halves import COMPARE_S, LEASE_S, IncomingByPull, OutgoingByPull, Sampling
from testing.halves import make_receiver
from tests.unit.exchange.claimant import Claimant
from tests.unit.exchange.network import want_of
from tests.unit.exchange.world import World

pytestmark = pytest.mark.proves("G4")

NOW = 10.0
KEY = "of P0"


def sent(actions: list[Action]) -> list[Any]:
    return [each.body for each in actions if isinstance(each, Send)]


def told(actions: list[Action]) -> list[Any]:
    return [each.message for each in actions if isinstance(each, Tell)]


@pytest.mark.parametrize(
    ("every", "chosen"), [(0, []), (1, list(range(200))), (64, [0, 64, 128, 192]), (7, list(range(0, 200, 7)))]
)
def test_one_in_so_many_is_compared_the_first_among_them(every: int, chosen: list[int]) -> None:
    """However the chunks are read: at once, or one after another."""
    assert sorted(Sampling(every).choose(0, 200)) == chosen
    sampling = Sampling(every)
    ends = [0, 1, 2, 3, 70, 71, 130, 193, 200]
    found: list[int] = []
    for first, end in pairwise(ends):
        some = sampling.choose(first, end)
        assert all(first <= each < end for each in some)
        found += sorted(some)
    assert found == chosen


class PromisingSender(Claimant):
    """One that has promised the blocks of all chunks of transfer "x"."""

    def __init__(self) -> None:
        super().__init__(is_pulling=True)
        self.now = self.world.now
        self.say()
        self.sending.answers(self.now, self.now, lambda count: True)
        self.chunks = self.sending.outgoing_transfers["x"].plan.chunks

    def check(self, *chunks: int, incarnation: str = "", transfer: str = "x") -> list[Action]:
        sums = tuple(Sum(chunk, 1000 + chunk) for chunk in chunks)
        return self.sending.on_message(incarnation or self.incarnation, Check(transfer=transfer, digests=sums))

    def digested(self, digest: Action, failure: Failure = None) -> list[Action]:
        assert isinstance(digest, Digest)
        return self.sending.on_reports([Digested("x", Sum(digest.read.chunk, 7), digest.read, failure)])

    def is_free(self) -> bool:
        return not self.sending.outgoing_transfers and not self.sending.offers


def test_a_sender_digests_what_it_is_asked_and_answers_once() -> None:
    sender = PromisingSender()
    assert sender.chunks > 3
    first, second, third = sender.check(0, 1, 2)
    assert isinstance(first, Digest) and isinstance(second, Digest)
    assert (first.request, first.read, second.read) == ("r", Sum(0, 1000), Sum(1, 1001))
    assert sender.digested(first) == sender.digested(second) == []
    (answer,) = sent(sender.digested(third))
    assert answer == Checked(transfer="x", digests=(Sum(0, 7), Sum(1, 7), Sum(2, 7)))
    said = sender.sending.on_message(sender.incarnation, Settled(transfer="x"))
    assert [type(each) for each in told(said)] == [Released] and sender.is_free()


def test_few_chunks_are_digested_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.routes.pull.halves.MOST_DIGESTS", 2)
    sender = PromisingSender()
    first, second = sender.check(0, 1, 2)
    (third,) = sender.digested(first)
    assert sender.digested(second) == []
    assert len(sent(sender.digested(third))[0].digests) == 3


@pytest.mark.parametrize("end", ["cancel", "withdraw", "lost", "lease", "left", "settled", "failed"])
def test_blocks_that_are_digested_are_not_given_back(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the transfer ends meanwhile, at the sender or at its receiver."""
    monkeypatch.setattr("kvbridge.routes.pull.halves.MOST_DIGESTS", 1)
    sender = PromisingSender()
    sending, incarnation, now = sender.sending, sender.incarnation, sender.now
    (digest,) = sender.check(0, 1)
    match end:
        case "cancel":
            said = sender.cancel("aborted")
        case "withdraw":
            said = sending.withdraw(number_of("r"), "test", now) + sender.cancel("withdrawn")
        case "lost":
            said = sending.lost(incarnation) + sending.tick(now + LEASE_S + 0.01)
        case "lease":
            said = sending.tick(now + LEASE_S + 0.01) + sending.withdraw(number_of("r"), "test", now)
        case "left":
            said = sending.engine_left(now) + sending.tick(now + LEASE_S + 0.01)
        case "settled":
            said = sending.on_message(incarnation, Settled(transfer="x"))
            assert sending.on_message(incarnation, Check(transfer="x", digests=(Sum(2, 1),))) == []
            sending.on_message(incarnation, Renew(transfer="x", number=1))
            assert not sending.has_pending and not sending.is_promised
        case _:
            said = []
    assert not told(said) and sending.outgoing_transfers["x"].is_reading
    said = sender.digested(digest, ("gather_failed", "test") if end == "failed" else None)
    assert not any(isinstance(each, Digest) for each in said), "nobody wants to know any more"
    if end == "failed":
        assert [each.code for each in sent(said)] == ["gather_failed"]
        sender.cancel("gather_failed")
    assert sender.is_free() or end == "left"
    assert not sending.outgoing_transfers
    assert not any(isinstance(each, Checked) for each in sent(said))


@pytest.mark.parametrize(("asked", "chunks"), [([], [99]), ([], [0, 0]), ([], [1 << 40]), ([0], [0])], ids=str)
def test_who_asks_for_what_it_was_not_told_or_again_fails_its_transfer(asked: list[int], chunks: list[int]) -> None:
    sender = PromisingSender()
    first = sender.check(*asked)
    said = sender.check(*chunks)
    assert [each.code for each in sent(said) if isinstance(each, Failing)] == ["bad_check"]
    assert not any(isinstance(each, Digest) for each in said)
    for digest in first:
        sender.digested(digest)
    sender.cancel("bad_check")
    assert sender.is_free()


def test_nobody_is_answered_about_a_transfer_that_is_not_its_own_or_has_slots() -> None:
    sender = PromisingSender()
    assert sender.check(0, transfer="y") == [] and sender.check(0, incarnation="another") == []
    (out,) = sender.sending.outgoing_transfers.values()
    assert isinstance(out, OutgoingByPull) and not out.asked
    unread = Claimant()
    unread.say()
    assert unread.sending.on_message(unread.incarnation, Check(transfer="x", digests=(Sum(0, 1),))) == []


class PullingReceiver:
    """One that wants 64 tokens of P0, was told of all their blocks and is to read them."""

    def __init__(self, check_every: int = 1, wanted: int = 64, computed: int = 64, is_last: bool = True) -> None:
        world = World()
        engine, theirs = world.receivers[0].engine, world.senders[0].engine
        self.compared = self.differing = 0
        self.receiving = make_receiver(4, lambda: "x", lambda: b"t" * 16, check_every)
        self.incarnation = theirs.agent.incarnation
        session = answer(hello(engine), theirs)
        assert isinstance(session, Session)
        agreed = accept(welcome(session, theirs), engine, KEY)
        assert isinstance(agreed, Session)
        self.receiving.opened("P0", replace(agreed, routed=Routed("pull")), NOW)
        self.asked = self.receiving.want(want_of("r", wanted), engine, NOW)
        (claim,) = sent(self.asked)
        assert isinstance(claim, Claim)
        blocks = (Blocks(0, 0, tuple(range(16))),)
        told = BlockTables(transfer="x", tokens=computed, is_last=is_last, renewal=0, blocks=blocks)
        *self.before, pull = self.told(told)
        assert isinstance(pull, Pull)
        self.pull = pull

    def pulled(self) -> list[Action]:
        digests = {chunk: 100 + chunk for chunk in self.pull.compared}
        return self.receiving.on_reports([Pulled("x", self.pull.end_chunk, 1, 1, digests, None)], NOW)

    def told(self, answer: BlockTables, key: str = KEY) -> list[Action]:
        return self.receiving.on_message(self.incarnation, answer, NOW, key)

    def checked(self, *digests: Sum, incarnation: str = "", transfer: str = "x", key: str = KEY) -> list[Action]:
        answer = Checked(transfer=transfer, digests=digests)
        said = self.receiving.on_message(incarnation or self.incarnation, answer, NOW, key)
        for each in (each for each in said if isinstance(each, Compared)):
            self.compared, self.differing = self.compared + each.chunks, self.differing + each.differing
        return [each for each in said if not isinstance(each, Compared)]


@pytest.mark.parametrize(
    ("computed", "is_last", "is_compared"), [(62, False, False), (62, True, True), (64, False, True)]
)
def test_what_still_changes_beside_a_chunk_is_not_compared(computed: int, is_last: bool, is_compared: bool) -> None:
    """Where blocks move whole, the last one may have tokens beyond what is wanted."""
    receiver = PullingReceiver(wanted=62, computed=computed, is_last=is_last)
    plan = receiver.pull.plan
    growing = {each for each in range(plan.chunks) if plan.chunk(each).end_local == 62}
    assert growing and plan.pairs[0].unit_tokens == 4
    assert receiver.pull.compared == set(range(plan.chunks)) - (set() if is_compared else growing)
    assert (Uncompared("x", len(growing)) in receiver.before) is not is_compared


def test_done_is_said_once_the_sender_has_the_same() -> None:
    receiver = PullingReceiver()
    said = receiver.pulled()
    (check,) = [each for each in sent(said) if isinstance(each, Check)]
    assert check.digests == tuple(Sum(chunk, 100 + chunk) for chunk in range(receiver.pull.plan.chunks))
    assert not told(said) and not any(isinstance(each, Settled) for each in sent(said))
    *others, last = check.digests
    assert receiver.checked(*others) == []
    said = receiver.checked(last)
    assert [type(each) for each in (*told(said), *sent(said))] == [Done, Settled]
    assert not receiver.receiving.wants and receiver.compared == len(check.digests)
    assert receiver.differing == 0 and receiver.receiving.tick(NOW + LEASE_S) == []


def test_what_is_not_the_senders_fails_with_both_values() -> None:
    receiver = PullingReceiver()
    receiver.pulled()
    said = receiver.checked(Sum(0, 100), Sum(1, 0xBAD))
    (failed,) = told(said)
    assert isinstance(failed, Failed) and failed.code == "digest_mismatch"
    assert failed.reason == f"chunk 1: the sender has digest {0xBAD:016x}, read was {101:016x}"
    assert [(type(each), each.code) for each in sent(said)] == [(Cancel, "digest_mismatch")]
    assert (receiver.compared, receiver.differing) == (2, 1)
    assert not receiver.receiving.wants and receiver.checked(Sum(2, 102)) == []


@pytest.mark.parametrize(("every", "is_patient"), [(64, False), (1, True)])
def test_a_sample_that_the_sender_cannot_digest_does_not_cost_the_request(every: int, is_patient: bool) -> None:
    receiver = PullingReceiver(check_every=every)
    receiver.pulled()
    asked = len(receiver.pull.compared)
    said = receiver.receiving.tick(NOW + COMPARE_S / 2)
    assert not told(said)
    said = receiver.receiving.tick(NOW + COMPARE_S)
    if is_patient:
        assert not told(said) and not any(isinstance(each, Uncompared) for each in said)
        return
    assert [type(each) for each in told(said)] == [Done] and isinstance(sent(said)[-1], Settled)
    assert Uncompared(receiver.pull.transfer, asked) in said and asked == 1 and not receiver.receiving.wants
    assert receiver.checked(Sum(0, 0xBAD)) == [], "too late to matter"


def test_a_chunk_is_compared_while_others_are_read() -> None:
    receiver = PullingReceiver(check_every=64)
    (chunk,) = receiver.pull.compared
    said = receiver.receiving.on_reports([Summed("x", {chunk: 5})], NOW)
    assert sent(said) == [Check(transfer="x", digests=(Sum(chunk, 5),))] and not told(said)
    assert receiver.checked(Sum(chunk, 5)) == [] and receiver.compared == 1
    said = receiver.receiving.on_reports([Pulled("x", receiver.pull.end_chunk, 1, 1, {}, None)], NOW)
    assert [type(each) for each in (*told(said), *sent(said))] == [Done, Settled]


def test_a_difference_that_is_found_while_others_are_read_is_told_once_nothing_is_written() -> None:
    receiver = PullingReceiver(check_every=64)
    (chunk,) = receiver.pull.compared
    receiver.receiving.on_reports([Summed("x", {chunk: 5})], NOW)
    said = receiver.checked(Sum(chunk, 6))
    assert not told(said) and [type(each) for each in said] == [StopReceiving] and receiver.pull.lease.is_given_up
    assert receiver.receiving.on_reports([Summed("x", {9: 5})], NOW) == [], "nobody wants to know any more"
    (failed,) = told(receiver.receiving.on_reports([Quiet("x")], NOW))
    assert isinstance(failed, Failed) and failed.code == "digest_mismatch"


def test_nothing_is_asked_where_nothing_is_compared() -> None:
    receiver = PullingReceiver(check_every=0)
    assert not receiver.pull.compared
    said = receiver.pulled()
    assert [type(each) for each in (*told(said), *sent(said))] == [Done, Settled]


def test_the_lease_is_kept_while_the_sender_compares() -> None:
    """Or the sender would say that its receivers do not come back."""
    receiver = PullingReceiver()
    receiver.pulled()
    assert not [each for each in sent(receiver.receiving.tick(NOW + LEASE_S / 4)) if isinstance(each, Renew)]
    assert [each for each in sent(receiver.receiving.tick(NOW + LEASE_S / 2)) if isinstance(each, Renew)]


@pytest.mark.parametrize("key", ["of another", ""])
def test_nobody_with_another_key_lengthens_a_lease(key: str) -> None:
    receiver = PullingReceiver()
    receiver.receiving.tick(NOW + LEASE_S / 2)
    before = receiver.pull.lease.ends
    answer = BlockTables(transfer="x", tokens=64, is_last=True, renewal=1, blocks=())
    assert receiver.told(answer, key) == [] and receiver.pull.lease.ends == before
    receiver.told(answer)
    assert receiver.pull.lease.ends > before


def test_digests_that_nobody_asked_for_change_nothing() -> None:
    """Before the read has ended, of other chunks, by another, of another's transfer, twice."""
    receiver = PullingReceiver()
    assert receiver.checked(Sum(0, 5)) == []
    receiver.pulled()
    assert receiver.checked(Sum(99, 5), Sum(1 << 62, 5)) == []
    for another in ({"incarnation": "another"}, {"key": "of another"}, {"key": ""}, {"transfer": "y"}):
        assert receiver.checked(Sum(0, 5), **another) == []
    assert receiver.checked(Sum(0, 100)) == [] and receiver.checked(Sum(0, 5)) == []
    assert number_of("r") in receiver.receiving.wants and receiver.compared == 1


@pytest.mark.parametrize("end", ["abandon", "lost", "failing", "deadline", "left"])
def test_no_want_waits_for_a_sender_that_does_not_answer(end: str) -> None:
    receiver = PullingReceiver()
    receiver.pulled()
    receiving, incarnation = receiver.receiving, receiver.incarnation
    match end:
        case "abandon":
            said = receiving.abandon(number_of("r"), NOW)
        case "lost":
            said = receiving.unreachable("P0", "peer_silent", "test", NOW)
        case "failing":
            said = receiving.failing(incarnation, "x", "withdrawn", "test", NOW, KEY)
        case "left":
            said = receiving.engine_left(NOW)
        case _:
            said = receiving.tick(NOW + 50.0)
    assert [type(each) for each in told(said)] == ([] if end == "left" else [Failed])
    assert not receiving.wants and receiver.checked(Sum(0, 100)) == []


def test_many_digests_go_in_several_messages() -> None:
    receiver = PullingReceiver()
    incoming = receiver.receiving.wants[number_of("r")].incoming_transfers["x"]
    assert isinstance(incoming, IncomingByPull)
    checks = sent(incoming._check({i: i for i in range(MAX_SUMS + 1)}, NOW))
    assert [len(each.digests) for each in checks] == [MAX_SUMS, 1]
