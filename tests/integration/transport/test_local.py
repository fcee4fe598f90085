"""Engine and agent over a real unix socket: who owns which descriptors, and what happens when either end dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbridge_proto.engine import Descriptors, Detach, Detached, Failed, Refused, Withdraw
from kvbridge_proto.framing import BadFrame, pack
from kvbridge_proto.status import StatusQuery

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.errors import OperatorError
from kvbridge.transport.local import MAX_CONNECTIONS, LocalConnection, LocalServer, is_allowed
from kvbridge.unix_socket import close_fds
from testing.proc import descriptors
from testing.refusals import refused
from tests.integration.adapters.fake_agent import squatter
from tests.integration.transport.ends import NEEDS_ROOT, heard_by, inode, join, meet, pipes, polled, served

# Messages and descriptors:


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
async def test_descriptors_find_their_message_however_its_bytes_are_cut(
    server: LocalServer, cut: int, pause: bool
) -> None:
    engine, connection = await meet(server)
    (mine,) = pipes(1)
    before, with_fd, after = (pack(Withdraw(number=number, reason="x" * 30)) for number in (1, 2, 3))
    received = asyncio.create_task(take(connection, 3))
    engine.send(before[:-cut])
    await asyncio.sleep(0.01 if pause else 0)
    engine.send(before[-cut:])
    socket.send_fds(engine, [with_fd[:cut]], [mine])
    await asyncio.sleep(0.01 if pause else 0)
    engine.send(with_fd[cut:] + after)
    messages = await received
    assert [(message.number, len(fds)) for message, fds in messages] == [(1, 0), (2, 1), (3, 0)]
    assert inode(messages[1][1][0]) == inode(mine)
    close_fds([mine, *messages[1][1]])


async def take(connection: LocalConnection, count: int) -> list[tuple[Withdraw, list[int]]]:
    return [await connection.receive() for _ in range(count)]


async def test_a_large_frame_with_descriptors_crosses_in_pieces(server: LocalServer) -> None:
    (client, connection), mine = await join(server), pipes(3)
    big = [Withdraw(number=number + 1, reason="x" * 1000) for number in range(5000)]
    for number, message in enumerate(big):
        assert client.send(message, mine if number == 4000 else ())
    close_fds(mine)  # the client keeps its own until they are sent
    for number, message in enumerate(big):
        waiting = asyncio.create_task(connection.receive())
        while not waiting.done():
            client.poll()
            await asyncio.sleep(0)
        got, fds = await waiting or (None, [])
        assert got == message and len(fds) == (3 if number == 4000 else 0)
        close_fds(fds)


@pytest.mark.parametrize(
    ("garbage", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "frame_too_large"),
        (struct.pack(">I", 1 << 31), "frame_too_large"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "frame_malformed"),
        (struct.pack(">I", 0), "frame_malformed"),
        (struct.pack(">I", 2000) + b"\x91" * 2000, "frame_too_deep"),
        (pack(Detached(epoch=1)), "message_invalid"),
    ],
)
async def test_garbage_is_named_after_the_good_messages_before_it(
    server: LocalServer, garbage: bytes, code: str
) -> None:
    engine, connection = await meet(server)
    other, bystander = await meet(server)
    engine.send(pack(StatusQuery()) + garbage)
    assert await connection.receive() == (StatusQuery(), [])
    with refused(BadFrame, code) as raised:
        await connection.receive()
    connection.send(Refused(code=code, reasons=(str(raised.value),)))
    connection.close(code)
    assert code.encode() in engine.recv(1 << 16)
    assert await connection.receive() is None
    other.send(pack(Detach()))
    assert await bystander.receive() == (Detach(), [])


async def test_refuses_more_descriptors_than_the_limit_and_leaks_none(server: LocalServer, path: Path) -> None:
    engine, connection = await meet(server)
    mine = pipes(65)
    before = descriptors()
    socket.send_fds(engine, [pack(StatusQuery())], mine)
    with refused(BadFrame, "too_many_fds"):
        await connection.receive()
    assert descriptors() == before
    client = EngineClient(path)
    assert client.connect(1) and not client.send(StatusQuery(), mine * 16)
    assert client.is_connected and "limit 1024" in client.why
    close_fds(mine)


async def test_hundreds_of_descriptors_go_to_the_one_message_they_were_sent_with(server: LocalServer) -> None:
    (client, connection), mine = await join(server), pipes(201)
    before = descriptors()
    assert client.send(Withdraw(number=1), mine[:1]) and client.send(Withdraw(number=2), mine[1:])
    assert client.send(Withdraw(number=3))
    heard = await take(connection, 3)
    assert [(message.number, len(fds)) for message, fds in heard] == [(1, 1), (2, 200), (3, 0)]
    got = [*heard[0][1], *heard[1][1]]
    assert [inode(fd) for fd in got] == [inode(fd) for fd in mine] and not any(map(os.get_inheritable, got))
    close_fds(got)
    assert descriptors() == before
    close_fds(mine)


async def test_descriptors_without_a_message_are_bounded_and_closed(server: LocalServer) -> None:
    engine, connection = await meet(server)
    (mine,) = pipes(1)
    before, most = descriptors(), 0
    hearing = asyncio.create_task(connection.receive())
    with contextlib.suppress(BrokenPipeError):
        while not hearing.done():
            socket.send_fds(engine, [pack(Descriptors())], [mine] * 64)
            await asyncio.sleep(0.001)
            most = max(most, descriptors() - before)
    with pytest.raises(BadFrame) as raised:
        await hearing
    limit = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    assert raised.value.code == "too_many_fds" and str(limit) in str(raised.value)
    assert most <= limit and descriptors() == before
    os.close(mine)


async def test_all_that_was_said_is_sent_in_order_before_the_end_though_the_engine_is_slow_to_read(
    server: LocalServer,
) -> None:
    """It waits for that word, and without it for the end of our process."""
    client, connection = await join(server)
    for number in range(20_000):
        connection.send(Detached(epoch=number))
    connection.close()
    connection.send(Detached(epoch=0))
    assert await polled(client, 20_000) == [Detached(epoch=number) for number in range(20_000)]
    while not client.has_ended:
        assert client.poll() == []
        await asyncio.sleep(0.001)
    assert connection.is_closed


async def test_refuses_descriptors_where_no_frame_begins(server: LocalServer) -> None:
    engine, connection = await meet(server)
    (mine,) = pipes(1)
    frame = pack(StatusQuery())
    socket.send_fds(engine, [frame[:2]], [mine])
    socket.send_fds(engine, [frame[2:5]], [mine])
    with refused(BadFrame, "stray_fds"):
        await connection.receive()
    os.close(mine)


# How it ends:


@pytest.mark.proves("G19")
async def test_a_killed_engine_is_seen_at_once(server: LocalServer, path: Path) -> None:
    program = "import socket,sys,time; s=socket.socket(1); s.connect(sys.argv[1]); time.sleep(60)"
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(path))
    connection = await server.accept()
    assert connection.pid == engine.pid
    ending = asyncio.create_task(connection.receive())
    await asyncio.sleep(0.05)
    begin = time.monotonic()
    engine.send_signal(signal.SIGKILL)
    assert await ending is None and time.monotonic() - begin < 30
    await engine.wait()


async def test_an_engine_that_reads_again_hears_that_we_have_let_go(server: LocalServer) -> None:
    """It would wait for that word as long as our process lives; frames before it must not be cut in the middle."""
    client, connection = await join(server)
    message, count = Failed(number=1, request="r", code="c", reason="x" * 1000), 0
    while not connection.why:
        connection.send(message)
        count += 1
    assert "does not read" in connection.why and await connection.receive() is None and not connection.is_closed
    connection.send(message)  # too late, and not heard
    connection.send(Detached(epoch=7))
    connection.close()
    assert await polled(client, count + 1) == [message] * count + [Detached(epoch=7)]
    while not client.has_ended:
        assert client.poll() == []
        await asyncio.sleep(0.001)


async def test_our_end_stays_open_and_speaks_until_we_close_it(server: LocalServer) -> None:
    engine, connection = await meet(server)
    engine.settimeout(0.1)
    engine.shutdown(socket.SHUT_WR)
    assert await connection.receive() is None
    connection.send(Detached(epoch=7))
    assert engine.recv(1 << 16) == pack(Detached(epoch=7))
    with pytest.raises(TimeoutError):
        engine.recv(1)
    connection.close()
    assert engine.recv(1) == b""


@pytest.mark.proves("G13")
async def test_is_silent_once_all_that_was_said_is_dealt_with(server: LocalServer) -> None:
    """What was read while a Withdraw waited in the socket, all of it or its first half, may be another request's."""
    engine, connection = await meet(server)
    said = pack(Withdraw(number=1))
    assert not connection.is_silent  # nobody listens yet
    listening = asyncio.create_task(connection.receive())
    await asyncio.sleep(0)
    assert connection.is_silent
    engine.send(said[:-1])
    assert not connection.is_silent  # it has come, and the loop had no turn
    await asyncio.sleep(0.05)
    assert not connection.is_silent and not listening.done()
    engine.send(said[-1:])
    assert await listening and not connection.is_silent  # it is being dealt with
    listening = asyncio.create_task(connection.receive())
    await asyncio.sleep(0)
    assert connection.is_silent
    engine.close()
    assert not connection.is_silent  # its end has come
    assert await listening is None
    connection.close()
    assert not connection.is_silent


