"""Finds the agents of this host, and asks them over their unix sockets."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from kvbridge_proto.engine import Refused, Release, ReleasedAll, ToEngine
from kvbridge_proto.framing import BadFrame, FrameReader, pack
from kvbridge_proto.status import PoolQuery, PoolStatus, Status, StatusQuery, Trace, TraceQuery

from .config import socket_folders
from .errors import OperatorError

AGENT_ANSWER_S = 5.0
RECEIVE_BYTES = 1 << 16
LISTENING = Path("/proc/net/unix")
ACCEPTS = 0x10000  # the kernel's flag of a socket that listens
LOCK_LINE_BYTES = 54  # of the file beside an agent's socket, see transport.lock

T = TypeVar("T")
Answer = TypeVar("Answer", Status, PoolStatus, Trace, ReleasedAll)


def found() -> list[str]:
    """The sockets of this host's agents, alive or not: in the usual folders, and in those where one of ours listens.

    Raises OperatorError (`no_agent`) if there is none.
    """
    sockets, forbidden = [], []
    for folder in socket_folders():
        try:
            if folder.is_dir():
                sockets += [str(path) for path in sorted(folder.iterdir()) if path.suffix == ".sock"]
        except OSError as error:
            forbidden.append(f"may not look for agents in {error.filename}: {error.strerror}")
    listening = _elsewhere()
    beside = {str(path) for folder in {Path(path).parent for path in listening} for path in _dead(folder)}
    sockets += [path for path in sorted({*listening, *beside}) if path not in sockets]
    if not sockets and forbidden:
        who = "be root, or in the agent's group and named in its allowed_uids"
        raise OperatorError("no_agent", f"{'; '.join(forbidden)}; {who}")
    if not sockets:
        where = " and ".join(map(str, socket_folders()))
        raise OperatorError("no_agent", f"no agent's socket in {where}, none of yours elsewhere; name it with --socket")
    return sockets


def _elsewhere() -> list[str]:
    """Listening sockets of our network namespace that have an agent's lock beside them, a file of our own user.

    Other users' sockets are left out: anybody may open one in his own folder and answer as he likes.
    """
    try:
        lines = LISTENING.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    fields = [line.split(maxsplit=7) for line in lines]
    paths = {each[7] for each in fields if len(each) == 8 and int(each[3], 16) & ACCEPTS and each[7].startswith("/")}
    return sorted(path for path in paths if _is_locked(path))


def _dead(folder: Path) -> list[Path]:
    """Sockets in a folder that have an agent's lock beside them, whoever listens: a killed agent leaves both."""
    try:
        return [path for path in folder.iterdir() if path.suffix == ".sock" and _is_locked(str(path))]
    except OSError:
        return []


def _is_locked(path: str) -> bool:
    try:
        found = Path(f"{path}.lock").stat()
    except OSError:
        return False
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and found.st_size > 0 and found.st_size % LOCK_LINE_BYTES == 0


def ask(path: str, answer_s: float = AGENT_ANSWER_S) -> Status:
    """The status of the agent at `path`. Raises OperatorError (`no_agent`, `agent_silent`, `agent_refused`)."""
    return _asked(path, StatusQuery(), Status, answer_s)


def ask_pool(path: str) -> PoolStatus:
    """The pool of the engine attached to the agent at `path`. Raises OperatorError as `ask` does."""
    return _asked(path, PoolQuery(), PoolStatus, AGENT_ANSWER_S)


def ask_trace(path: str, names: Sequence[str], answer_s: float = AGENT_ANSWER_S) -> Trace:
    """What the agent at `path` remembers about these names. Raises OperatorError as `ask` does."""
    return _asked(path, TraceQuery(names=tuple(names)), Trace, answer_s)


def ask_release(path: str) -> int:
    """Have the agent at `path` release what nobody has claimed: how many offers. Raises OperatorError as `ask` does."""
    return _asked(path, Release(), ReleasedAll, AGENT_ANSWER_S).offers


def tried(ask: Callable[[str], T], paths: Iterable[str]) -> dict[str, T | OperatorError]:
    """Ask the agents at these paths: what each answers, or why it does not."""
    answers: dict[str, T | OperatorError] = {}
    for path in paths:
        try:
            answers[path] = ask(path)
        except OperatorError as error:
            answers[path] = error
    return answers


def raise_any(answers: Iterable[object]) -> None:
    """Raises OperatorError, with all their reasons, if there are errors among these answers."""
    if failures := [answer for answer in answers if isinstance(answer, OperatorError)]:
        raise failures[0] if len(failures) == 1 else OperatorError(failures[0].code, *map(str, failures))


def _asked(path: str, query: msgspec.Struct, kind: type[Answer], answer_s: float) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(answer_s)
        try:
            connection.connect(path)
            connection.sendall(pack(query))
            return _answer(connection, path, kind)
        except TimeoutError:
            raise OperatorError("agent_silent", f"the agent at {path} did not answer in {answer_s:g} s") from None
        except OSError as error:
            raise OperatorError("no_agent", f"no agent at {path}: {error.strerror or error}") from None
        except BadFrame as error:
            raise OperatorError("no_agent", f"what answers at {path} is no agent: {error}") from None


def _answer(connection: socket.socket, path: str, kind: type[Answer]) -> Answer:
    reader: FrameReader[ToEngine] = FrameReader(ToEngine)
    while received := connection.recv(RECEIVE_BYTES):
        for message in reader.messages(received):
            if isinstance(message, kind):
                return message
            if isinstance(message, Refused):
                raise OperatorError("agent_refused", f"{path}: {message.code}: {'; '.join(message.reasons)}")
    raise OperatorError("no_agent", f"no agent at {path}: the connection was closed without an answer")
