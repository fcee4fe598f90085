"""A sender tells its receiver the blocks that it may read by then, and keeps them while the receiver counts on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Released
from kvbridge_proto.peer import BlockTables, Drained, Failing, Renew, Settled, SlotLease

from kvbridge.errors import KVBridgeError
from kvbridge.exchange.actions import Send, Tell
from kvbridge.exchange.block_tables import ready_chunks
from kvbridge.exchange.orders import AwaitedPull, Watch
from kvbridge.geometry.plan import Part, any_tables, plan
from kvbridge.geometry.shard import assign
from kvbridge.loopback.messages import number_of
from kvbridge.routes.pull.halves import COUNTED_S, LEASE_HEARD_S, LEASE_S, GrantedLease, Reading, ReadLease
from testing.oracle import block_table, build_all, tables_of
from tests.integration.device.test_carried import CASES
from tests.unit.exchange.claimant import Claimant
from tests.unit.routes.test_verify import NOW, PullingReceiver, sent

SLOT_BYTES = 1 << 14


def reading_of(pool: Any) -> Reading:
    return Reading(ReadLease(0.0), cast(Any, SimpleNamespace(peer_pool=pool)))


@pytest.mark.parametrize("tokens", [range(75), range(37, 75), range(33, 34)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_receiver_is_told_all_that_it_may_read(case: str, tokens: range) -> None:
    """In one piece, and as the prompt is computed."""
    ours, theirs = CASES[case]
    senders, end = build_all(ours), tokens.stop
    ids = tables_of(senders[0].pool, end, seed=1)
    for steps in ([end], [*range(8, end, 13), end], [end, end]):
        for receiver in build_all(theirs):
            takes = assign([sender.pool for sender in senders], receiver.pool)
            for sender, taken in zip(senders, takes, strict=True):
                planned = plan(sender.pool, receiver.pool, taken, tokens.start, end, SLOT_BYTES)
                granted, reading, read = GrantedLease(), reading_of(sender.pool), 0
                stand_ins = any_tables(planned, sender.pool)
                for number, there in enumerate(steps):
                    is_last = number == len(steps) - 1
                    tables = block_table(sender.pool, ids, 0, there)
                    told = granted.answer("t", planned, tables, there, is_last, ready_chunks(planned, there, is_last))
                    reading.learn(told, planned)
                    ready = ready_chunks(planned, told.tokens, told.is_last)
                    assert granted.ready == ready
                    for index in range(read, ready):
                        chunk = planned.chunk(index)
                        right = Part(planned, chunk, block_table(sender.pool, ids, 0, end), is_sender=True).moves()
                        found = Part(planned, chunk, reading.tables, is_sender=True).moves()
                        awaited = Part(planned, chunk, stand_ins, is_sender=True).moves()
                        for one, other, any_one in zip(right, found, awaited, strict=True):
                            assert one.places.tolist() == other.places.tolist()
                            assert len(any_one.places) == len(one.places)
                    read = ready
                assert read == planned.chunks


def test_a_read_is_prepared_once_its_sender_is_asked() -> None:
    """By what it will read: the copier finds what it prepared by the very plan and tables."""
    receiver = PullingReceiver()
    claimed, awaited = receiver.asked
    assert isinstance(claimed, Send) and isinstance(awaited, AwaitedPull)
    assert awaited.plan is receiver.pull.plan and awaited.tables is receiver.pull.tables
    assert (awaited.transfer, awaited.memory_id) == (receiver.pull.transfer, receiver.pull.memory_id)


def test_nothing_is_told_twice() -> None:
    sender, receiver = build_all(CASES["tensor parallel"][0])[0], build_all(CASES["tensor parallel"][1])[0]
    (taken, *_) = assign([each.pool for each in build_all(CASES["tensor parallel"][0])], receiver.pool)
    planned = plan(sender.pool, receiver.pool, taken, 0, 64, SLOT_BYTES)
    tables = block_table(sender.pool, tables_of(sender.pool, 64, seed=1), 0, 64)
    granted = GrantedLease()
    first = granted.answer("t", planned, tables, 40, False, 0)
    second = granted.answer("t", planned, tables, 64, True, planned.chunks)
    assert [len(piece.ids) for piece in first.blocks] == [3] and [len(piece.ids) for piece in second.blocks] == [1]
    assert granted.answer("t", planned, tables, 64, True, planned.chunks).blocks == ()


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ((Blocks(7, 0, (1,)),), "unknown_group"),
        ((Blocks(0, 0, (1 << 20,)),), "block_out_of_range"),
        ((Blocks(0, 0, (1,)), Blocks(0, 2, (1,))), "blocks_not_contiguous"),
        ((Blocks(0, 0, (1, 2, 3, 4)), Blocks(0, 4, (5,))), "blocks_too_many"),
    ],
)
def test_blocks_that_the_senders_pool_or_the_plan_does_not_have_are_refused(
    pieces: tuple[Blocks, ...], code: str
) -> None:
    senders, receiver = build_all(CASES["tensor parallel"][0]), build_all(CASES["tensor parallel"][1])[0]
    (taken, *_) = assign([each.pool for each in senders], receiver.pool)
    planned = plan(senders[0].pool, receiver.pool, taken, 0, 64, SLOT_BYTES)
    reading = reading_of(senders[0].pool)
    with pytest.raises(KVBridgeError) as caught:
        reading.learn(BlockTables(transfer="t", tokens=16, is_last=False, renewal=0, blocks=pieces), planned)
    assert caught.value.code == code


def test_a_lease_begins_when_it_is_asked_for_and_counts_once_it_is_answered() -> None:
    lease = ReadLease(10.0)
    assert not lease.counts(10.0)
    lease.answered(0)
    assert lease.counts(10.0 + COUNTED_S - 1e-6) and not lease.counts(10.0 + COUNTED_S)
    number = lease.renew(10.3)
    assert not lease.counts(10.5)
    lease.answered(number)
    assert lease.counts(10.3 + COUNTED_S - 1e-6) and not lease.counts(10.3 + LEASE_S)


def test_answers_out_of_order_or_to_nothing_asked_shorten_no_lease_and_lengthen_none() -> None:
    lease = ReadLease(0.0)
    first, second = lease.renew(1.0), lease.renew(2.0)
    lease.answered(second)
    lease.answered(first)  # comes late
    lease.answered(second)  # comes twice
    lease.answered(99)
    assert lease.ends == 2.0 + COUNTED_S


def test_an_answer_to_an_older_renewal_promises_nothing_of_the_newer_one() -> None:
    """What was asked for since then may be answered with the end."""
    receiver = PullingReceiver()
    said = [each for later in (LEASE_S / 2, LEASE_S) for each in sent(receiver.receiving.tick(NOW + later))]
    assert [each.number for each in said if isinstance(each, Renew)] == [1, 2]
    ends = []
    for number in (1, 2):
        answer = BlockTables(transfer="x", tokens=64, is_last=True, renewal=number, blocks=())
        assert receiver.told(answer) == []
        ends.append(receiver.pull.lease.ends)
    assert ends == [NOW + LEASE_S / 2 + COUNTED_S, NOW + LEASE_S + COUNTED_S]


def test_a_sender_answers_the_newest_renewal_that_has_come() -> None:
    peer = Claimant(is_pulling=True)
    peer.say()
    sending, now = peer.sending, peer.world.now
    for came in ([], [1], [3, 2]):
        for number in came:
            sending.on_message(peer.incarnation, Renew(transfer="x", number=number))
        (told,) = sending.answers(now, now, lambda count: True)
        assert isinstance(told, Send) and isinstance(told.body, BlockTables)
        assert told.body.renewal == max(came, default=0)


@pytest.mark.proves("G3")
def test_a_receivers_lease_ends_before_the_senders_whatever_their_clocks_do() -> None:
    """It begins no later, and is shorter by more than two clocks of a thousandth off can make of it."""
    slow, fast = 1 - 1e-3, 1 + 1e-3
    assert COUNTED_S / slow < LEASE_S / fast
    assert LEASE_HEARD_S < LEASE_S


def test_slots_that_are_lent_where_blocks_are_read_are_refused() -> None:
    """A sender that shipped as well would lose count of who still reads."""
    peer = Claimant(is_pulling=True)
    assert peer.refusal(leases=(SlotLease(0, 1),)) == "bad_lease"
    peer.say()
    (told,) = peer.sending.answers(peer.world.now, peer.world.now, lambda count: True)
    assert isinstance(told, Send) and isinstance(told.body, BlockTables) and told.body.is_last
    (failing,) = peer.grant("x", SlotLease(0, 1))
    assert isinstance(failing, Send) and isinstance(failing.body, Failing) and failing.body.code == "bad_lease"
    kinds = [type(each.body if isinstance(each, Send) else each.message) for each in peer.cancel("bad_lease")]
    assert kinds == [Drained, Released] and not peer.sending.offers and not peer.sending.outgoing_transfers


@pytest.mark.parametrize("end", ["settled", "cancel", "lease"])
def test_blocks_that_are_read_are_released_when_nobody_counts_on_them(end: str) -> None:
    """Not before, though their engine takes them back; what is said of another's transfer changes nothing."""
    peer = Claimant(is_pulling=True)
    peer.say()
    sending, now = peer.sending, peer.world.now
    assert (
        sending.answers(now, now - LEASE_HEARD_S, lambda count: True) == []
    )  # its engine may have said something since
    assert sending.answers(now, now, lambda count: False) == [Watch(0)]
    assert sending.answers(now, now, lambda count: True)
    said = sending.withdraw(number_of("r"), "aborted", now)
    assert [type(each.body) for each in said if isinstance(each, Send)] == [Failing]
    assert not any(isinstance(each, Tell) for each in said) and sending.is_promised
    sending.on_message(peer.incarnation, Renew(transfer="x", number=1))
    assert (
        sending.on_message("another", Settled(transfer="x")) == []
        and sending.answers(now, now, lambda count: True) == []
    )
    match end:
        case "settled":
            said = sending.on_message(peer.incarnation, Settled(transfer="x"))
        case "cancel":
            said = peer.cancel("aborted")
        case _:
            assert not any(isinstance(each, Tell) for each in sending.tick(now + LEASE_S - 0.01))
            said = sending.tick(now + LEASE_S + 0.01)
    assert any(isinstance(each, Tell) and isinstance(each.message, Released) for each in said)
    assert not sending.is_promised and not sending.outgoing_transfers and not sending.offers
