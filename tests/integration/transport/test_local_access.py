"""Who may listen at an agent's unix socket and who may speak: one agent under a lock, its own user, few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbridge_proto.engine import Refused
from kvbridge_proto.status import StatusQuery
from kvbridge_proto.stream import pack

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.errors import OperatorError
from kvbridge.transport.local import MAX_CONNECTIONS, LocalServer
from kvbridge.transport.unix import is_allowed
from tests.integration.adapters.fake_agent import squatter
from tests.integration.transport.ends import meet, polled, run, served

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
        run(path, lambda server: asyncio.sleep(0))
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

        async def story(server: LocalServer) -> None:
            raise AssertionError("the path is in use")

        with pytest.raises(OperatorError) as raised:
            run(path, story)
        assert raised.value.code == "socket_in_use" and path.exists()
    assert path.exists()  # killed: nobody removed it

    async def again(server: LocalServer) -> None:
        assert EngineClient(path).connect(1)

    run(path, again)


def unsafe(path: Path) -> str:
    with pytest.raises(OperatorError) as raised:
        run(path, lambda server: asyncio.sleep(0))
    assert raised.value.code in ("socket_unsafe", "socket_unavailable"), raised.value
    return f"{raised.value.code}: {raised.value}"


@pytest.mark.parametrize(
    ("mode", "is_safe"), [(0o700, True), (0o750, True), (0o770, True), (0o1777, True), (0o777, False), (0o702, False)]
)
def test_refuses_a_folder_where_anybody_could_replace_the_socket(path: Path, mode: int, is_safe: bool) -> None:
    path.parent.chmod(mode)
    try:
        if is_safe:
            run(path, lambda server: asyncio.sleep(0))
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


def test_does_not_remove_a_socket_that_took_its_place(path: Path) -> None:
    async def story(server: LocalServer) -> None:
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as thief:
            thief.bind(str(path))

    run(path, story)
    assert path.exists()


def test_a_socket_of_a_dead_agent_is_replaced_only_under_the_lock(path: Path) -> None:
    async def story(server: LocalServer) -> None:
        first = os.lstat(path).st_ino
        with pytest.raises(OperatorError) as raised:
            async with served(path):
                raise AssertionError("stolen")
        assert raised.value.code == "socket_in_use" and os.lstat(path).st_ino == first

    run(path, story)


def test_never_replaces_what_is_not_a_socket(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(OperatorError, match="something else"):
        run(path, lambda server: asyncio.sleep(0))
    assert path.read_text() == "precious"


def test_names_a_path_that_is_too_long_or_has_no_directory(tmp_path: Path) -> None:
    for path, code in ((tmp_path / ("x" * 108), "socket_path_too_long"), (tmp_path / "no/a", "socket_unavailable")):
        with pytest.raises(OperatorError) as raised:
            run(path, lambda server: asyncio.sleep(0))
        assert raised.value.code == code


def test_allows_its_own_user_root_and_who_is_named() -> None:
    assert is_allowed(1000, frozenset([1000])) and is_allowed(0, frozenset([1000]))
    assert not is_allowed(1001, frozenset([1000])) and not is_allowed(1001, frozenset())


def test_knows_the_peers_process_and_user(path: Path) -> None:
    async def story(server: LocalServer) -> None:
        _, connection = await meet(server)
        assert (connection.pid, connection.uid, connection.gid) == (os.getpid(), os.getuid(), os.getgid())

    run(path, story)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_tells_a_foreign_user_why_it_may_not_speak() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        path = Path(folder) / "agent.sock"
        with serving(path, "65533", "077"):
            assert b"uid_not_allowed" in heard_by(65534, path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.parametrize("umask", ["022", "077"])
def test_an_engine_of_another_user_that_is_named_is_let_in(umask: str) -> None:
    """As the unit has it: UMask=0077, a folder that only our user and its group may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o750)
        os.chown(folder, 0, 65533)
        path = Path(folder) / "agent.sock"
        with serving(path, "65534", umask):
            assert heard_by(65534, path, 65533) == b""
            assert b"PermissionError" in heard_by(65534, path, 65532)


def heard_by(uid: int, path: Path, gid: int = 65534) -> bytes:
    """What a process of this user is told at the socket, if anything is."""
    program = (
        "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.settimeout(0.5)\n"
        "try: s.connect(sys.argv[1]); print(s.recv(999))\nexcept TimeoutError: pass\n"
        "except OSError as error: print(type(error))"
    )
    command = ["/usr/bin/env", "python3", "-c", program, str(path)]
    return subprocess.run(command, stdout=subprocess.PIPE, user=uid, group=gid, extra_groups=[], timeout=20).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_an_engine_says_nothing_to_a_foreign_user_who_listens_in_its_agents_place() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)  # as /tmp is, which an agent accepts
        path = Path(folder) / "agent.sock"
        with squatter(path) as (pid, heard):
            client = EngineClient(path)
            assert not client.reconnect() and not client.is_connected and client.is_foreign
            assert client.why.startswith(f"uid_not_allowed: agent_uids: pid {pid} of uid 65534 listens")
            assert not client.send(StatusQuery()) and heard() == b""
            named = EngineClient(path, agent_uids=[65534])
            assert named.reconnect() and not named.is_foreign and named.send(StatusQuery())
            assert heard() == pack(StatusQuery())
        assert not client.reconnect() and not client.is_foreign  # nobody listens


def test_bounds_how_many_connect(path: Path) -> None:
    async def story(server: LocalServer) -> None:
        ends = [await meet(server) for _ in range(MAX_CONNECTIONS)]
        one_more = EngineClient(path)
        assert one_more.connect(1)
        accepting = asyncio.create_task(server.accept())
        (refused,) = await polled(one_more)
        assert isinstance(refused, Refused) and refused.code == "too_many_connections"
        ends.pop()[1].close()
        assert EngineClient(path).connect(1)
        assert not (await accepting).is_closed

    run(path, story)
