"""Who may listen at an agent's unix socket (one agent, with a lock) and who may speak (its user, few at a time)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbridge_proto.codec import pack
from kvbridge_proto.engine import Refused
from kvbridge_proto.status import StatusQuery

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.errors import OperatorError
from kvbridge.transport.local import MAX_CONNECTIONS, LocalServer
from kvbridge.transport.unix import is_allowed
from tests.integration.adapters.fake_agent import squatter
from tests.integration.transport.ends import NEEDS_ROOT, heard_by, join, meet, polled, served

SERVE = """
import asyncio, os, sys
from kvbridge.transport.local import LocalServer
from kvbridge.transport.lock import Lock
async def main():
    os.umask(int(sys.argv[3], 8))
    async with LocalServer(Lock(sys.argv[1], "0" * 16), allowed_uids=map(int, sys.argv[2].split())) as server:
        print("up", flush=True)
        while True:
            await server.accept()
asyncio.run(main())
"""


@contextlib.contextmanager
def serving(path: Path, allowed_uids: str = "", umask: str = "022") -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves at the path, under this umask."""
    command = [sys.executable, "-c", SERVE, str(path), allowed_uids, umask]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            yield server
        finally:
            server.kill()


@pytest.mark.proves("T24")
@pytest.mark.parametrize("umask", ["000", "022", "077", "777"])
@pytest.mark.parametrize(("allowed", "mode"), [("", 0o600), ("65534", 0o666)])
def test_who_can_open_the_socket_does_not_depend_on_the_umask(path: Path, umask: str, allowed: str, mode: int) -> None:
    path.with_name("agent.sock.lock").write_bytes(b"")  # under 777 we could not read our own
    with serving(path, allowed, umask):
        assert oct(stat.S_IMODE(os.stat(path).st_mode)) == oct(mode)


def test_the_socket_is_never_open_further_than_it_is_to_be(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its mode is at each system call after the one that makes it."""
    seen, chmod = [], os.chmod

    def changed(target: str, mode: int) -> None:
        seen.append(stat.S_IMODE(path.stat().st_mode))
        chmod(target, mode)

    monkeypatch.setattr(os, "chmod", changed)
    before = os.umask(0)
    try:
        serve(path)
    finally:
        os.umask(before)
    assert seen == [0o600]


def test_the_mode_goes_to_our_socket_and_to_nothing_that_took_its_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder, or one of a group's, others may write too."""
    precious, real = path.parent / "precious", os.open
    precious.write_text("precious")
    precious.chmod(0o600)

    def opened(target: str | Path, *args: int) -> int:
        if target == path:
            path.unlink()
            path.symlink_to(precious)
        return real(target, *args)

    monkeypatch.setattr(os, "open", opened)
    assert "something else took its place" in unsafe(path) and stat.S_IMODE(precious.stat().st_mode) == 0o600


def test_refuses_a_path_in_use_and_replaces_a_dead_agents_socket(path: Path) -> None:
    with serving(path):
        first = os.lstat(path).st_ino
        assert refusal(path).code == "socket_in_use" and os.lstat(path).st_ino == first
    assert path.exists()  # killed: nobody removed it
    with serving(path):
        assert EngineClient(path).connect(1)  # a socket that nobody listens at refuses


def serve(path: Path) -> None:
    """For a moment."""

    async def moment() -> None:
        async with served(path):
            pass

    asyncio.run(moment())


def refusal(path: Path) -> OperatorError:
    with pytest.raises(OperatorError) as raised:
        serve(path)
    return raised.value


def unsafe(path: Path) -> str:
    error = refusal(path)
    assert error.code in ("socket_unsafe", "socket_unavailable"), error
    return str(error)


@pytest.mark.proves("T25")
@pytest.mark.parametrize(
    ("mode", "is_safe"), [(0o700, True), (0o750, True), (0o770, True), (0o1777, True), (0o777, False), (0o702, False)]
)
def test_refuses_a_folder_where_anybody_could_replace_the_socket(path: Path, mode: int, is_safe: bool) -> None:
    path.parent.chmod(mode)
    try:
        if is_safe:
            serve(path)
        else:
            assert f"{mode:04o}" in unsafe(path) and not path.exists()
    finally:
        path.parent.chmod(0o700)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder away, which only root may")
def test_refuses_a_folder_of_somebody_else(path: Path) -> None:
    folder = path.parent / "theirs"
    folder.mkdir(0o755)
    os.chown(folder, 65534, 65534)
    assert "uid 65534" in unsafe(folder / "a.sock") and os.listdir(folder) == []


@pytest.mark.proves("T25")
def test_follows_no_lock_that_points_elsewhere(path: Path) -> None:
    """Else who may write there has us lock, or make, a file of the attacker's choice."""
    target = path.parent / "precious"
    lock = Path(f"{path}.lock")
    lock.symlink_to(target)
    unsafe(path)
    assert not target.exists() and not path.exists()
    lock.unlink()
    target.write_text("precious")
    os.link(target, lock)
    assert "not a file of ours alone" in unsafe(path)
    lock.unlink()
    os.mkfifo(lock)
    unsafe(path)
    lock.unlink()
    lock.mkdir()
    unsafe(path)
    assert target.read_text() == "precious"


async def test_does_not_remove_a_socket_that_took_its_place(path: Path) -> None:
    async with served(path):
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as thief:
            thief.bind(str(path))
    assert stat.S_ISSOCK(os.lstat(path).st_mode)


def test_never_replaces_what_is_not_a_socket(path: Path) -> None:
    path.write_text("precious")
    assert "something else" in str(refusal(path)) and path.read_text() == "precious"


def test_names_a_path_that_is_too_long_or_has_no_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / ("x" * 108)).code == "socket_path_too_long"
    assert refusal(tmp_path / "no/a").code == "socket_unavailable"


