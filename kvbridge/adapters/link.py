"""An engine rank's standing connection to its agent: attaches, attaches again after a loss, and knows when it is over.

The engine's steps drive it through `turn`; nothing here blocks, except `start` and `rest`. What matters most is when a
lost agent can no longer touch the engine's memory. Losing patience proves nothing: an agent may be stopped in the
middle of a copy and go on a minute later. So the link keeps a second descriptor of the socket, closes its own
direction, and calls the connection over only when the agent's end is closed too: by the agent, once nothing of it is
under way, or by the kernel, when the process is dead.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbridge_proto.engine import Attach, Attached, Refused, ToAgent, ToEngine

from ..errors import OperatorError
from ..failpoints import VARIABLE, arm_from_environment
from .client import EngineClient

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 30.0
ATTACH_S = 30.0  # an agent that answers an Attach later than this is not well


class Link(enum.Enum):
    """AWAY: no connection. ASKING: attach sent. HERE: attached. ENDING: given up, the agent's end is still open."""

    AWAY = enum.auto()
    ASKING = enum.auto()
    HERE = enum.auto()
    ENDING = enum.auto()


@dataclass(frozen=True, slots=True)
class Over:
    """The connection is over: nothing that was asked over it will be answered, nothing touches memory any more."""

    why: str


class AgentLink:
    """`attach` is what we say first, `fds` opens the descriptors that go with it (sent, then closed here)."""

    def __init__(
        self,
        client: EngineClient,
        attach: Attach,
        fds: Callable[[], Sequence[int]],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = Link.AWAY
        self.address = ""
        self.why = "not connected yet"
        self._client = client
        self._attach = attach
        self._fds = fds
        self._log = log
        self._clock = clock
        self._witness: socket.socket | None = None
        self._retry_s = FIRST_RETRY_S
        self._at = 0.0  # when to try again (AWAY) or to stop waiting for Attached (ASKING)
        self._told = ""
        self._arm()
        _drop_in_children(self)

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
    def is_attached(self) -> bool:
        return self.state is Link.HERE

    def start(self, wait_s: float) -> bool:
        """For start-up only: wait until attached or refused, at most `wait_s`. False leaves it to later turns."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            self.turn()
            if self.is_attached:
                return True
            time.sleep(0.02)
        self._complain(f"no agent at {self._client.path} within {wait_s} s: {self.why}")
        return False

    def send(self, message: ToAgent) -> bool:
        """Queue a message. False if it will never arrive."""
        if not self.is_attached:
            return False
        is_sent = self._client.send(message)
        if not is_sent and self._client.is_connected:
            self._log.error("not sent: %s", self._client.why)
        return is_sent

    def turn(self) -> list[ToEngine | Over]:
        """Move what waits, both ways; return what concerns the engine. Never blocks."""
        if self.state is Link.AWAY and self._clock() >= self._at:
            self._try()
        if self.state in (Link.ASKING, Link.HERE):
            return self._listen()
        if self.state is Link.ENDING and self._is_over():
            return [self._end()]
        return []

    def rest(self, seconds: float) -> None:
        """Wait until the agent says something, at most so long."""
        readable = self._client.fileno()
        if readable < 0:
            time.sleep(seconds)
        else:
            select.select([readable], [], [], seconds)

    def give_up(self, why: str) -> None:
        """Stop using this connection; `Over` follows when the agent has let go as well."""
        if self.state in (Link.ASKING, Link.HERE):
            self._client.close(why)
            self._lost(why)

    def close(self) -> None:
        """The engine is leaving."""
        self._client.close("engine shut down")
        self._drop_witness()
        self.state, self.address, self._at = Link.AWAY, "", float("inf")

    def drop_copy(self) -> None:
        """In a forked child: let go of what it inherited, or the agent could not see the engine die. Says nothing."""
        self._client.drop_copy()
        self._drop_witness()
        self.state, self.address, self._at = Link.AWAY, "", float("inf")
        self.why = "forked: the connection is the parent's"

    def _try(self) -> None:
        if not self._client.reconnect():
            if self._client.is_foreign:
                self._complain(self._client.why)
            self._later(self._client.why)
            return
        fds = self._fds()
        try:
            self._witness = socket.socket(fileno=os.dup(self._client.fileno()))
            self._client.send(self._attach, fds)
        finally:
            for fd in fds:
                os.close(fd)
        self.state, self._at = Link.ASKING, self._clock() + ATTACH_S

    def _listen(self) -> list[ToEngine | Over]:
        messages: list[ToEngine | Over] = []
        for message in self._client.poll():
            match message:
                case Attached(agent=agent):
                    self.state, self.address = Link.HERE, agent.address
                    self._retry_s, self._told = FIRST_RETRY_S, ""
                    self._log.info("attached to %s at %s", agent.name, agent.address)
                case Refused(about="", code=code, reasons=reasons):
                    self.give_up(f"refused by the agent: {code}: {'; '.join(reasons)}")
                case _:
                    messages.append(message)
        if self.state is Link.ASKING and self._clock() > self._at:
            self.give_up(f"the agent did not answer within {ATTACH_S} s")
        if self.state in (Link.ASKING, Link.HERE) and not self._client.is_connected:
            self._lost(self._client.why)
        if self.state is Link.ENDING and self._is_over():
            messages.append(self._end())
        return messages

    def _lost(self, why: str) -> None:
        self.state, self.address, self.why = Link.ENDING, "", why
        self._complain(f"lost the agent at {self._client.path}: {why}")
        if self._witness is not None:
            self._witness.setblocking(False)
            with contextlib.suppress(OSError):  # its end may be closed already; the next read says so
                self._witness.shutdown(socket.SHUT_WR)

    def _is_over(self) -> bool:
        """Whether the agent's end is closed."""
        if self._witness is None:
            return True
        try:
            while self._witness.recv(1 << 16):
                pass  # what it still says answers nothing any more
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _end(self) -> Over:
        self._drop_witness()
        self._later(self.why)
        return Over(self.why)

    def _later(self, why: str) -> None:
        self.state, self.why = Link.AWAY, why
        self._at = self._clock() + self._retry_s
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)

    def _drop_witness(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def _complain(self, text: str) -> None:
        """The same once per absence: an engine steps a thousand times a second."""
        if text != self._told:
            self._told = text
            self._log.error("%s; requests are computed here until it is back", text)


def _drop_in_children(link: AgentLink) -> None:
    """For the link's life: what is registered at a fork stays registered, so it must not keep the link."""
    known = weakref.ref(link)

    def drop() -> None:
        if (left := known()) is not None:
            left.drop_copy()

    os.register_at_fork(after_in_child=drop)
