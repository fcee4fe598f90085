"""The proxy's control socket: HTTP for `kvbridge drain`, on a unix socket that only the proxy's own user can open."""

from __future__ import annotations

import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from ..errors import OperatorError
from ..oneline import plain
from .bodies import parse
from .fleet import Backend, Fleet

REASON_CHARS = 64  # of why an answer stays: it may be a parameter's name, which a client chose
REASONS = 16  # that are told
MOVES = "can move"


@asynccontextmanager
async def controlled(fleet: Fleet, path: Path) -> AsyncIterator[None]:
    """Listen at `path` until the end of the block. Raises OperatorError."""
    control = FleetControl(fleet)
    app = web.Application(client_max_size=1 << 16)
    app.router.add_post("/drain", control.drain)
    app.router.add_get("/drain", control.state)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        with _listening(path) as listening:
            await web.SockSite(runner, listening).start()
            yield
    finally:
        await runner.cleanup()


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket at `path`, which is removed at the end of the block unless another process has put its own there."""
    listening = _bound(path)
    ours = path.stat()
    try:
        yield listening
    finally:
        with suppress(FileNotFoundError):
            if os.path.samestat(ours, path.stat()):
                path.unlink()


def _bound(path: Path) -> socket.socket:
    """A socket of mode 0600 in place of one that nobody listens at any more."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode) or _is_answered(path):
                raise OperatorError("socket_in_use", f"control: {path} is another process's, or no socket")
            path.unlink()
        os.fchmod(listening.fileno(), 0o600)  # Linux makes the file with the socket's own mode, less the umask
        listening.bind(os.fspath(path))
        listening.listen()
    except OSError as error:
        listening.close()
        raise OperatorError("socket_unavailable", f"control: {path}: {error.strerror or error}") from None
    except OperatorError:
        listening.close()
        raise
    return listening


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.settimeout(1.0)
        try:
            tried.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
    return True


class FleetControl:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def drain(self, request: web.Request) -> web.Response:
        """Drain an engine, or take it back: {"engine": NAME, "undo": bool}."""
        try:
            asked = parse(await request.read(), dict[str, Any])
        except ValueError as error:
            return _refused(400, "bad_request", f"not a JSON object: {error}")
        name, is_undone = str(asked.get("engine")), asked.get("undo") is True
        listed = [each for each in self._fleet.listed() if each.name == name]
        if is_undone and not listed:
            return self._unknown(name)
        if not is_undone:
            for each in listed:
                if not self._fleet.healthy(each.role, listed):
                    return _refused(409, "last_engine", f"no other {each.role} engine is healthy: it does not drain")
        self._fleet.drain(name, not is_undone)
        return self._told(name)

    async def state(self, request: web.Request) -> web.Response:
        return self._told(request.query.get("engine", ""))

    def _told(self, name: str) -> web.Response:
        named = self._fleet.named(name)
        return web.json_response([_told(each) for each in named]) if named else self._unknown(name)

    def _unknown(self, name: str) -> web.Response:
        known = ", ".join(sorted({each.name for each in self._fleet.listed()}))
        return _refused(404, "no_engine", f"the proxy has no engine {plain(name, 200)}; it has {known}")


def _told(engine: Backend) -> dict[str, Any]:
    """What an engine still has. A prompt counts at a prefill engine until decode has begun to answer it."""
    why = Counter(sorted(plain(each.stays, REASON_CHARS) or MOVES for each in engine.running))
    return {
        "role": engine.role,
        "engine": engine.name,
        "is_draining": engine.is_draining,
        "under_way": engine.outstanding,
        "moved": engine.moved,
        "returned": engine.returned,
        "stays": dict(why.most_common(REASONS)),
    }


def _refused(status: int, code: str, reason: str) -> web.Response:
    return web.json_response({"code": code, "reason": reason}, status=status)
