"""An engine rank's standing connection to its agent: attaches, attaches again after a loss, and knows when it is over.

The engine's steps drive it through `turn`, which never blocks. Between steps its own thread drives it, because an
engine without requests makes no steps. That thread sleeps until the agent's end closes, then tries to attach again.
The most important question is when a lost agent can no longer harm our memory.

- Reads: what an agent reads counts only if it has heard from us within half of `READERS_S`. So the blocks that it may
  read are ours again `READERS_S` after we gave it up, or as soon as its end of the socket is closed. If other agents
  read our memory on its word, they may go on without it: then they are ours `READERS_S` after the loss in any case.
- Writes have no such bound: an agent may be stopped in the middle of a copy and go on a minute later, and the kernels
  of a killed agent outlive its socket. They are over once the agent has said so (`Detached`, its last message), or
  its process is gone. Where we cannot see that, we attach to no agent, unless `EngineClient.allow_unwatched`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import (
    READERS_S,
    Attach,
    Attached,
    Detached,
    KeptBy,
    NewEpoch,
    Refused,
    Rescaled,
    ToAgent,
    ToEngine,
)
from msgspec.structs import replace

from ...errors import OperatorError
from ...failpoints import VARIABLE, arm_from_environment
from ...state_machines import LINK_TABLE, LinkEvent, LinkState
from ...values import Value
from .client import EngineClient

ATTACH_RETRY_S = 1.0
REFUSED_RETRY_S = 60.0  # after a refusal that can only change with the agent or its configuration
ATTACH_S = 30.0  # an agent that takes longer to answer Attach is given up
GONE_S = 1.0  # with `allow_unwatched`: how long after its socket closed an agent counts as gone (H200: 85 ms)
WATCH_S = 1.0  # the link's thread sleeps at most this long
LEFT_S = 0.01  # how long that thread leaves the link alone while the engine is in `rest`
WITHOUT = "nothing is offered or fetched: vLLM computes its prompts itself, SGLang fails its requests"
# Refusals that pass by themselves.
PASSING = frozenset({"draining", "engine_present", "not_attached", "too_many_connections"})


class ReadsOver(Value):
    """The connection is lost. Whatever is read of its offers from here on does not count."""

    why: str


class WritesOver(Value):
    """The agent's process is gone: nothing writes our memory any more. Others may still read it on the agent's word."""

    why: str


class Over(Value):
    """The connection is over. No request made over it will be answered, and nothing touches our memory any more."""

    why: str


LinkEnd = ReadsOver | WritesOver | Over


class AgentLink:
    """Keeps one engine rank attached to the agent that `client` connects to.

    `attach` is our first message. `fds` go with it; they are the caller's and must stay open as long as the link.
    `first` returns what to send once the agent has answered `attach`, before anything else; it is called on the link's
    own thread too. `lock`, `tell`, `address` and `attached` may be used by any thread, all else by one only.
    """

    def __init__(
        self,
        client: EngineClient,
        attach: Attach,
        fds: Sequence[int],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        first: Callable[[], Sequence[ToAgent]] = tuple,
    ) -> None:
        self.state = LinkState.DETACHED
        self.attached: Attached | None = None  # the agent's answer while we are attached, with the current epoch
        self.why = "not connected yet"
        self.client = client
        self._attach = attach
        self._fds = fds
        self._log = log
        self._clock = clock
        self._first = first
        self.lock = threading.RLock()  # hold it while changing what `first` returns: no agent attaches meanwhile
        self._heard: list[ToEngine | LinkEnd] = []  # for the next turn
        # For the next turn too, by rendezvous id: an engine at rest takes no turn for hours, while others go on.
        self._kept: dict[str, KeptBy] = {}
        self.is_closed = False  # the engine has left: no more messages will be read
        self._is_refused = False  # by a refusal that will not pass by itself
        self._was_attached = False  # attached at some time on this connection
        self._has_let_go = True  # the agent said so, or never attached us
        self._at = 0.0  # when to try again (AWAY) or to stop waiting for Attached (ASKING)
        self._unread_at = 0.0  # when reads no longer count, however the agent ended (ENDING)
        self._reads_are_over = self._writes_are_over = False  # ReadsOver, WritesOver has been reported
        self._is_shared = False  # other agents of this host may read our memory on the agent's word
        self._gone_at: float | None = None  # when a process without a pidfd counts as gone (ENDING)
        self._complaint = ""
        self._failure = ""  # the last error on the link's thread
        self._is_resting = False  # the engine is waiting in `rest`
        self._arm()
        _hold_over_forks(self)

    def __repr__(self) -> str:
        return f"<AgentLink {self.client.path} {self.state.name.lower()} {self.address or self.why}>"

    def _arm(self) -> None:
        """Warn loudly if this engine was started to fail on purpose. A malformed VARIABLE must not stop it."""
        try:
            armed = arm_from_environment()
        except OperatorError as error:
            return self._log.error("ignored: %s: %s", error.code, error)
        if armed:
            self._log.warning("FAILPOINTS ARE ON, this engine will fail on purpose: %s=%s", VARIABLE, ",".join(armed))

    @property
    def address(self) -> str:
        """The address of the agent that has our memory; "" without one."""
        attached = self.attached
        return "" if attached is None else attached.agent.address

    @property
    def is_over(self) -> bool:
        """Whether no agent can touch our memory: none was attached, or the last one has let go or is gone."""
        return self.state is LinkState.DETACHED

    @property
    def why_not(self) -> str:
        """Why the last message was not sent."""
        return self.client.why if self.is_attached else self.why

    @property
    def is_attached(self) -> bool:
        """Whether messages may be sent. False until `turn` has reported the end of the previous connection."""
        return self.state is LinkState.ATTACHED and not any(isinstance(each, LinkEnd) for each in self._heard)

    def start(self, wait_s: float) -> bool:
        """For start-up only: wait until attached or refused for good, at most `wait_s`. Returns whether attached.

        If not, the link keeps trying: from here on its own thread drives it between the engine's turns.
        """
        end = time.monotonic() + wait_s
        while not self.is_attached and not self._is_refused and time.monotonic() < end:
            with self.lock:
                self._drive()
            if not self.is_attached:
                time.sleep(0.02)
        if not self.is_attached and not self._is_refused:
            self._complain(f"not attached to an agent at {self.client.path} within {wait_s} s: {self.why}")
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="kvbridge-link", daemon=True).start()
        return self.is_attached

    def send(self, message: ToAgent) -> bool:
        """Queue a message. False if it will never arrive."""
        with self.lock:
            if not self.is_attached:
                return False
            return self._send(message)

    def tell(self, message: ToAgent) -> bool:
        """Like `send`, for what `first` covers: an agent that has attached since the last `turn` is told too."""
        with self.lock:
            return self.state is LinkState.ATTACHED and self._send(message)

    def turn(self) -> list[ToEngine | LinkEnd]:
        """Move what waits both ways, and return what concerns the engine. Never blocks."""
        with self.lock:
            self._drive()
            heard, self._heard = [*self._heard, *self._kept.values()], []
            self._kept.clear()
            return heard

    def rest(self, seconds: float) -> None:
        """Wait at most `seconds` until the agent says something or reads what is queued. Not if `turn` has news.

        The link's thread reads nothing meanwhile: whatever it read would not wake us.
        """
        with self.lock:
            if self._heard or self._kept:
                return
            until, poll = self._next_at(), select.poll()
            if until is not None:
                seconds = min(seconds, max(until - self._clock(), 0.001))
            if (readable := self.client.fileno()) >= 0:
                poll.register(readable, select.POLLIN if self.client.is_all_sent else select.POLLIN | select.POLLOUT)
            if (pidfd := self.client.pidfd) >= 0 and not self.client.is_agent_gone:
                poll.register(pidfd, select.POLLIN)
            self._is_resting = True
        try:
            poll.poll(max(seconds, 0.0) * 1e3)
        finally:
            self._is_resting = False

    def give_up(self, why: str) -> None:
        """Stop using this connection. `turn` reports `Over` later, and before it `ReadsOver` or `WritesOver`."""
        with self.lock:
            self._lose(why)

    def close(self) -> None:
        """Close the connection for good: the engine is leaving."""
        with self.lock:
            self.client.close("engine shut down")
            self._step(LinkEvent.CLOSE)
            self.attached, self.is_closed = None, True

    def drop_copy(self) -> None:
        """In a forked child: close what it inherited, or the agent could not see the engine die. Sends nothing."""
        self.client.close("forked: the connection is the parent's")
        self.lock = threading.RLock()
        self._step(LinkEvent.CLOSE)
        self.attached, self.is_closed = None, True
        self.why = "forked: the connection is the parent's"

    # Under the lock:

    def _step(self, event: LinkEvent) -> None:
        self.state = LINK_TABLE[self.state, event]

    def _send(self, message: ToAgent) -> bool:
        is_sent = self.client.send(message)
        if not is_sent and self.client.is_connected:
            self._log.error("not sent: %s", self.client.why)
        return is_sent

    def _drive(self) -> None:
        if self.is_closed or (self.state is LinkState.ATTACHED and self.client.is_quiet):
            return
        if self.state is LinkState.DETACHED and self._clock() >= self._at:
            self._try()
        if self.state is not LinkState.DETACHED:
            self._listen()
        if self.state is LinkState.ENDING:
            self._look_for_the_end()

    def _try(self) -> None:
        if not self.client.reconnect():
            if self.client.is_barred:
                self._complain(self.client.why)
            return self._later(self.client.why)
        self._step(LinkEvent.ASK)
        self._at = self._clock() + ATTACH_S
        self._was_attached, self._has_let_go, self._is_refused = False, True, False
        if not self.client.send(self._attach, self._fds):
            self._refused(f"attach cannot be sent: {self.client.why}")

    def _listen(self) -> None:
        for message in self.client.poll():
            match message:
                case Attached() if self.state is LinkState.ASKING:
                    self._attached_to(message)
                case Detached():
                    self._has_let_go = True
                    self._lose("it has let go of our memory")
                case Refused(about="", number=0, code=code, reasons=reasons):
                    text = f"refused by the agent: {code}: {'; '.join(reasons)}"
                    self._lose(text) if code in PASSING else self._refused(text)
                case Rescaled(epoch=epoch) | NewEpoch(epoch=epoch):
                    self.attached = None if self.attached is None else replace(self.attached, epoch=epoch)
                    self._heard.append(message)
                case KeptBy(rendezvous=rendezvous, prefixes=prefixes):
                    if self._kept.pop(rendezvous, None) is None or prefixes:
                        self._kept[rendezvous] = message
                case _:
                    self._heard.append(message)
        if self.state is LinkState.ASKING and self._clock() > self._at:
            self._lose(f"the agent did not answer within {ATTACH_S} s")
        elif not self.client.is_connected:
            self._lose(self.client.why)
        elif self.client.is_agent_gone:
            self._lose("the agent is gone")

    def _attached_to(self, attached: Attached) -> None:
        self._step(LinkEvent.ATTACH)
        self.attached, self._complaint = attached, ""
        self._was_attached, self._has_let_go, self._is_shared = True, False, attached.is_shared
        self._log.info("kvbridge: attached to %s at %s", attached.agent.name, self.address)
        if self.client.pidfd < 0:
            why = (
                "there is no pidfd of this agent's process: should it die, its kernels may still write our memory when"
            )
            self._log.warning("kvbridge: %s that counts as free, %g s after the end of its socket", why, GONE_S)
        for message in self._first():
            if not self.client.send(message):
                return self._refused(f"what every agent must know cannot be sent: {self.client.why}")

    def _refused(self, why: str) -> None:
        """A refusal that will not pass by itself is logged once, and retried rarely."""
        self._is_refused = True
        self._lose(why)

    def _lose(self, why: str) -> None:
        if (self.state, LinkEvent.LOSE) not in LINK_TABLE:
            return
        what = "lost" if self.state is LinkState.ATTACHED else "not attached to"
        self.client.hang_up(why)
        self._step(LinkEvent.LOSE)
        self.attached, self.why = None, why
        self._unread_at, self._gone_at = self._clock() + READERS_S, None
        self._reads_are_over = self._writes_are_over = False
        self._complain(f"{what} the agent at {self.client.path}: {why}")

    def _look_for_the_end(self) -> None:
        now, has_ended = self._clock(), self.client.has_ended
        if has_ended and self.client.pidfd < 0 and self._gone_at is None:
            self._gone_at = now + GONE_S
        is_unread = now >= self._unread_at if self._is_shared else has_ended or now >= self._unread_at
        is_gone = self.client.is_agent_gone or (self._gone_at is not None and now >= self._gone_at)
        if self._has_let_go or (is_gone and (is_unread or not self._is_shared)):
            self.client.close()
            if self._was_attached:
                self._heard.append(Over(self.why))
            self._kept.clear()
            self._step(LinkEvent.LET_GO)
            self._later(self.why)
        elif is_unread and not self._reads_are_over:
            self._reads_are_over = True
            self._heard.append(ReadsOver(self.why))
        elif is_gone and not self._writes_are_over:
            self._writes_are_over = True
            self._heard.append(WritesOver(self.why))

    def _later(self, why: str) -> None:
        self.why = why
        self._at = self._clock() + (REFUSED_RETRY_S if self._is_refused else ATTACH_RETRY_S)

    def _next_at(self) -> float | None:
        """When something is due that no descriptor announces."""
        if self.state is LinkState.ENDING:
            if not self._reads_are_over:
                return self._unread_at if self._is_shared else min(self._unread_at, self._gone_at or self._unread_at)
            return self._gone_at
        return None if self.state is LinkState.ATTACHED else self._at

    def _complain(self, text: str) -> None:
        """Log the same text only once per absence: an engine steps a thousand times a second."""
        if text != self._complaint:
            self._complaint = text
            self._log.error("kvbridge: %s; until it is back %s", text, WITHOUT)

    # On the link's own thread:

    def _sleep(self) -> select.poll:
        """What to sleep on. While attached only the agent's end wakes us: the engine's turns read its messages."""
        poll = select.poll()
        with self.lock:
            if (readable := self.client.fileno()) >= 0:
                poll.register(readable, select.POLLRDHUP if self.state is LinkState.ATTACHED else select.POLLIN)
            if self.client.pidfd >= 0 and not self.client.is_agent_gone:
                poll.register(self.client.pidfd, select.POLLIN)
        return poll

    def _look(self) -> float:
        """Do what is due. Returns for how many seconds to leave the link alone.

        No error may end the thread, or an idle engine would never attach again.
        """
        with self.lock:
            if self._is_resting:
                return LEFT_S
            try:
                self._drive()
            except Exception as error:
                self._fail(error)
                return ATTACH_RETRY_S
        return 0.0

    def _fail(self, error: Exception) -> None:
        """Log each error once, with its traceback, and give the connection up: it cannot be relied on any more."""
        text = f"{type(error).__name__}: {error}"
        if text != self._failure:
            self._failure = text
            self._log.error("kvbridge: the link failed and goes on: %s", text, exc_info=error)
        self._lose(text)


def _watch(known: weakref.ref[AgentLink]) -> None:
    """Drive the link between the engine's turns, for as long as the link exists."""
    while (link := known()) is not None and not link.is_closed:
        poll, until = link._sleep(), link._next_at()
        sleep_s = WATCH_S if until is None else min(WATCH_S, max(until - link._clock(), 0.001))
        del link
        poll.poll(sleep_s * 1e3)
        if (link := known()) is not None and (left_s := link._look()):
            del link
            time.sleep(left_s)


def _hold_over_forks(link: AgentLink) -> None:
    """Hold the link's lock over forks, so that a child copies no half-done state; the child drops what it inherits.

    Fork hooks stay registered for the life of the process, so they hold the link by a weak reference.
    """
    known = weakref.ref(link)
    mine = threading.local()  # threads may fork at once: each releases only what it took itself

    def hold() -> None:
        left = known()
        if left is not None:
            left.lock.acquire()
        mine.__dict__.setdefault("held", []).append(left)

    def taken() -> AgentLink | None:
        held: list[AgentLink | None] = mine.__dict__.get("held", [])
        return held.pop() if held else None  # None if the link was created while this thread was forking

    def go_on() -> None:
        if (left := taken()) is not None:
            left.lock.release()

    def drop() -> None:
        if (left := taken()) is not None:
            left.drop_copy()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=drop)