async def test_an_engine_hears_the_agents_last_words_and_then_its_end(server: LocalServer) -> None:
    client, connection = await join(server)
    client.send(StatusQuery())  # unread when the agent closes
    connection.send(Refused(code="draining", reasons=()))
    connection.close()
    for _ in range(3):
        client.send(StatusQuery())
    assert client.poll() == [Refused(code="draining", reasons=())]
    assert client.poll() == [] and not client.is_connected and client.why
    assert not client.send(StatusQuery())
    assert client.reconnect() and client.is_connected and client.why == ""


def test_a_client_without_an_agent_says_so_in_time(path: Path) -> None:
    client, begin = EngineClient(path), time.monotonic()
    assert not client.connect(0.3) and time.monotonic() - begin < 30
    assert str(path) in client.why and not client.is_connected
    assert not client.send(StatusQuery()) and client.poll() == [] and not client.reconnect()


async def test_a_client_waits_for_an_agent_that_starts_later(path: Path) -> None:
    client = EngineClient(path)
    connecting = asyncio.create_task(asyncio.to_thread(client.connect, 60))
    await asyncio.sleep(0.2)
    async with served(path):
        assert await connecting


def test_a_client_never_blocks_on_an_agent_that_does_not_read(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.bind(str(path))
        agent.listen(1)
        full = EngineClient(path, unsent_bytes=1 << 20)
        assert full.connect(1)
        begin = time.monotonic()
        while full.send(Withdraw(number=1, reason="x" * 1000)):
            assert time.monotonic() - begin < 60
        assert "limit 1048576" in full.why and not full.is_connected
        stalled = EngineClient(path, stall_s=0.1)
        assert stalled.connect(1)
        for _ in range(2000):
            stalled.send(Withdraw(number=1, reason="x" * 1000))
        time.sleep(0.15)
        assert stalled.poll() == [] and "stall_s" in stalled.why


# Who may listen (one agent, with a lock) and who may speak (its user, few at a time):


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
    engine, silent = await join(server), await join(server)
    await asyncio.sleep(0.01)  # the loop's clock counts milliseconds
    speaker = await join(server)
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
