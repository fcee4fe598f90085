"""Every safety rule, switched off: the real code as it would be without the rule."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from kvbridge_proto.engine import Abandon, Detached
from kvbridge_proto.peer import BlockTables, Checked, Drained, Sum

from kvbridge.adapters.vllm.fetches import Fetch, Fetches
from kvbridge.agent.engines import Engines
from kvbridge.agent.kept import KeptAnswers
from kvbridge.agent.outgoing_peers import OutgoingPeer, OutgoingPeers, ProbeLanes
from kvbridge.agent.peers import IncomingPeers
from kvbridge.agent.rebuild import Rebuilder
from kvbridge.agent.runners import SenderRunner
from kvbridge.dataplane import orders as receive_orders
from kvbridge.dataplane import resources
from kvbridge.dataplane.attached import AttachedMemory, WaitEngineHeard, WaitFence
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.dataplane.orders import ReceiveOrders, SendOrders
from kvbridge.dataplane.resources import StagingEndpoints
from kvbridge.device.copier import Moved
from kvbridge.exchange import sender
from kvbridge.exchange.actions import Send
from kvbridge.exchange.offers import Rendezvous
from kvbridge.exchange.orders import Failure, Gathered, Landed, Quiet, StopReceiving, StopSending
from kvbridge.exchange.receiver import Receiver
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.transfer import OpenOffer, OpenWant
from kvbridge.exchange.wants import failed
from kvbridge.routes.pull import halves as pull_halves
from kvbridge.routes.pull import job as fills
from kvbridge.routes.pull import job as pull_job
from kvbridge.routes.pull.halves import LEASE_S, IncomingByPull, OutgoingByPull, Reading, ReadLease
from kvbridge.routes.pull.job import PullRoute
from kvbridge.routes.slots import jobs as slot_jobs
from kvbridge.routes.slots.halves import IncomingBySlots, OutgoingBySlots, SlotReceiving, UnconfirmedTransfers
from kvbridge.routes.slots.receive_slots import ReceiveSlots
from kvbridge.state_machines import SlotEvent, SlotState, TransferState, WantState
from kvbridge.transport.fabric import Wrote
from kvbridge.transport.link import Numbered
from testing.halves import by_slots
from testing.sim import engine, matter, rank
from testing.sim.local import EngineSocket
from testing.sim.matter import SimCopier
from testing.sim.process import Process
from testing.sim.scenario import DRAFTED, PULLED, SHARED, STATED
from tests.unit.sim.shapes import (
    Shape,
    answered_late,
    as_once,
    asked_unheard,
    kept_at_once,
    kept_until_read,
    left_soon,
    offered_again,
    same,
    spoiled,
    uncompared,
    unheard,
    withdrawn_while_compared,
)

Mutate = Callable[[Callable[[Any, str, Any], None]], None]
LENT_TWICE = "a slot that is free, .* was written"
FOREIGN = "waste .* where prompt .* belongs"
UNWANTED = "was written while nobody wanted it"
FORGED = "a forged notice counted: .*"
NO_OTHER_END = "a session over the link with .* that is none at its other end"
READ_WRONG = "is done, but has"
OTHER_STATE = r"prompt (\d+) token \d+ row (20\d) (where|instead of) prompt \1 token \d+ row \2"
LATE = "when all was well again: failed"
MEANWHILE = "while another agent stood still: failed"


def instead(owner: Any, attribute: str, value: Any) -> Mutate:
    return lambda put: put(owner, attribute, value)


def around(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Mutate]:
    """The function takes the place of that one, which it gets as its first argument."""

    def made(function: Callable[..., Any]) -> Mutate:
        def mutate(put: Callable[[Any, str, Any], None]) -> None:
            right = getattr(owner, attribute)
            put(owner, attribute, lambda *args, **more: function(right, *args, **more))

        return mutate

    return made


@dataclass(frozen=True, slots=True)
class Rule:
    """How it is switched off, a seed that showed it when this was written, and how; and what scenarios are made into.

    If that seed does not show it any more, the rest is looked through.
    """

    off: Mutate
    seed: int = 0
    how: str = ""
    shape: Shape = same


@around(receive_orders, "matches")
def _generation(right: Any, notice: Any, ordered: Any, order: Any) -> bool:
    known = ordered.leases.get(notice.slot, notice.generation)
    return right(msgspec.structs.replace(notice, generation=known), ordered, order)


@around(ReceiveSlots, "quarantine")
def _quarantine(right: Any, self: ReceiveSlots, transfer: str) -> int:
    return self._step_all(transfer, (SlotState.LENT,), SlotEvent.DRAIN) and 0


@around(Engines, "rebuild")
def _freed_in_place(right: Any, self: Engines, endpoints: StagingEndpoints, reason: str) -> None:
    self._peers.renew(reason)
    self._receiver.do(self._receiver.receiving.rebuilt(self._current.engine, self._clock()))


@around(Rebuilder, "check")
async def _never_rebuilt(right: Any, self: Rebuilder) -> None: ...


@around(Rebuilder, "_check_send_slots")
async def _stuck_sending(right: Any, self: Rebuilder) -> None: ...


def _digest(put: Callable[[Any, str, Any], None]) -> None:
    put(matter, "compared", lambda ticket, digest, expected: Moved(ticket, digest))
    put(matter, "is_right", lambda found, expected: True)


def _matches(*dropped: str) -> Mutate:
    """`matches` without looking at these fields."""

    @around(receive_orders, "matches")
    def matches(right: Any, notice: Any, ordered: Any, order: Any) -> bool:
        truth = {name: getattr(order, name) for name in dropped if name != "chunk_bytes"}
        if "chunk_bytes" in dropped and notice.chunk < order.plan.chunks:
            truth["chunk_bytes"] = order.plan.chunk(notice.chunk).size_bytes
        return right(msgspec.structs.replace(notice, **truth), ordered, order)

    return matches


@around(receive_orders, "matches")
def _twice(right: Any, notice: Any, ordered: Any, order: Any) -> bool:
    missing, ordered.missing = ordered.missing, set(range(order.plan.chunks))
    try:
        return right(notice, ordered, order)
    finally:
        ordered.missing = missing


def _nobody_listens(put: Callable[[Any, str, Any], None]) -> None:
    def never(*_: Any) -> Generator[Any, Any, Failure]:
        yield from ()
        return None

    for jobs in (slot_jobs, pull_job):
        put(jobs, "taken_back", never)


@around(Sender, "_stop")
def _drained_too_soon(right: Any, self: Sender, out: Any, code: str, reason: str) -> Any:
    actions = right(self, out, code, reason)
    if actions and out.state is TransferState.STOPPING:
        actions.append(Send(out.incarnation, Drained(transfer=out.transfer, code=code, reason=reason)))
    return actions


@around(Receiver, "_lose")
def _lost_is_gone(right: Any, self: Receiver, address: str, now: float) -> Any:
    hurt, half = right(self, address, now), by_slots(self)
    for transfer in [transfer for transfer, each in half.unconfirmed._of.items() if each.address == address]:
        half.slots.drain(transfer)
    return hurt


def _drained_while_scattering(put: Callable[[Any, str, Any], None]) -> None:
    def drain(self: SlotReceiving, transfer: str) -> None:
        self.unconfirmed.settle(transfer)
        self.slots.drain(transfer)

    put(SlotReceiving, "drain", drain)


@around(Receiver, "_fail")
def _failed_while_scattering(right: Any, self: Receiver, wanted: Any, code: str, reason: str, now: float) -> Any:
    is_open = wanted.state in (WantState.REACHING, WantState.FLOWING)
    actions = right(self, wanted, code, reason, now)
    if is_open and wanted.state is WantState.ENDING:
        actions.append(failed(wanted.want, code, reason))
    return actions


@around(Receiver, "_fill")
def _done_without_zeros(right: Any, self: Receiver, wanted: Any, filling: Any) -> Any:
    actions, wanted.filling = right(self, wanted, filling), ""
    return actions


def _is_carried_but_for_zeros(self: OpenWant) -> bool:
    return any(incoming.is_ordered for incoming in self.incoming_transfers.values())


@around(fills, "begun")
def _unfenced_zeros(
    right: Any, attached: AttachedMemory, count: int, ends: float, what: Any
) -> Generator[Any, Any, None]:
    return right(attached, 0, ends, what)


@around(ReceiveOrders, "stop")
def _quiet_at_once(right: Any, self: ReceiveOrders, stop: StopReceiving) -> None:
    """The data plane says that it is quiet when it is told to stop, and goes on."""
    self.report(Quiet(stop.transfer))


@around(SendOrders, "stop")
def _quiet_while_sent(right: Any, self: SendOrders, stop: StopSending) -> None:
    """The same at the sender."""
    self.report(Quiet(stop.transfer))


@around(SendOrders, "stop")
def _gathered_at_once(right: Any, self: SendOrders, stop: StopSending) -> None:
    """It says that the blocks are read no more when it is told to stop, though a chunk is being gathered."""
    if stop.transfer in self.open:
        self.report(Gathered(stop.transfer))
    right(self, stop)


@around(DataPlane, "let_go")
async def _leave_at_once(right: Any, self: DataPlane, attached: AttachedMemory) -> bool:
    return True


@around(EngineSocket, "send")
def _leaves_without_a_word(right: Any, self: EngineSocket, message: Any) -> None:
    if not isinstance(message, Detached):
        right(self, message)


@around(IncomingBySlots, "on_report")
def _done_too_soon(right: Any, self: IncomingBySlots, report: Landed, now: float) -> Any:
    if self.placed + report.chunks == self.plan.chunks - 1 and self.wanted.state is WantState.FLOWING:
        self.placed += 1  # one is counted that has not come
    return right(self, report, now)


@around(Receiver, "_stop")
def _lost_leaves_no_quarantine(right: Any, self: Receiver, incoming: Any, now: float) -> None:
    """A transfer whose link was lost is forgotten: its slots stay quarantined for ever."""
    right(self, incoming, now)
    if incoming.is_lost and incoming.state is TransferState.ENDED:
        by_slots(self).unconfirmed.settle(incoming.transfer)


@around(OutgoingPeers, "_dial")
def _half_a_session(right: Any, self: OutgoingPeers, address: str) -> OutgoingPeer:
    self._serial += 1
    dialled = self.sessions[address] = OutgoingPeer(address, self._control.dial(address), self._serial)
    self.ask(address)
    return dialled


@around(OutgoingPeers, "_end")
def _silent(right: Any, self: OutgoingPeers, address: str, *args: Any, **more: Any) -> None:
    link: Any = dialled.link if (dialled := self.sessions.get(address)) else None
    if link is not None:
        send, link.send = link.send, lambda body: None
        try:
            right(self, address, *args, **more)
        finally:
            link.send = send


@around(UnconfirmedTransfers, "can_settle")
def _own_start_only(right: Any, self: UnconfirmedTransfers, transfer: str, incarnation: str, key: str) -> bool:
    its = self._of.get(transfer)
    return its is not None and its.incarnation == incarnation


@around(OutgoingPeers, "_sort_out")
def _slower_does_not_wait(right: Any, self: OutgoingPeers) -> None:
    for dialled in [each for each in self.sessions.values() if each.known_incarnation]:
        others = [
            own for own in self.sessions.values() if not own.known_incarnation and own.link.key == dialled.link.key
        ]
        same = [own for own in others if own.link.peer_incarnation == dialled.known_incarnation]
        self._merge(dialled, same[0]) if same else self._insist(dialled)


@around(Numbered, "check")
def _unnumbered(right: Any, self: Numbered, envelope: Any) -> None:
    self.peer_incarnation = envelope.sender


def _over_at_once(job: str, waits: str, ended: Callable[[Any, Any], Any]) -> Mutate:
    """A job of that name does not wait in `waits` of the data plane, but goes on with what `ended` says of data plane
    and key."""

    @around(DataPlane, "_resume")
    def resume(right: Any, self: DataPlane, going: Any, event: Any) -> None:
        right(self, going, event)
        left = getattr(self, waits)
        for key in [key for key, each in left.items() if each is going and going.__name__ == job]:
            left[key] = _heedless()
            self._resume(going, ended(self, key))

    return resume


def _heedless() -> Generator[Any, Any, None]:
    """A job that has begun, to be told of an end that nobody waits for."""

    def job() -> Generator[Any, Any, None]:
        yield

    begun = job()
    next(begun)
    return begun


def _gather_unwaited(put: Callable[[Any, str, Any], None]) -> None:
    """The digest is then that of what lies in the slot already."""
    right, digests = SimCopier.gather, dict[tuple[Any, int], int]()

    def gather(self: SimCopier, pool: Any, part: Any, slot: Any, *args: Any) -> int:
        count = slot.size_bytes // matter.CELL_BYTES
        before = [*self._process.ram.get(slot.address, []), *[matter.NOTHING] * count][:count]
        ticket = right(self, pool, part, slot, *args)
        digests[self, ticket] = matter.digest_of(before)
        return ticket

    def ended(data_plane: DataPlane, ticket: int) -> Moved:
        return Moved(ticket, digests[data_plane._at_work.copier, ticket])

    put(SimCopier, "gather", gather)
    _over_at_once("send", "_moving", ended)(put)


# States:


@around(sender, "check_last")
def _of_other_tokens(right: Any, plan: Any, tables: Any, tokens: int) -> None:
    right(plan, tables, plan.end_token)


# The read lease (kvbridge/routes/pull/halves.py):


@around(IncomingByPull, "_on_tables")
def _begins_when_answered(right: Any, self: IncomingByPull, told: BlockTables, now: float) -> Any:
    self.reading.lease.ends = now + LEASE_S
    return right(self, told, now)


@around(ReadLease, "renew")
def _renewed_unheard(right: Any, self: ReadLease, now: float) -> int:
    self.ends = now + LEASE_S
    return right(self, now)


def _looks_before(put: Callable[[Any, str, Any], None]) -> None:
    """As if the clock were looked at when the read was begun."""
    right, begun = SimCopier.pull, WeakKeyDictionary[Any, float]()

    def pull(self: SimCopier, *args: Any) -> int:
        begun[self] = self._process.world.clock.now
        return right(self, *args)

    def counted(self: PullRoute, pull: Any, attached: Any) -> Generator[Any, Any, Failure]:
        at = begun.get(self._resources.copier, float("inf"))
        return None if pull.lease.counts(at) else ("lease_over", "")
        yield

    put(SimCopier, "pull", pull)
    put(PullRoute, "_counted", counted)


@around(PullRoute, "close_unread")
def _unmapped_while_read(right: Any, self: PullRoute) -> None:
    while self.closing:
        self.closing.pop().unmap()


@around(IncomingByPull, "_on_tables")
def _of_any_offer(right: Any, self: IncomingByPull, told: BlockTables, now: float) -> Any:
    ahead = self.reading.ahead
    return right(self, told if ahead is None else msgspec.structs.replace(told, announced=ahead.number), now)


@around(IncomingByPull, "_on_ahead")
def _counted_unanswered(right: Any, self: IncomingByPull, ahead: Any, now: float) -> Any:
    if ahead.is_void is None:
        ahead.is_void, self.reading.lease.ends = False, now + LEASE_S
    return right(self, ahead, now)


@around(IncomingByPull, "_on_checked")
def _not_compared(right: Any, self: IncomingByPull, told: Checked, now: float) -> Any:
    """Whatever the sender finds is taken for what was read."""
    read = self.reading.unchecked
    told = msgspec.structs.replace(told, digests=tuple(Sum(e.chunk, read.get(e.chunk, 0)) for e in told.digests))
    return right(self, told, now)


@around(OpenOffer, "update_readable")
def _unfenced(right: Any, self: OpenOffer, has_reached: Any) -> None:
    self.steps.clear()
    self.readable = self.tokens


@around(SenderRunner, "unread")
async def _reads_unawaited(right: Any, self: SenderRunner) -> None: ...


def _nothing(owner: Any, method: str) -> Mutate:
    """The method of that name does nothing."""
    return instead(owner, method, lambda self, *args: None)


# What is kept, and shared:


@around(Sender, "_release_if_over")
def _kept_is_released_early(right: Any, self: Sender, offered: OpenOffer) -> Any:
    shares, offered.shares = offered.shares, {}
    try:
        return right(self, offered)
    finally:
        offered.shares = shares


@around(OpenOffer, "share")
def _shared_unfenced(right: Any, self: OpenOffer, *args: Any) -> OpenOffer:
    share: OpenOffer = right(self, *args)
    share.steps.clear()
    share.readable = share.tokens
    return share


@around(Fetches, "_unneeded")
def _others_forgotten(right: Any, self: Fetches, fetch: Any, reason: str) -> Any:
    return [] if fetch.is_over else [Abandon(number=fetch.want.number, reason=reason)]


MUTATIONS: dict[str, Rule] = {
    "ignore_lease_generation": Rule(_generation, 42, FORGED + "generation=1073741824"),
    "free_quarantined_at_once": Rule(_quarantine, 5, LENT_TWICE),
    "ignore_digest": Rule(_digest, 8, FOREIGN),
    "ignore_notice_token": Rule(_matches("token"), 249, FORGED + "token=b'forged"),
    "ignore_notice_sender_incarnation": Rule(_matches("sender_incarnation"), 685, FORGED + "sender_incarnation='feed"),
    "ignore_notice_receiver_incarnation": Rule(
        _matches("receiver_incarnation"), 109, FORGED + "receiver_incarnation='feed"
    ),
    "ignore_notice_sender_epoch": Rule(_matches("sender_epoch"), 109, FORGED + "sender_epoch=99"),
    "ignore_notice_receiver_epoch": Rule(_matches("receiver_epoch"), 54, FORGED + "receiver_epoch=99"),
    "ignore_notice_size": Rule(_matches("chunk_bytes"), 449, FORGED + "chunk_bytes=1,"),
    "release_while_read": Rule(
        instead(OutgoingBySlots, "is_reading", property(lambda self: False)),
        52,
        FOREIGN,
    ),
    "give_tokens_before_offer": Rule(
        _nothing(sender, "check_begin"), 135, "(waste .*|nothing) where prompt .* belongs"
    ),
    "ignore_fence": Rule(instead(AttachedMemory, "has_reached", lambda self, count: True), 18, FOREIGN),
    "count_read_while_unheard": Rule(_nobody_listens, 301, FOREIGN),
    "ignore_unread_engine_messages": Rule(
        instead(WaitEngineHeard, "is_over", property(lambda self: True)), 301, FOREIGN
    ),
    "drained_while_writing": Rule(_drained_too_soon, 1, LENT_TWICE),
    "drained_for_lost_session": Rule(
        instead(Sender, "renounce", lambda self, incarnation, cancel: True), 5, LENT_TWICE
    ),
    "lost_link_is_dead_sender": Rule(_lost_is_gone, 11, LENT_TWICE),
    "failed_while_scattering": Rule(_failed_while_scattering, 3, UNWANTED),
    "let_go_while_used": Rule(_leave_at_once, 121, UNWANTED, left_soon),
    "reuse_at_once_after_giving_up": Rule(instead(rank, "READERS_S", 0.0), 3120, FOREIGN),
    "kernels_end_with_socket": Rule(instead(rank, "GONE_S", 0.0), 5244, UNWANTED),
    "let_go_without_a_word": Rule(_leaves_without_a_word, 6, "has closed its end without a word"),
    "done_one_chunk_too_soon": Rule(_done_too_soon, 5, "is done, but has waste"),
    "forget_lost_transfer_slots": Rule(_lost_leaves_no_quarantine, 36, LATE),
    "never_ask_refusing_sender": Rule(
        instead(Receiver, "refused", lambda self, address, incarnation, key="": []), 201, r"slots: .*quarantined=[1-9]"
    ),
    "dial_without_engine": Rule(_half_a_session, 399, "a session with .* that is NEW"),
    "free_quarantined_in_place": Rule(_freed_in_place, 140, LENT_TWICE),
    "last_hello_wins": Rule(instead(IncomingPeers, "_may_replace", lambda *_: True), 125, LATE),
    "ended_waits_for_fence": Rule(
        instead(WaitFence, "is_over", property(lambda self: self.attached.has_reached(self.count))),
        41,
        "which is over, waits for a fence",
    ),
    "scatter_after_end": Rule(_quiet_at_once, 3, UNWANTED),
    "done_before_zeros": Rule(_done_without_zeros, DRAFTED + 1, READ_WRONG),
    "zeros_before_fence": Rule(_unfenced_zeros, DRAFTED + 3, UNWANTED),
    "failed_while_writing_zeros": Rule(
        instead(OpenWant, "is_carried", property(_is_carried_but_for_zeros)), DRAFTED, UNWANTED
    ),
    "send_what_is_to_stop": Rule(_quiet_while_sent, 22, LENT_TWICE),
    "gathered_too_soon": Rule(_gathered_at_once, 52, FOREIGN),
    "forget_ended_offers": Rule(_nothing(Rendezvous, "remember"), 18, "waited .* for an offer that had ended"),
    "keep_route_after_session": Rule(_nothing(DataPlane, "disconnect"), 5, "targets .*, sessions"),
    "keep_probe_lane": Rule(_nothing(ProbeLanes, "take_back"), 0, "lanes that are out"),
    "keep_left_engine_mapped": Rule(_nothing(AttachedMemory, "close"), 2, "the memory of .* is mapped"),
    "never_rebuild_receive_slots": Rule(_never_rebuilt, 97, MEANWHILE),
    "never_replace_send_slots": Rule(_stuck_sending, 3601, MEANWHILE),
    "refuse_receive_slots_early": Rule(instead(resources, "MOST_KEPT", 0), 97, "other receive slots were refused"),
    "refuse_send_slots_early": Rule(instead(resources, "MOST_KEPT", 0), 3601, "other send slots were refused"),
    "ignore_message_numbers": Rule(_unnumbered, 3611, LATE),
    "drop_session_silently": Rule(_silent, 2, NO_OTHER_END, as_once("drop_session_silently")),
    "disbelieve_successor": Rule(_own_start_only, 255, r"slots: .*quarantined=[1-9]"),
    "slower_address_does_not_wait": Rule(_slower_does_not_wait, 2189, NO_OTHER_END),
    "write_before_gathered": Rule(_gather_unwaited, 4, "nothing where prompt .* belongs"),
    "reuse_send_slot_while_writing": Rule(
        _over_at_once("send", "_writing", lambda data_plane, key: Wrote(key[1])),
        7,
        "a digest was wrong, and nothing had spoiled",
    ),
    "count_read_after_lease": Rule(
        instead(ReadLease, "counts", lambda self, now: True), PULLED + 85, READ_WRONG, uncompared
    ),
    "begin_lease_at_answer": Rule(_begins_when_answered, PULLED, READ_WRONG, answered_late),
    "count_unanswered_renewal": Rule(_renewed_unheard, PULLED + 3, READ_WRONG, answered_late),
    "check_clock_before_read_ends": Rule(_looks_before, PULLED + 85, READ_WRONG, uncompared),
    "lease_without_hearing_engine": Rule(
        instead(pull_halves, "LEASE_HEARD_S", float("inf")), PULLED + 20, READ_WRONG, asked_unheard
    ),
    "release_leased_blocks": Rule(
        instead(OutgoingByPull, "is_promised", property(lambda self: False)), PULLED + 6, READ_WRONG, unheard(None)
    ),
    "detach_while_read": Rule(_reads_unawaited, PULLED + 3, READ_WRONG, unheard("detach")),
    "reuse_at_once_after_agent_died": Rule(
        instead(rank, "READERS_S", 0.0), PULLED + 5, READ_WRONG, unheard("kill agent")
    ),
    "take_back_too_soon": Rule(
        instead(engine, "READERS_S", 0.1), PULLED + 13, READ_WRONG, unheard("freeze loop", is_impatient=True)
    ),
    "read_before_fence": Rule(_unfenced, PULLED + 3, READ_WRONG, uncompared),
    "count_what_was_announced_of_another_offer": Rule(_of_any_offer, PULLED + 3, READ_WRONG, offered_again),
    "count_read_ahead_unanswered": Rule(_counted_unanswered, PULLED + 11, READ_WRONG, uncompared),
    "read_ahead_of_fence": Rule(
        instead(PullRoute, "_check_computed", lambda self, pull: None), PULLED + 138, READ_WRONG, uncompared
    ),
    "unmap_while_read": Rule(_unmapped_while_read, PULLED + 53, "through a mapping that is closed"),
    "skip_comparison": Rule(_not_compared, PULLED, READ_WRONG, spoiled),
    "offer_state_that_goes_on": Rule(
        instead(engine.Prefill, "state_to_offer", lambda self, held: held.blocks[-2]), STATED, OTHER_STATE
    ),
    "offer_pulled_state_that_goes_on": Rule(
        instead(engine.Prefill, "state_to_offer", lambda self, held: held.blocks[-2]), STATED + PULLED, OTHER_STATE
    ),
    "take_state_of_other_tokens": Rule(_of_other_tokens, STATED + 770, OTHER_STATE),
    "release_while_digesting": Rule(
        instead(OutgoingByPull, "is_reading", property(lambda self: self.is_promised)),
        PULLED + 7,
        "and nothing had spoiled what was read",
        withdrawn_while_compared,
    ),
    "scattered_too_soon": Rule(
        _over_at_once("scatter", "_moving", lambda data_plane, ticket: Moved(ticket)), 110, UNWANTED
    ),
    "keep_what_is_being_fetched": Rule(
        instead(Fetches, "__contains__", lambda self, request_id: False), SHARED + 21, f"{READ_WRONG}|{FOREIGN}"
    ),
    "release_kept_while_shared": Rule(_kept_is_released_early, SHARED + 17, FOREIGN, kept_until_read),
    "release_kept_while_pulled": Rule(_kept_is_released_early, SHARED + PULLED + 225, READ_WRONG, kept_until_read),
    "share_before_fence": Rule(_shared_unfenced, SHARED + PULLED, READ_WRONG, kept_at_once),
    "give_up_what_others_need": Rule(_others_forgotten, SHARED + 4, "was given up, though"),
    "join_what_brings_less": Rule(instead(Fetch, "brings", lambda self, *_: not self.is_over), 33600921, READ_WRONG),
    "compare_what_still_changes": Rule(instead(Reading, "is_growing", lambda *_: False), 34650052, "found other rows"),
    "keep_answers_of_ended_sessions": Rule(_nothing(KeptAnswers, "lost"), SHARED + 21, "answers that others keep"),
    "say_no_end_of_kept": Rule(_nothing(KeptAnswers, "released"), SHARED, "answers that are kept"),
}
# Rules against a sender that keeps to no protocol. An agent of ours ships a chunk once, and a repeated notice of one
# write finds its lease used up. So the simulator cannot notice that this rule is off; test_exhaustive.py does.
AGAINST_LIARS = {"land_chunk_twice": Rule(_twice)}
# A rule that a moment decides which the simulator seldom meets; tests/unit/sim/test_exhaustive.py meets it.
OF_A_MOMENT = {"free_slot_while_scattering": Rule(_drained_while_scattering)}
# And one of the oracle's.
OF_THE_ORACLE = {"old_slots_are_current": Rule(instead(Process, "is_current", lambda self, address: True))}

# The promises of docs/guarantees.md that each keeps: `python -m tests.support.proofs` prints them.
PROVES: dict[str, tuple[str, ...]] = {
    "G2": (
        "ignore_digest",
        "ignore_lease_generation",
        "ignore_notice_token",
        "ignore_notice_sender_incarnation",
        "ignore_notice_receiver_incarnation",
        "ignore_notice_sender_epoch",
        "ignore_notice_receiver_epoch",
        "ignore_notice_size",
        "land_chunk_twice",
    ),
    "G3": (
        "count_read_after_lease",
        "begin_lease_at_answer",
        "count_unanswered_renewal",
        "check_clock_before_read_ends",
        "lease_without_hearing_engine",
        "release_leased_blocks",
        "detach_while_read",
        "reuse_at_once_after_agent_died",
        "take_back_too_soon",
        "count_what_was_announced_of_another_offer",
        "count_read_ahead_unanswered",
        "read_ahead_of_fence",
    ),
    "G4": ("skip_comparison", "release_while_digesting", "compare_what_still_changes"),
    "G5": (
        "free_quarantined_at_once",
        "drained_while_writing",
        "drained_for_lost_session",
        "lost_link_is_dead_sender",
        "send_what_is_to_stop",
        "free_quarantined_in_place",
        "reuse_send_slot_while_writing",
        "free_slot_while_scattering",
    ),
    "G6": (
        "forget_lost_transfer_slots",
        "never_ask_refusing_sender",
        "disbelieve_successor",
        "keep_probe_lane",
        "never_rebuild_receive_slots",
        "never_replace_send_slots",
        "refuse_receive_slots_early",
        "refuse_send_slots_early",
    ),
    "G7": (
        "failed_while_scattering",
        "scatter_after_end",
        "scattered_too_soon",
        "write_before_gathered",
        "done_one_chunk_too_soon",
        "done_before_zeros",
        "failed_while_writing_zeros",
        "take_state_of_other_tokens",
        "keep_what_is_being_fetched",
        "give_up_what_others_need",
        "join_what_brings_less",
    ),
    "G8": ("let_go_while_used", "kernels_end_with_socket", "let_go_without_a_word"),
    "G13": (
        "release_while_read",
        "release_kept_while_shared",
        "release_kept_while_pulled",
        "offer_state_that_goes_on",
        "offer_pulled_state_that_goes_on",
        "gathered_too_soon",
        "count_read_while_unheard",
        "ignore_unread_engine_messages",
        "reuse_at_once_after_giving_up",
    ),
    "G15": ("ignore_fence", "read_before_fence", "share_before_fence", "zeros_before_fence"),
    "G16": (
        "say_no_end_of_kept",
        "keep_answers_of_ended_sessions",
        "give_tokens_before_offer",
        "ended_waits_for_fence",
        "forget_ended_offers",
    ),
    "G19": ("keep_left_engine_mapped", "unmap_while_read"),
    "G21": (
        "ignore_message_numbers",
        "last_hello_wins",
        "slower_address_does_not_wait",
        "drop_session_silently",
        "dial_without_engine",
        "keep_route_after_session",
    ),
}


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """The rule of this name does not hold inside."""
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        before.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    (MUTATIONS | AGAINST_LIARS | OF_A_MOMENT | OF_THE_ORACLE)[name].off(put)
    try:
        yield
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)
