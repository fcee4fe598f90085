"""The receiver's story: our engine wants tokens, other agents have them, we put them into its blocks.

A want comes in (`want`), sessions open (`opened`), the data plane reports which rows are in the blocks (`hear`), and
the engine is told. exchange/receiver.py decides what to do; this file and runner.py do it.
"A pull, function by function" in docs/architecture.md names the functions in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import Abandon, Done, Expect, ToEngine, Want
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Claim,
    Drained,
    Failing,
    Grant,
    OfSender,
    Refuse,
    Renew,
    Settled,
)
from msgspec import structs

from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Ask, Reach, Uncompared, WatchProcess
from ..exchange.orders import Dropped, Landed, ReceivingReport, Watch
from ..exchange.receiver import Receiver
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from ..routes.pull.halves import COMPARE_S
from ..transport.endpoint import canonical
from ..transport.processes import Processes
from .current_engine import CurrentEngine
from .outgoing_peers import OutgoingPeers, ReceiverEvents
from .record import Record
from .runner import Runner

log = logging.getLogger("kvbridge.receiver")

WARN_LATE_WRITES_S = 60.0
KEEP_S = 1.0  # between looks for processes that need not be watched any more


class ReceiverRunner(Runner):
    """Runs on the loop. It opens the sessions it needs: `peers`."""

    def __init__(
        self,
        receiving: Receiver,
        open_peers: Callable[[ReceiverEvents], OutgoingPeers],
        data_plane: DataPlane,
        record: Record,
        current: CurrentEngine,
        clock: Callable[[], float],
        processes: Processes,
    ) -> None:
        super().__init__(data_plane, record, current, clock)
        self.peers = self._send_to = open_peers(self)
        self._processes = processes
        self.receiving = receiving
        self._warned = self._kept = float("-inf")

    # The engine:

    def expect(self, expect: Expect) -> None:
        expect = structs.replace(expect, sender=canonical(expect.sender))
        self.do(self.receiving.expect(expect, self._clock()))

    def want(self, want: Want, engine: AttachedEngine) -> None:
        want = structs.replace(want, sender=canonical(want.sender))
        self._record.note(want)
        failpoint("receiver.want_heard")
        self._data_plane.wake()
        self.do(self.receiving.want(want, engine, self._clock()))

    def knows(self, number: int) -> bool:
        """Whether this want is open."""
        return number in self.receiving.wants

    def abandon(self, abandon: Abandon) -> None:
        self._record.note(abandon)
        self.do(self.receiving.abandon(abandon.number, self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A session with a new sender: compile the kernels for what it will send, and watch its process."""
        self.do(self.receiving.prepare(session))

    def opened(self, address: str, session: Session) -> None:
        self.do(self.receiving.opened(address, session, self._clock()))

    def is_wanted(self, address: str) -> bool:
        """Whether a want names this address or takes from there."""
        return any(
            address in (wanted.want.sender, *(incoming.address for incoming in wanted.incoming_transfers.values()))
            for wanted in self.receiving.wants.values()
        )

    def refused(self, address: str, incarnation: str, key: str) -> None:
        self.do(self.receiving.refused(address, incarnation, key))

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self.do(self.receiving.unreachable(address, code, reason, self._clock()))

    def from_sender(self, incarnation: str, key: str, body: OfSender) -> None:
        now, receiving = self._clock(), self.receiving
        match body:
            case Failing(transfer=transfer, code=code, reason=reason):
                actions = receiving.failing(incarnation, transfer, code, reason, now, key)
            case Drained(transfer=transfer, code=code, reason=reason):
                failpoint("receiver.drained_heard")
                actions = receiving.drained(incarnation, transfer, code, reason, now, key)
            case Refuse(about=transfer, code=code, reasons=reasons):  # nothing is ever written for a refused claim
                actions = receiving.drained(incarnation, transfer, code, "; ".join(reasons), now, key)
            case _:
                if isinstance(body, BlockTables):
                    failpoint("receiver.tables_heard")
                actions = receiving.on_message(incarnation, body, now, key)
        self.do(actions, (body,), now)

    # The data plane:

    def hear(self, reports: Sequence[ReceivingReport]) -> None:
        """Take the data plane's reports. What follows from them is done first: our engine waits."""
        for report in reports:
            match report:
                case Landed():
                    failpoint("receiver.scattered")
                case Dropped():
                    self._on_dropped(report)
        self.do(self.receiving.hear(reports, self._clock()), reports)

    def _on_dropped(self, dropped: Dropped) -> None:
        now = self._clock()
        if (
            now - self._warned >= WARN_LATE_WRITES_S
        ):  # counted every time, logged once a minute: a peer can go on writing
            self._warned = now
            self._record.warn("late or foreign write dropped", "slot=%d", dropped.slot, transfer=dropped.transfer)

    def _notice_ends(self) -> None:
        """Free the slots that were lent to processes that have ended."""
        for process in self._processes.ended():
            self.peers.lose_process(process)
            if slots := len(self.receiving.quarantined(process)):
                log.info("a sender's process has ended: pid=%d, %d receive slots leave quarantine", process.pid, slots)
            self.do(self.receiving.cannot_write(process))
        if (now := self._clock()) - self._kept >= KEEP_S:
            self._kept = now
            self._processes.keep(self.receiving.writing_processes())

    def tick(self) -> None:
        self._notice_ends()
        actions = self.receiving.tick(self._clock())
        self.do(actions)
        if late := sum(each.chunks for each in actions if isinstance(each, Uncompared)):
            self._record.warn("chunks not compared", "%d, their senders sent no digests in %g s", late, COMPARE_S)

    # Doing (runner.py):

    def _act(self, action: Reach | Ask | WatchProcess | Watch) -> None:
        match action:
            case Reach(address=address):
                self.peers.reach(address)
            case Ask(address=address):
                self.peers.ask(address)
            case WatchProcess(process=process, incarnation=incarnation):
                if not self._processes.watch(process):
                    log.info("no pidfd of a sender: pid=%d incarnation=%s", process.pid, incarnation)

    def _sent(self, said: Body | ToEngine) -> None:
        match said:
            case Claim():
                failpoint("receiver.claim_sent")
            case Grant():
                failpoint("receiver.grant_sent")
            case Renew():
                failpoint("receiver.renewal_sent")
            case Cancel():
                failpoint("receiver.cancel_sent")
            case Settled():
                failpoint("receiver.settled_sent")
            case Done():
                failpoint("receiver.done_told")
