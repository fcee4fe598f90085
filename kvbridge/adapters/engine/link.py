"""An engine rank's standing connection to its agent: attaches, attaches again after a loss, and knows when it is over.

The engine's steps drive it through `turn`; nothing in them blocks. Between them a thread of its own does, for an engine
without requests makes no steps: it sleeps until the agent's end closes, and tries again after that. What matters most
is when a lost agent can no longer hurt.

- What it reads of our memory counts only if it has heard of us within half of `READERS_S`: so `READERS_S` after we
  have given it up, or as soon as its end of the socket is closed, the blocks that it may read are ours again. Where
  other agents read our memory on its word they may go on without it: then it is `READERS_S` after the loss in any case.
- What it writes has no such bound: it may be stopped in the middle of a copy and go on a minute later, and the kernels
  of a killed agent outlive its socket. It is over once the agent has said so (`Detached`, its last word), or its
  process is gone.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbridge_proto.engine import READERS_S, Attach, Attached, Detached, Refused, Rescaled, ToAgent, ToEngine
from msgspec.structs import replace

from ...errors import OperatorError
from ...failpoints import VARIABLE, arm_from_environment
from ...states import LINK_TABLE, LinkEvent, LinkState
from .client import EngineClient

RETRY_S = 1.0
REFUSED_RETRY_S = 60.0  # after a refusal that can only change with the agent or its configuration
ATTACH_S = 30.0  # an agent that answers an Attach later than this is not well
GONE_S = 1.0  # after its socket's end a killed agent's process is gone, where nothing else says so (H200: 85 ms)
WATCH_S = 1.0  # how long the thread sleeps at most
LEFT_S = 0.01  # how long it leaves the link to an engine that rests
PASSING = frozenset({"draining", "engine_present", "not_attached", "too_many_connections"})  # refusals that pass


@dataclass(frozen=True, slots=True)
class ReadsOver:
    """The connection is lost. Nothing that is read from here on of what was offered over it counts any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Over:
    """The connection is over: nothing that was asked over it will be answered, nothing touches memory any more."""

    why: str