def test_allows_its_own_user_root_and_who_is_named() -> None:
    assert is_allowed(1000, frozenset([1000])) and is_allowed(0, frozenset([1000]))
    assert not is_allowed(1001, frozenset([1000])) and not is_allowed(1001, frozenset())


async def test_knows_the_peers_process_and_user(server: LocalServer) -> None:
    _, connection = await meet(server)
    assert (connection.pid, connection.uid) == (os.getpid(), os.getuid())


@pytest.mark.proves("T24")
@NEEDS_ROOT
async def test_tells_a_foreign_user_why_it_may_not_speak(open_path: Path) -> None:
    with serving(open_path, "65533", "077"):
        assert b"uid_not_allowed" in await heard_by(65534, open_path)


@NEEDS_ROOT
@pytest.mark.parametrize("umask", ["022", "077"])
async def test_an_engine_of_another_user_that_is_named_is_let_in(open_path: Path, umask: str) -> None:
    """As the unit has it: UMask=0077, a folder that only our user and its group may enter."""
    os.chmod(open_path.parent, 0o750)
    os.chown(open_path.parent, 0, 65533)
    with serving(open_path, "65534", umask):
        assert await heard_by(65534, open_path, gid=65533) == b""
        assert b"PermissionError" in await heard_by(65534, open_path, gid=65532)


@pytest.mark.proves("T26")
@NEEDS_ROOT
def test_an_engine_says_nothing_to_a_foreign_user_who_listens_in_its_agents_place(open_path: Path) -> None:
    with squatter(open_path) as (pid, heard):
        client = EngineClient(open_path)
        assert not client.reconnect() and not client.is_connected and client.is_barred
        assert client.why.startswith(f"uid_not_allowed: agent_uids: pid {pid} of uid 65534 listens")
        assert not client.send(StatusQuery()) and heard() == b""
        named = EngineClient(open_path, agent_uids=[65534])
        assert named.reconnect() and not named.is_barred and named.send(StatusQuery())
        assert heard() == pack(StatusQuery())
    assert not client.reconnect() and not client.is_barred  # nobody listens


@pytest.mark.proves("T31")
async def test_who_was_silent_for_longest_makes_room_and_the_engine_never(server: LocalServer) -> None:
    engine, silent, speaker = await join(server), await join(server), await join(server)
    engine[1].is_engine = True
    for _ in range(MAX_CONNECTIONS - 2):
        await meet(server)
    speaker[0].send(StatusQuery())
    assert await speaker[1].receive() is not None
    newest = await meet(server)
    (refused,) = await polled(silent[0])
    assert isinstance(refused, Refused) and refused.code == "too_many_connections"
    assert silent[1].is_closed and not engine[1].is_closed and not speaker[1].is_closed
    for _ in range(MAX_CONNECTIONS):
        newest = await meet(server)
    assert len(server.open) == MAX_CONNECTIONS + 1 and speaker[1].is_closed
    assert not engine[1].is_closed and not newest[1].is_closed
