"""What one engine rank and its agent say to each other: offers, wants, and how each of them ends.

An adapter attaches its memory once, sends offers and wants, and asks in `turn` what has ended. This module copes with
the loss of the agent, finds it again, and tells a new agent what it must know. Whatever happens, an offer or a want
ends exactly once, with one `Ended` under its number. Then its blocks are the engine's again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from kvbridge_proto.common import OURS, Rank
from kvbridge_proto.engine import (
    READERS_S,
    Abandon,
    Adopt,
    Attach,
    Attached,
    Computed,
    Directory,
    Done,
    Expect,
    Failed,
    Held,
    KeptBy,
    Offer,
    Refused,
    Released,
    Rescale,
    Rescaled,
    ToAgent,
    ToEngine,
    Want,
    Weights,
    Withdraw,
)
from msgspec.structs import replace

from ...device.fence import EngineFence
from ...device.handles import export_all
from ...errors import EngineError
from ...values import Value
from .client import EngineClient
from .link import AgentLink, LinkEnd, Over, ReadsOver, WritesOver
from .memory import Memory

GRACE_S = 10.0  # how long an agent may exceed its own deadline, and again after being asked to stop
COMPUTING_S = 600.0  # how long an offer is held while the rest of its prompt is computed: a step may take long
CHECK_S = 0.5  # how often deadlines are checked
DETACH_S = 60.0  # twice the default of `write_timeout_s`, within which an agent's last writes end
MOST_UNSENT = 1024  # `Computed` messages kept while there is no agent to count them
Kind = Literal["offer", "want"]


class Ended(Value):
    """An offer or a want is over, and its blocks are the engine's again.

    `code` is empty if everything was carried: all receivers have read the offer, or the want's rows are in its blocks.
    Otherwise nothing may be relied on, and `reason` says why. `other_scores`: as in Done.
    """

    number: int
    request: str
    kind: Kind
    code: str = ""
    reason: str = ""
    other_scores: bool = False

    @property
    def is_good(self) -> bool:
        return not self.code


@dataclass(slots=True)
class _Open:
    """`late_at` is when the agent's silence becomes suspicious. `is_asked_to_stop`: it has been asked to stop.

    `is_outdated`: our weights have changed since, so that its rows are of no use even if they come.
    """

    kind: Kind
    request: str
    late_at: float
    hold_s: float = 0.0
    is_asked_to_stop: bool = False
    is_outdated: bool = False


Heard = Ended | Adopt | Rescaled | KeptBy


class Conversation:
    """One engine rank's offers and wants. Used by one thread, except `share`, `address` and `attached`: by any.

    Only `start`, `rest`, `wait_for_readers` and `detach` block. `fence_of` returns the fence of a device that still
    works after a call has returned, or None for a device that does not. Numbers of offers and wants come from
    `new_number`, or from one `numbers()` for all ranks of the engine.
    """

    def __init__(
        self,
        client: EngineClient,
        memory: Memory,
        log: logging.Logger,
        *,
        policy: Literal["requantize", "adopt"] = "requantize",
        takes_kept: bool = False,
        fence_of: Callable[[torch.device], EngineFence | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OperatorError for memory that no other process can map. Moves CPU memory into shared memory."""
        self.memory = memory
        self._log = log
        self._clock = clock
        self._open: dict[int, _Open] = {}
        self._ended: list[Heard] = []  # for the next turn
        self._said_unfilled: set[int] = set()  # numbers of unfilled layers that the log has
        self._standing: dict[Hashable, ToAgent] = {}  # what every agent is told before anything else
        self._numbers = numbers()
        self._unsent: deque[Computed] = deque(maxlen=MOST_UNSENT)
        self._check_at = 0.0
        self._fence = (fence_of or fence_of_device)(memory.device)
        handles, self._fds = export_all(memory.storages)
        fds = [*self._fds] if self._fence is None else [*self._fds, self._fence.fd]
        fence_fd = None if self._fence is None else len(fds) - 1
        attach = Attach(
            versions=OURS,
            pool=memory.pool,
            handles=handles,
            fence_fd=fence_fd,
            policy=policy,
            takes_kept=takes_kept,
        )
        self._link = AgentLink(client, attach, fds, log, clock, self._first)

    def __repr__(self) -> str:
        return f"<Conversation {len(self._open)} open, {self._link!r}>"

    def start(self, wait_s: float) -> bool:
        """Wait until attached or refused for good, at most `wait_s`. False: not yet attached; the engine may run."""
        return self._link.start(wait_s)

    def close(self) -> None:
        """Close the connection, the fence and our descriptors: the engine is leaving."""
        self._link.close()
        if self._fence is not None:
            self._fence.close()
        while self._fds:
            os.close(self._fds.pop())

    def detach(self, within_s: float = DETACH_S, why: str = "our memory is about to go away") -> None:
        """Return when nothing touches our memory any more. What was open has ended then.

        An agent that is alive lets go within a chunk's time. Otherwise this waits for the end of its process. Raises
        EngineError `not_let_go` after `within_s`: an agent that stands still may go on and write, so the memory must
        stay where it is.
        """
        end = time.monotonic() + within_s
        while True:
            with self._link.lock:  # or the link's thread could attach another agent in between
                self._link.give_up(why)
                if self._link.is_over:
                    return self.close()
            if (left := end - time.monotonic()) <= 0:
                found = f"the agent at {self._link.client.path} lives, and has not let go of our memory"
                reason = f"{found} within {within_s:g} s: continue it or end it; until then it may write there"
                raise EngineError("not_let_go", reason)
            self._link.rest(min(READERS_S, left))
            self._listen()

    @property
    def attached(self) -> Attached | None:
        """What the agent that has our memory now has answered, under the current epoch; None without one."""
        return self._link.attached

    @property
    def address(self) -> str:
        """The address of the agent that has our memory; "" without one."""
        return self._link.address

    def new_number(self) -> int:
        """For an offer or a want. It never comes again."""
        return next(self._numbers)

    # To the agent:

    def share(self, ranks: Iterable[Rank]) -> None:
        """Say where all ranks of our engine have their agents. Every agent that attaches later is told too.

        Ranks that no agent would take are logged and dropped: told again at each attach, they would end each.
        """
        directory = Directory(ranks=tuple(ranks))
        if why := self._link.client.why_unfit(directory):
            return self._log.error("kvbridge: the agent is not told of our ranks: %s", why)
        self._stand(Directory, directory)

    def send(self, message: ToAgent) -> None:
        """Send any message but Attach. Some have their own method, which says what follows. What the others do:

        `Expect` (a queued request will want this, until its want or Abandon), `Rescale` (rows are written under these
        scales from here on) and `Weights` (they are computed with these: what is open ends with `other_weights`, even
        if its rows come) are told to later agents too. `Computed` (prompt tokens that could have been fetched) is told
        to the next one if there is none now. `NoOffer`, `Reclaim`, `Release` and `Decline` are sent, and forgotten.
        """
        match message:
            case Offer():
                self.offer(message)
            case Want():
                self.want(message)
            case Withdraw(number=number, reason=reason, comes_again=comes_again):
                self.withdraw(number, reason, comes_again)
            case Abandon(number=number, reason=reason):
                self.abandon(number, reason)
            case Directory(ranks=ranks):
                self.share(ranks)
            case Expect(number=number):
                if not self._link.client.why_unfit(message):  # or its want cannot be sent either, and says why
                    self._stand(number, message)
            case Rescale() | Weights():
                self._must_tell(message)
            case Computed():
                self._unsent.append(message)
                self._send_computed()
            case _:
                self._link.send(message)

    def _must_tell(self, message: Rescale | Weights) -> None:
        """An agent that cannot be told is given up: it would go on under scales or weights that hold no more."""
        with self._link.lock:
            if isinstance(message, Weights):
                self._ended = [outdated(each) if isinstance(each, Ended) else each for each in self._ended]
                for opened in self._open.values():
                    opened.is_outdated = True
            if not self._stand(type(message), message) and self._link.is_attached:
                self.give_up(f"not told what holds from now on: {self._link.why_not}")

    def _stand(self, key: Hashable, message: ToAgent) -> bool:
        """Tell this agent and all later ones, in place of what stood under this key. Returns whether this one is."""
        with self._link.lock:
            self._standing[key] = message
            return self._link.tell(message)

    def offer(self, offer: Offer) -> None:
        """Let these tokens be read. If this offer has ended already, more tokens of it (`is_more`) are ignored."""
        number = offer.number
        if not offer.is_more:
            assert number not in self._open, f"{offer.request}: {number} is open already"
            self._open[number] = _Open("offer", offer.request, 0.0)
        elif number not in self._open:
            return
        opened = self._open[number]
        opened.hold_s, opened.late_at = offer.hold_s, self._clock() + offer.hold_s + GRACE_S
        if self._link.send(offer):
            return
        if not offer.is_more:
            self._end(number, "not_sent", self._link.why_not, kind="offer")
        elif self._link.is_attached:  # its earlier tokens may be read; without a link the link's end also ends it
            self.withdraw(number, f"not sent: {self._link.why_not}"[:1024])

    def withdraw(self, number: int, reason: str, comes_again: bool = False) -> None:
        """End this offer: nobody may read it any more. Its `Ended` follows, or has come already."""
        if (opened := self._open.get(number)) is not None:
            self._link.send(Withdraw(number=number, reason=reason, comes_again=comes_again))
            opened.late_at = min(opened.late_at, self._clock() + GRACE_S)

    def want(self, want: Want) -> None:
        """Fetch these tokens; its `Ended` follows. An empty range says that nothing is needed, and has no `Ended`.

        A want that cannot be sent ends at once. The other side is told, if possible, that it need not keep its offer.
        """
        self._standing.pop(want.number, None)
        if want.first_token == want.end_token:
            self._link.tell(want)
            return
        assert want.number not in self._open, f"{want.request}: {want.number} is open already"
        self._open[want.number] = _Open("want", want.request, self._clock() + want.deadline_s + GRACE_S)
        if not self._link.send(want):
            self._end(want.number, "not_sent", self._link.why_not, kind="want")
            self._link.tell(nothing_of(want))

    def abandon(self, number: int, reason: str) -> None:
        """This want is no longer needed, or will not come. If it is open, its `Ended` follows."""
        self._standing.pop(number, None)
        self._link.tell(Abandon(number=number, reason=reason))
        if (opened := self._open.get(number)) is not None:
            opened.late_at = min(opened.late_at, self._clock() + GRACE_S)

    def _send_computed(self) -> None:
        while self._unsent and self._link.send(self._unsent[0]):
            self._unsent.popleft()

    def mark(self) -> int:
        """A value for `fence` of an offer or a want, reached when the device has done all that is enqueued now.

        0 on a device whose calls return when their work is done.
        """
        return 0 if self._fence is None else self._fence.mark()

    @property
    def upcoming(self) -> int:
        """What the next `mark` returns: for a message that may leave before the work it waits for is enqueued."""
        return 0 if self._fence is None else self._fence.upcoming

    # From the agent:

    def turn(self) -> list[Heard]:
        """What has ended since the last call, and what the agent asks. Never blocks."""
        self._listen()
        if self._unsent:
            self._send_computed()
        if self._clock() >= self._check_at:
            self._check_at = self._clock() + CHECK_S
            self._look_for_late()
        ended, self._ended = self._ended, []
        return ended

    def is_open(self, number: int) -> bool:
        """Whether the agent may still touch the blocks of this offer or want."""
        return number in self._open

    @property
    def is_waiting(self) -> bool:
        """Whether anything is open, and `turn` has nothing to return yet."""
        return bool(self._open) and not self._ended

    def rest(self, seconds: float) -> None:
        """Wait until the agent says something, at most `seconds`."""
        self._link.rest(seconds)

    def give_up(self, why: str) -> None:
        """Stop relying on this agent. Everything open ends as soon as the agent can do no harm to it."""
        self._link.give_up(why)

    def wait_for_readers(self, offers: Iterable[int]) -> None:
        """Return when no read of these withdrawn offers counts any more: then their blocks may be overwritten.

        For an engine that must compute on. If its forward overwrote blocks while a chunk is gathered from them, the
        chunk would hold another request's KV, and nothing would show it. The agent answers when its reads have ended,
        within a chunk's time. If it stays silent for READERS_S after it could hear us, it is given up, and what it
        reads from then on does not count (dataplane/attached.py: GATHER_HEARD_S). If it is lost, for whatever reason,
        we wait at most READERS_S from the loss (link.py: ReadsOver).
        """
        offers, ends, asked_at = list(offers), None, self._clock()
        link = self._link
        while any(self.is_open(number) for number in offers) and not link.is_closed:
            now = self._clock()
            if ends is None and link.client.is_all_sent:
                ends = now + READERS_S
            if link.is_attached and now >= (asked_at + READERS_S if ends is None else ends):
                link.give_up(f"no answer within {READERS_S} s to a withdrawal")
                if ends is not None:
                    break
            link.rest(READERS_S if not link.is_attached else max((ends or asked_at + READERS_S) - now, 0.0))
            self._listen()
        for number in offers:
            if self.is_open(number):
                self._end(number, "given_up", f"no answer within {READERS_S} s", kind="offer")

    def _first(self) -> list[ToAgent]:
        """Called on the link's thread as well, under its lock. The engine's thread removes entries without that lock:
        this is one operation of the interpreter, so it sees the state before a removal or after it.
        """
        return list(self._standing.values())

    def _listen(self) -> None:
        for message in self._link.turn():
            self._on_message(message)

    def _on_message(self, message: ToEngine | LinkEnd) -> None:
        match message:
            case Done(number=number, unfilled_layers=layers, other_scores=other_scores):
                self._note_unfilled(layers)
                self._end(number, "", "", kind="want", other_scores=other_scores)
            case Failed(number=number, code=code, reason=reason):
                self._end(number, code, reason, kind="want")
            case Released(number=number, code=code, reason=reason):
                self._end(number, code, reason, kind="offer")
            case Held(numbers=held):
                for number in held:
                    self._hold(number)
            case Adopt() | Rescaled() | KeptBy():
                self._ended.append(message)
            case Refused(about=about, code=code, reasons=reasons) if about.startswith("rescale"):
                # Nothing may be planned under the scales that the agent still goes by.
                self.give_up(f"{about} refused: {code}: {'; '.join(reasons)}")
            case Refused(code="duplicate_request", about=about, reasons=reasons):
                self._log.warning("%s: refused by the agent: %s", about, "; ".join(reasons))  # the first want goes on
            case Refused(number=number, code=code, reasons=reasons):
                if (opened := self._open.get(number)) is not None:
                    self._end(number, code, "; ".join(reasons), kind=opened.kind)
            case ReadsOver(why=why):
                self._all_lost("offer", why)
            case WritesOver(why=why):
                self._all_lost("want", why)
            case Over(why=why):
                self._all_lost("offer", why)
                self._all_lost("want", why)

    def _hold(self, number: int) -> None:
        """A receiver waits for this offer, so the agent may keep it for longer."""
        if (opened := self._open.get(number)) is not None and not opened.is_asked_to_stop:
            opened.late_at = max(opened.late_at, self._clock() + opened.hold_s + GRACE_S)

    def _note_unfilled(self, layers: int) -> None:
        """Log that no sender has rows of a draft model, once for each number of its layers."""
        if layers and layers not in self._said_unfilled:
            self._said_unfilled.add(layers)
            what = f"the prefill side has no rows of {layers} of our draft model's layers"
            self._log.warning("%s: those of prompts are zeros here, and first drafts are rejected more often", what)

    def _end(self, number: int, code: str, reason: str, *, kind: Kind, other_scores: bool = False) -> None:
        """End only what is open: a repeated message, or one about the other kind, is ignored."""
        opened = self._open.get(number)
        if opened is not None and opened.kind == kind:
            del self._open[number]
            ended = Ended(number, opened.request, kind, code, reason, other_scores)
            self._ended.append(outdated(ended) if opened.is_outdated else ended)

    def _all_lost(self, kind: Kind, why: str) -> None:
        for number in [number for number, opened in self._open.items() if opened.kind == kind]:
            self._end(number, "agent_lost", why, kind=kind)

    def _look_for_late(self) -> None:
        """Ask an agent that is alive but silent to stop, then give it up.

        Wants stay open until it has let go, since it may still write their blocks.
        """
        now = self._clock()
        for number, opened in [(number, each) for number, each in self._open.items() if now > each.late_at]:
            if opened.is_asked_to_stop:
                return self.give_up(f"{opened.request}: no answer within {GRACE_S} s of asking it to stop")
            ask = Abandon if opened.kind == "want" else Withdraw
            self._link.send(ask(number=number, reason="no answer in time"))
            opened.is_asked_to_stop, opened.late_at = True, now + GRACE_S


def outdated(ended: Ended) -> Ended:
    """The end of what was open when the weights changed: rows that have come are of no use."""
    if ended.kind == "offer" or not ended.is_good:
        return ended
    reason = "its rows came, but the weights have changed since it was wanted"
    return replace(ended, code="other_weights", reason=reason)


def nothing_of(want: Want) -> Want:
    """The same want of an empty range: it lets the other side end its offer."""
    return replace(want, first_token=0, end_token=0, blocks=(), fence=0)


def fence_of_device(device: torch.device) -> EngineFence | None:
    """The fence of a GPU; None for a CPU, whose work is finished when its call returns."""
    return EngineFence(device) if device.type == "cuda" else None


def numbers() -> Iterator[int]:
    """For offers and wants. None comes again in this process, nor in one started later, unless the clock is set back.

    Begins with the microseconds since 1970, which no engine can count up to from an earlier start.
    """
    return count(time.time_ns() // 1000)
