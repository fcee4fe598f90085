"""Who may listen at an agent's unix socket and who may speak: one agent under a lock, its own user, few at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kvbridge_proto.engine import Refused
from kvbridge_proto.status import StatusQuery
from kvbridge_proto.stream import pack

from kvbridge.adapters.client import EngineClient
from kvbridge.errors import OperatorError
from kvbridge.transport.local import MAX_CONNECTIONS, LocalServer, is_allowed
from tests.adapters.fake_agent import squatter

from .ends import meet, polled, run, served


def test_only_this_user_can_open_the_socket(path: Path) -> None:
    async def story(server: LocalServer) -> None:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    run(path, story)
    assert not path.exists()


def test_refuses_a_path_in_use_and_replaces_a_dead_agents_socket(path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom kvbridge.transport.local import LocalServer\n"
        "from kvbridge.transport.lock import Lock\n"
        "async def main():\n async with LocalServer(Lock(sys.argv[1], '0' * 16)):\n"
        "  print('up', flush=True)\n  await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"up\n"

        async def story(server: LocalServer) -> None:
            raise AssertionError("the path is in use")

        with pytest.raises(OperatorError) as raised:
            run(path, story)
        assert raised.value.code == "socket_in_use" and path.exists()
    finally:
        other.kill()
        other.wait(10)
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
    async def story(server: LocalServer) -> None:
        server.path.chmod(0o666)
        server.path.parent.chmod(0o711)
        program = "import socket,sys; s=socket.socket(1); s.connect(sys.argv[1]); s.settimeout(5); print(s.recv(999))"
        other = await asyncio.create_subprocess_exec(
            "/usr/bin/env", "python3", "-c", program, str(server.path), stdout=subprocess.PIPE, user=65534, group=65534
        )
        accepting = asyncio.create_task(server.accept())
        told, _ = await other.communicate()
        accepting.cancel()
        assert b"uid_not_allowed" in told and server.refused == 1

    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "agent.sock", story)


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