class AgentLink:
    """`attach` is what we say first, `fds` the descriptors that go with it: the caller's, open for as long as the link.

    `first` is what is said whenever the agent has answered, before anything else. All methods belong to one thread of
    the engine's; `first` is called on the link's own, too.
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
        self.state = LinkState.AWAY
        self.attached: Attached | None = None  # what the agent answered, while we are attached; the epoch of today
        self.why = "not connected yet"
        self._client = client
        self._attach = attach
        self._fds = fds
        self._log = log
        self._clock = clock
        self._first = first
        self._lock = threading.RLock()
        self._heard: list[ToEngine | ReadsOver | Over] = []  # for the next turn
        self._is_closed = False
        self._is_refused = False  # in a way that will not pass by itself
        self._was_here = False  # on this connection
        self._has_let_go = True  # the agent, by its own word; or it has been asked for nothing
        self._at = 0.0  # when to try again (AWAY) or to stop waiting for Attached (ASKING)
        self._unread_at = 0.0  # when reads are over, however the agent ended (ENDING)
        self._is_unread = False  # they are, and it was said
        self._is_shared = False  # agents of this host may read our memory on the agent's word
        self._gone_at: float | None = None  # when a process is gone that we cannot look at (ENDING)
        self._told = ""
        self._failure = ""  # what last went wrong on the link's thread
        self._is_resting = False  # the engine waits for what the agent says
        self._arm()
        _hold_over_forks(self)

    def __repr__(self) -> str:
        return f"<AgentLink {self._client.path} {self.state.name.lower()} {self.address or self.why}>"

    def _arm(self) -> None:
        """Say it as loudly as we can if this engine was started to fail. What asks for nonsense must not stop it."""
        try:
            said = arm_from_environment()
        except OperatorError as error:
            return self._log.error("ignored: %s: %s", error.code, error)
        if said:
            self._log.warning("FAILPOINTS ARE ON, this engine will fail on purpose: %s=%s", VARIABLE, ",".join(said))

    @property
    def address(self) -> str:
        """Of the agent that has our memory; "" without one."""
        attached = self.attached
        return "" if attached is None else attached.agent.address

    @property
    def is_closed(self) -> bool:
        """Whether the engine has left: nothing will be heard any more."""
        return self._is_closed

    @property
    def is_over(self) -> bool:
        """Whether no agent can touch our memory: none was attached, or the last one has let go or is gone."""
        return self.state is LinkState.AWAY

    @property
    def why_not(self) -> str:
        """Why the last message was not sent."""
        return self._client.why if self.is_attached else self.why

    @property
    def is_attached(self) -> bool:
        """Whether what is said now is heard. Not before `turn` has told of the end of what was said before."""
        return self.state is LinkState.HERE and not any(isinstance(each, ReadsOver | Over) for each in self._heard)

    def start(self, wait_s: float) -> bool:
        """For start-up only: wait until attached or refused for good, at most `wait_s`. False leaves it to later.

        From here on the link looks after itself between the engine's turns.
        """
        end = time.monotonic() + wait_s
        while not self.is_attached and not self._is_refused and time.monotonic() < end:
            with self._lock:
                self._drive()
            if not self.is_attached:
                time.sleep(0.02)
        if not self.is_attached and not self._is_refused:
            self._complain(f"no agent at {self._client.path} within {wait_s} s: {self.why}")
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="kvbridge-link", daemon=True).start()
        return self.is_attached

    def send(self, message: ToAgent) -> bool:
        """Queue a message. False if it will never arrive."""
        with self._lock:
            if not self.is_attached:
                return False
            return self._send(message)

    @property
    def standing(self) -> threading.RLock:
        """Held while what `first` says is changed: no agent comes meanwhile."""
        return self._lock

    def tell(self, message: ToAgent) -> bool:
        """As `send`, of what `first` says or said: an agent that has come since the last `turn` is told, too."""
        with self._lock:
            return self.state is LinkState.HERE and self._send(message)

    def turn(self) -> list[ToEngine | ReadsOver | Over]:
        """Move what waits, both ways; return what concerns the engine. Never blocks."""
        with self._lock:
            self._drive()
            heard, self._heard = self._heard, []
            return heard

    @property
    def is_all_sent(self) -> bool:
        """Whether the agent can hear all that was said."""
        return self._client.is_all_sent

    def rest(self, seconds: float) -> None:
        """Wait until the agent says something or reads what waits for it, at most so long; not if `turn` has news.

        The link's thread reads nothing meanwhile: what it took would not wake us.
        """
        with self._lock:
            if self._heard:
                return
            until, poll = self._next_at(), select.poll()
            if until is not None:
                seconds = min(seconds, max(until - self._clock(), 0.001))
            if (readable := self._client.fileno()) >= 0:
                poll.register(readable, select.POLLIN if self.is_all_sent else select.POLLIN | select.POLLOUT)
            if (pidfd := self._client.pidfd) >= 0 and not self._client.is_agent_gone:
                poll.register(pidfd, select.POLLIN)
            self._is_resting = True
        try:
            poll.poll(max(seconds, 0.0) * 1e3)
        finally:
            self._is_resting = False

    def give_up(self, why: str) -> None:
        """Stop using this connection; `ReadsOver` and `Over` follow in `turn`."""
        with self._lock:
            self._lose(why)

    def close(self) -> None:
        """The engine is leaving."""
        with self._lock:
            self._client.close("engine shut down")
            self._step(LinkEvent.CLOSE)
            self.attached, self._is_closed = None, True

    def drop_copy(self) -> None:
        """In a forked child: let go of what it inherited, or the agent could not see the engine die. Says nothing."""
        self._client.drop_copy()
        self._lock = threading.RLock()
        self._step(LinkEvent.CLOSE)
        self.attached, self._is_closed = None, True
        self.why = "forked: the connection is the parent's"

    # Under the lock:

    def _step(self, event: LinkEvent) -> None:
        self.state = LINK_TABLE.after(self.state, event)

    def _send(self, message: ToAgent) -> bool:
        is_sent = self._client.send(message)
        if not is_sent and self._client.is_connected:
            self._log.error("not sent: %s", self._client.why)
        return is_sent

    def _drive(self) -> None:
        if self._is_closed:
            return
        if self.state is LinkState.AWAY and self._clock() >= self._at:
            self._try()
        if self.state is not LinkState.AWAY:
            self._listen()
        if self.state is LinkState.ENDING:
            self._look_for_the_end()

    def _try(self) -> None:
        if not self._client.reconnect():
            if self._client.is_foreign:
                self._complain(self._client.why)
            return self._later(self._client.why)
        self._step(LinkEvent.ASK)
        self._at = self._clock() + ATTACH_S
        self._was_here, self._has_let_go, self._is_refused = False, True, False
        if not self._client.send(self._attach, self._fds):
            self._refused(f"attach cannot be sent: {self._client.why}")

    def _listen(self) -> None:
        for message in self._client.poll():
            match message:
                case Attached() if self.state is LinkState.ASKING:
                    self._here(message)
                case Detached():
                    self._has_let_go = True
                    self._lose("it has let go of our memory")
                case Refused(about="", code=code, reasons=reasons):
                    text = f"refused by the agent: {code}: {'; '.join(reasons)}"
                    self._lose(text) if code in PASSING else self._refused(text)
                case Rescaled(epoch=epoch):
                    self.attached = None if self.attached is None else replace(self.attached, epoch=epoch)
                    self._heard.append(message)
                case _:
                    self._heard.append(message)
        if self.state is LinkState.ASKING and self._clock() > self._at:
            self._lose(f"the agent did not answer within {ATTACH_S} s")
        elif not self._client.is_connected:
            self._lose(self._client.why)
        elif self._client.is_agent_gone:
            self._lose("the agent is gone")

    def _here(self, attached: Attached) -> None:
        self._step(LinkEvent.ATTACH)
        self.attached, self._told = attached, ""
        self._was_here, self._has_let_go, self._is_shared = True, False, attached.is_shared
        self._log.info("kvbridge: attached to %s at %s", attached.agent.name, self.address)
        for message in self._first():
            self._client.send(message)

    def _refused(self, why: str) -> None:
        """What will not pass by itself is said once, and tried rarely."""
        self._is_refused = True
        self._lose(why)

    def _lose(self, why: str) -> None:
        if not LINK_TABLE.allows(self.state, LinkEvent.LOSE):
            return
        what = "lost" if self.state is LinkState.HERE else "not attached to"
        self._client.hang_up(why)
        self._step(LinkEvent.LOSE)
        self.attached, self.why = None, why
        self._unread_at, self._gone_at, self._is_unread = self._clock() + READERS_S, None, False
        self._complain(f"{what} the agent at {self._client.path}: {why}")

    def _look_for_the_end(self) -> None:
        now, has_ended = self._clock(), self._client.has_ended
        if has_ended and self._client.pidfd < 0 and self._gone_at is None:
            self._gone_at = now + GONE_S
        is_unread = now >= self._unread_at if self._is_shared else has_ended or now >= self._unread_at
        is_gone = self._client.is_agent_gone or (self._gone_at is not None and now >= self._gone_at)
        if self._has_let_go or (is_gone and (is_unread or not self._is_shared)):
            self._client.close()
            if self._was_here:
                self._heard.append(Over(self.why))
            self._step(LinkEvent.LET_GO)
            self._later(self.why)
        elif is_unread and not self._is_unread:
            self._is_unread = True
            self._heard.append(ReadsOver(self.why))

    def _later(self, why: str) -> None:
        self.why = why
        self._at = self._clock() + (REFUSED_RETRY_S if self._is_refused else RETRY_S)

    def _next_at(self) -> float | None:
        """When something has to be done that no descriptor tells."""
        if self.state is LinkState.ENDING:
            if not self._is_unread:
                return self._unread_at if self._is_shared else min(self._unread_at, self._gone_at or self._unread_at)
            return self._gone_at
        return None if self.state is LinkState.HERE else self._at

    def _complain(self, text: str) -> None:
        """The same once per absence: an engine steps a thousand times a second."""
        if text != self._told:
            self._told = text
            self._log.error("kvbridge: %s; requests are computed here until it is back", text)

    # On the link's own thread:

    def _sleep(self) -> select.poll:
        """What to sleep on: while attached only the agent's end, for what it says is heard in the engine's turns."""
        poll = select.poll()
        with self._lock:
            if (readable := self._client.fileno()) >= 0:
                poll.register(readable, select.POLLRDHUP if self.state is LinkState.HERE else select.POLLIN)
            if self._client.pidfd >= 0 and not self._client.is_agent_gone:
                poll.register(self._client.pidfd, select.POLLIN)
        return poll

    def _look(self) -> float:
        """Do what is due. For how many seconds to leave it be then.

        No error ends the thread, or an idle engine would never attach again.
        """
        with self._lock:
            if self._is_resting:
                return LEFT_S
            try:
                self._drive()
            except Exception as error:
                self._fail(error)
                return RETRY_S
        return 0.0

    def _fail(self, error: Exception) -> None:
        """Said once, with where it came from. What is connected cannot be relied on any more."""
        text = f"{type(error).__name__}: {error}"
        if text != self._failure:
            self._failure = text
            self._log.error("kvbridge: the link failed and goes on: %s", text, exc_info=error)
        self._lose(text)


def _watch(known: weakref.ref[AgentLink]) -> None:
    """Drive the link between the engine's turns, for as long as there is one."""
    while (link := known()) is not None and not link._is_closed:
        poll, until = link._sleep(), link._next_at()
        sleep_s = WATCH_S if until is None else min(WATCH_S, max(until - link._clock(), 0.001))
        del link
        poll.poll(sleep_s * 1e3)
        if (link := known()) is not None and (left_s := link._look()):
            del link
            time.sleep(left_s)


def _hold_over_forks(link: AgentLink) -> None:
    """A child gets no half of what the thread is at, and drops what it inherits.

    For the link's life: what is registered at a fork stays registered, so it must not keep the link.
    """
    known = weakref.ref(link)
    mine = threading.local()  # threads may fork at once: each gives back what it took itself

    def hold() -> None:
        left = known()
        if left is not None:
            left._lock.acquire()
        mine.__dict__.setdefault("held", []).append(left)

    def taken() -> AgentLink | None:
        held: list[AgentLink | None] = mine.__dict__.get("held", [])
        return held.pop() if held else None  # none if the link came while this thread was forking

    def go_on() -> None:
        if (left := taken()) is not None:
            left._lock.release()

    def drop() -> None:
        if (left := taken()) is not None:
            left.drop_copy()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=drop)
