"""Opens sessions with the agents that the option `meet` names, so that no request waits for a handshake."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..errors import OperatorError
from ..exchange.session import AttachedEngine
from ..state_machines import SessionState
from ..transport.endpoint import canonical
from ..transport.listed import ServiceName, read_list
from ..transport.names import Names
from .runners import ReceiverRunner

log = logging.getLogger("kvbridge.peers")

TURN_S = 0.25
LOOK_S = 5.0  # between looks at a name or a file
KEPT_S = 60.0  # an address is tried for so long after its name was last found, if it cannot be looked up
AT_ONCE = 16  # handshakes under way, while we begin more
MOST_MET = 1024
MOST_FILE_BYTES = 1 << 18
STEADY_S = 10.0  # sessions that last so long have not failed: the next attempt comes soon again
FIRST_WAIT_S, MOST_WAIT_S = 0.25, 30.0  # between attempts, each twice as long as the one before
PASSING = ("peer_unreachable", "peer_lost", "peer_left", "no_engine", "stale_epoch", "busy", "draining", "no_session")


@dataclass(slots=True)
class Meeting:
    """One address to meet. It is tried when `at` has come, and `wait_s` later again."""

    at: float = 0.0
    wait_s: float = FIRST_WAIT_S
    is_met: bool = False
    is_ours: bool = False  # it is this agent
    code: str = ""  # why it was last refused

    def reset(self) -> None:
        self.at, self.wait_s, self.code = 0.0, FIRST_WAIT_S, ""


@dataclass(eq=False, repr=False)
class Meetings:
    """Runs on the loop. `engine` is what sessions are opened for, None while there are to be none.

    Attempts are bounded: few at once, and each later than the one before. A session that is open stays as it is, though
    its address be named no longer.
    """

    entries: Sequence[str | ServiceName | Path]
    _receiver: ReceiverRunner
    _own: str  # our own address, which a name may have
    _engine: Callable[[], AttachedEngine | None]
    _clock: Callable[[], float]
    known: dict[str, Meeting] = field(default_factory=dict, init=False)
    _listed: dict[Path, list[str | ServiceName]] = field(default_factory=dict, init=False)
    _stamps: dict[Path, object] = field(default_factory=dict, init=False)
    _found: dict[ServiceName, tuple[float, list[str]]] = field(default_factory=dict, init=False)
    _epoch: int = field(default=0, init=False)
    _changes: int = field(default=-1, init=False)  # of sessions, at the last turn
    _looked_at: float = field(default=float("-inf"), init=False)
    _complaints: dict[object, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._receiver.peers.on_end, self._receiver.peers.on_engine = self._ended, self._engine_came

    async def serve(self) -> None:
        """Meet until cancelled. Returns at once if nobody is to be met."""
        if not self.entries:
            return
        names = Names()
        while True:
            if (now := self._clock()) - self._looked_at >= LOOK_S:
                self._looked_at = now
                await asyncio.to_thread(self._read_files)
                for named in [each for each in self._entries() if isinstance(each, ServiceName)]:
                    names.look_up(named.host, partial(self._looked_up, named))
                self._note_addresses()
            self.turn(self._clock())
            await asyncio.sleep(TURN_S)

    def count(self, is_met: bool) -> int:
        """How many addresses are met, or not yet. Callable from any thread: `list` copies atomically."""
        return sum(each.is_met is is_met for each in list(self.known.values()) if not each.is_ours)

    def turn(self, now: float) -> None:
        """Try those that are due, a few at once. Those that are met are looked at again when a session has changed."""
        if (engine := self._engine()) is None:
            return
        if engine.epoch != self._epoch:
            self._epoch = engine.epoch
            for meeting in self.known.values():
                meeting.reset()
        dialled = self._receiver.peers.sessions.values()
        room = AT_ONCE - sum(each.state is not SessionState.OPEN for each in dialled)
        changes = self._receiver.receiving.session_changes
        has_changed, self._changes = changes != self._changes, changes
        for address, meeting in list(self.known.items()):
            if meeting.is_ours:
                continue
            if has_changed or not meeting.is_met:
                meeting.is_met = all(map(self._receiver.is_met, self._names(address)))
            if meeting.is_met and now >= meeting.at + STEADY_S:
                meeting.reset()
            if not meeting.is_met and now >= meeting.at and room > 0:
                room -= 1
                meeting.at = now + meeting.wait_s * random.uniform(0.75, 1.25)
                meeting.wait_s = min(2 * meeting.wait_s, MOST_WAIT_S)
                for name in self._names(address):
                    self._receiver.meet(name)

    def _names(self, address: str) -> list[str]:
        """The address, and that by which requests name the agent there, as far as it is known."""
        session = self._receiver.peers.session_at(address)
        return list(dict.fromkeys([address] if session is None else [address, canonical(session.peer.address)]))

    def _ended(self, address: str, code: str, reason: str) -> None:
        """A session with this address could not be opened, or has ended."""
        named = next((each for each in self.known if address in self._names(each)), None)
        if named is None:
            return
        meeting = self.known[named]
        if code == "same_agent":
            meeting.is_ours = True
        elif code not in PASSING:  # refused: it will hardly change
            meeting.at, meeting.wait_s = self._clock() + MOST_WAIT_S * random.uniform(0.75, 1.25), MOST_WAIT_S
            if code != meeting.code:
                log.warning("not met: peer=%s code=%s %s", address, code, reason)
            meeting.code = code

    def _engine_came(self, address: str) -> None:
        """The agent there had no engine, and has one now: its next attempt is due."""
        if (meeting := self.known.get(address)) is not None:
            meeting.reset()

    def _entries(self) -> list[str | ServiceName]:
        listed = [self._listed.get(each, []) if isinstance(each, Path) else [each] for each in self.entries]
        return [entry for entries in listed for entry in entries]

    def _read_files(self) -> None:
        """Read the files that have changed. What cannot be read stays as it was."""
        for path in [each for each in self.entries if isinstance(each, Path)]:
            try:
                found = path.stat()
                stamp = found.st_ino, found.st_mtime_ns, found.st_size
                if stamp == self._stamps.get(path):
                    continue
                if found.st_size > MOST_FILE_BYTES:
                    raise OperatorError("bad_option", f"meet: {found.st_size} bytes, limit {MOST_FILE_BYTES}")
                self._listed[path] = read_list(path.read_text(), "meet")
                self._stamps[path] = stamp
                self._complain(path, "")
            except (OSError, ValueError, OperatorError) as error:
                self._complain(path, str(error))

    def _looked_up(self, named: ServiceName, addresses: Sequence[str], reason: str) -> None:
        if addresses:
            self._found[named] = self._clock(), [named.at(address) for address in addresses]
        elif named in self._found and self._clock() - self._found[named][0] > KEPT_S:
            del self._found[named]
        self._complain(named, reason)
        self._note_addresses()

    def _complain(self, about: Path | ServiceName, reason: str) -> None:
        """Log what is wrong, once."""
        if reason and reason != self._complaints.get(about):
            log.warning("nobody new can be met: meet=%s %s", about if isinstance(about, Path) else about.host, reason)
        self._complaints[about] = reason

    def _note_addresses(self) -> None:
        """Begin to meet those that are new, forget those that are named no longer."""
        entries = self._entries()
        named = [[e] if isinstance(e, str) else self._found.get(e, (0.0, []))[1] for e in entries]
        own = self._own.partition("#")[0]
        addresses = [each for found in named for each in found if each.partition("#")[0] != own]
        if len(distinct := list(dict.fromkeys(addresses))) > MOST_MET:
            self._complain(Path("meet"), f"{len(distinct)} addresses, limit {MOST_MET}")
        self.known = {address: self.known.get(address) or Meeting() for address in distinct[:MOST_MET]}
