"""Handing over engine memory at the door: who gets it, who does not, and how the sender knows who still has it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbridge_proto.common import OURS, VersionRange
from kvbridge_proto.door import MemoryEnding, MemoryOpened, OpenMemory, Ticket
from kvbridge_proto.engine import Refused
from kvbridge_proto.framing import encode, pack
from kvbridge_proto.pool import Handle

from kvbridge.errors import PeerError
from kvbridge.transport import door as doors
from kvbridge.transport.door import Importer, MemoryDoor, Shared
from kvbridge.transport.framed import Connection
from kvbridge.transport.lock import Lock
from kvbridge.unix_socket import close_fds
from testing.proc import descriptors
from tests.integration.adapters.fake_agent import squatter
from tests.integration.transport.ends import INCARNATION, NEEDS_ROOT, heard_by, inode, pipes

change = msgspec.structs.replace
open_memory = partial(doors.open_memory, within_s=60.0)
RECEIVER = """
import asyncio, sys
from contextlib import closing
from kvbridge_proto.framing import decode
from kvbridge_proto.door import Ticket
from kvbridge.transport.door import open_memory
async def main():
    with closing(await open_memory(decode(bytes.fromhex(sys.argv[1]), Ticket), "decode-7")) as handed:
        print(len(handed.fds), flush=True)
        print(await handed.ending(), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests of slow callers are about time: a busy machine makes every caller slow."""
    monkeypatch.setattr(doors, "CALL_S", 60.0)
    monkeypatch.setattr(doors, "HAND_OVER_S", 60.0)


@contextlib.asynccontextmanager
async def opened(path: Path, fds: Iterable[int] = (), allowed_uids: Iterable[int] = ()) -> AsyncIterator[MemoryDoor]:
    """A door that shares epoch 3: CUDA memory, and a region for each descriptor."""
    with contextlib.closing(Lock(path, INCARNATION)) as lock:
        async with MemoryDoor(lock, allowed_uids=allowed_uids) as door:
            door.share(shared(3, fds))
            serving = asyncio.create_task(door.serve())
            try:
                yield door
            finally:
                serving.cancel()
                await asyncio.wait([serving])
                assert serving.cancelled()


@pytest.fixture
def door(path: Path) -> contextlib.AbstractAsyncContextManager[MemoryDoor]:
    return opened(path)


def shared(epoch: int, fds: Iterable[int] = ()) -> Shared:
    handles = [Handle(region=0, kind="cuda_ipc", device="GPU-1", payload=b"h" * 64, offset=512)]
    handles += [Handle(region=i + 1, kind="shm_fd", fd=i) for i, _ in enumerate(fds)]
    return Shared(epoch, tuple(handles), tuple(fds))


def ticket_of(door: MemoryDoor, session: str = "decode-0/1") -> Ticket:
    ticket = door.admit(session)
    assert ticket is not None
    return ticket


async def refused(ticket: Ticket) -> str:
    """The code that we are refused with."""
    with pytest.raises(PeerError) as raised:
        await open_memory(ticket, "decode-0")
    return raised.value.code


async def until_held_by(door: MemoryDoor, count: int) -> list[Importer]:
    async with asyncio.timeout(60):
        while len(door.importers()) != count:  # noqa: ASYNC110 - the door has no event for it
            await asyncio.sleep(0.001)
    return door.importers()


def speech(ticket: Ticket, **other: object) -> bytes:
    said = OpenMemory(versions=OURS, session=ticket.session, epoch=ticket.epoch, token=ticket.token, agent="raw")
    return pack(change(said, **other))


def caller(door: MemoryDoor) -> socket.socket:
    """A raw one, that blocks for 60 s at most; read from it in a thread."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(60)
    connected.connect(str(door.path))
    return connected


async def heard(connected: socket.socket) -> bytes:
    return await asyncio.to_thread(connected.recv, 1 << 16)


@contextlib.contextmanager
def receiving(ticket: Ticket) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the memory handed to it."""
    with subprocess.Popen([sys.executable, "-c", RECEIVER, encode(ticket).hex()], stdout=subprocess.PIPE) as receiver:
        try:
            yield receiver
        finally:
            receiver.kill()


# What is handed over:


async def test_hands_over_the_epochs_handles_and_descriptors(path: Path) -> None:
    mine = pipes(200)
    before, began = descriptors(), time.monotonic()
    async with opened(path, mine) as door:
        with closing(await open_memory(ticket_of(door), "decode-0")) as handed:
            assert handed.epoch == 3 and handed.handles == shared(3, mine).handles
            assert [inode(fd) for fd in handed.fds] == [inode(fd) for fd in mine]
            assert not any(os.get_inheritable(fd) for fd in handed.fds)
            (importer,) = door.importers()
            assert (importer.pid, importer.uid, importer.agent) == (os.getpid(), os.getuid(), "decode-0")
            assert (importer.session, importer.epoch, importer.over_at) == ("decode-0/1", 3, None)
            assert began <= importer.since <= time.monotonic()
        await until_held_by(door, 0)
    assert descriptors() == before
    close_fds(mine)


# To whom it is not:


@pytest.mark.proves("T30")
async def test_refuses_a_wrong_token_and_keeps_the_right_one_good(door: MemoryDoor) -> None:
    ticket, other = ticket_of(door), ticket_of(door, "another")
    for token in (bytes(32), ticket.token[:-1] + bytes([ticket.token[-1] ^ 1]), other.token):
        assert await refused(change(ticket, token=token)) == "wrong_token"
    assert await refused(change(ticket, session="unheard of")) == "wrong_token"
    assert door.importers() == [] and door.refused == 4
    (await open_memory(ticket, "decode-0")).close()


@pytest.mark.proves("T30")
async def test_a_token_opens_once_and_a_new_one_opens_again(door: MemoryDoor) -> None:
    first = ticket_of(door)
    with closing(await open_memory(first, "decode-0")):
        assert await refused(first) == "wrong_token"
    second = ticket_of(door)
    third = ticket_of(door)  # makes the second one void
    assert len({first.token, second.token, third.token}) == 3
    assert await refused(second) == "wrong_token"
    (await open_memory(third, "decode-0")).close()
    door.dismiss("decode-0/1", "the session ended")
    ticket = ticket_of(door)
    door.dismiss("decode-0/1", "the session ended")
    assert await refused(ticket) == "wrong_token"


async def test_cards_that_nobody_shows_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MAX_TOKENS", 4)
    async with opened(path) as door:
        tickets = [ticket_of(door, f"s{i}") for i in range(6)]
        assert [await refused(ticket) for ticket in tickets[:2]] == ["wrong_token"] * 2
        for ticket in tickets[2:]:
            (await open_memory(ticket, "decode-0")).close()


@pytest.mark.proves("T30")
async def test_refuses_an_epoch_that_is_over(door: MemoryDoor) -> None:
    old, other, renamed = ticket_of(door), ticket_of(door, "other"), ticket_of(door, "renamed")
    door.end(3, "the engine left")
    assert door.admit("late") is None
    assert await refused(old) == "stale_epoch"
    door.share(shared(4))
    assert await refused(other) == "stale_epoch"
    assert await refused(change(renamed, epoch=4)) == "stale_epoch", "it was admitted to the third"
    assert await refused(change(ticket_of(door), epoch=3)) == "stale_epoch"
    third = ticket_of(door)
    door.end(3, "heard again")  # it has nothing to do with the fourth
    (await open_memory(third, "decode-0")).close()


async def test_refuses_a_receiver_of_other_versions(door: MemoryDoor) -> None:
    with caller(door) as raw:
        raw.send(speech(ticket_of(door), versions=VersionRange(OURS.newest + 1, OURS.newest + 1)))
        assert b"version_mismatch" in await heard(raw)


@pytest.mark.proves("T29")
@NEEDS_ROOT
@pytest.mark.parametrize(("allowed", "code"), [([65533], b"uid_not_allowed"), ([], b"PermissionError")])
async def test_refuses_another_user(open_path: Path, allowed: list[int], code: bytes) -> None:
    async with opened(open_path, allowed_uids=allowed) as door:
        assert code in await heard_by(65534, door.path)
        assert b"memory_opened" not in await heard_by(65534, door.path, speech(ticket_of(door)).hex())
        assert door.importers() == []


@NEEDS_ROOT
async def test_hands_over_to_a_user_who_is_named_and_proves_the_session(open_path: Path) -> None:
    async with opened(open_path, allowed_uids=[65534]) as door:
        wrong, right = speech(ticket_of(door), token=bytes(32)), speech(ticket_of(door))
        assert b"wrong_token" in await heard_by(65534, door.path, wrong.hex())
        assert b"memory_opened" in await heard_by(65534, door.path, right.hex())


@pytest.mark.proves("T29")
@NEEDS_ROOT
async def test_shows_its_token_to_no_foreign_user_who_listens_in_the_peers_place(open_path: Path) -> None:
    async with opened(open_path) as door:
        ticket = ticket_of(door)
    with squatter(Path(ticket.path)) as (_, heard_there):
        unsaid = change(ticket, socket="")  # which socket it is: a file system may number the next one alike
        assert await refused(unsaid) == "uid_not_allowed" and heard_there() == b""


async def test_goes_to_no_other_socket_at_the_path_of_the_door(tmp_path: Path) -> None:
    """Containers of one host often have sockets of their own at one path. Their agents would log the stranger."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    async with opened(here / "s") as theirs:
        ticket = ticket_of(theirs)
        here.rename(there)
        assert await refused(ticket) == "door_elsewhere"
        here.mkdir()
        async with opened(here / "s") as ours:
            assert await refused(ticket) == "door_elsewhere" and not ours.refused
            with contextlib.suppress(OSError):
                assert await refused(change(ticket, socket="")) == "wrong_token" and ours.refused == 1


@pytest.mark.proves("T34")
async def test_a_receiver_goes_to_no_socket_that_is_no_door_of_this_machine(door: MemoryDoor, path: Path) -> None:
    ticket = ticket_of(door)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        other.setblocking(False)
        assert await refused(change(ticket, path=str(path))) == "wrong_machine"
        with pytest.raises(BlockingIOError):
            other.accept()
    assert await refused(change(ticket, machine="another")) == "wrong_machine"
    assert await refused(change(ticket, path=f"{path}.not.door")) == "door_elsewhere"


# How it ends:


async def test_tells_receivers_of_an_epochs_end_and_names_them_until_they_have_closed(door: MemoryDoor) -> None:
    one, other = await open_memory(ticket_of(door, "s1"), "one"), await open_memory(ticket_of(door, "s2"), "other")
    door.end(3, "the engine left")
    door.share(shared(4))
    newer = await open_memory(ticket_of(door, "s3"), "newer")
    door.end(3, "heard again")  # it has nothing to do with the fourth
    assert await one.ending() == await other.ending() == "the engine left"
    assert not one.is_peer_gone and not one.is_closed
    held = {importer.agent: importer for importer in door.importers()}
    assert held["one"].over_at is not None and held["newer"].over_at is None
    one.close()
    left = await until_held_by(door, 2)
    assert [(importer.agent, importer.epoch) for importer in left] == [("other", 3), ("newer", 4)]
    other.close()
    newer.close()


async def test_the_end_of_a_session_ends_what_it_holds(door: MemoryDoor) -> None:
    one, other = await open_memory(ticket_of(door, "s1"), "a"), await open_memory(ticket_of(door, "s2"), "b")
    door.dismiss("s1", "the link ended")
    assert await one.ending() == "the link ended"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(other.ending(), 0.05)
    one.close()
    other.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_receiver_that_dies_holds_nothing_any_more(door: MemoryDoor, number: int) -> None:
    with receiving(ticket_of(door)) as receiver:
        (importer,) = await until_held_by(door, 1)
        assert (importer.pid, importer.agent) == (receiver.pid, "decode-7")
        receiver.send_signal(number)
        await until_held_by(door, 0)


async def test_a_receiver_that_keeps_the_memory_is_named_though_it_was_told(door: MemoryDoor) -> None:
    with receiving(ticket_of(door)) as receiver:
        await until_held_by(door, 1)
        door.end(3, "engine gone")
        assert receiver.stdout is not None
        assert await asyncio.to_thread(receiver.stdout.readline) == b"0\n"
        assert await asyncio.to_thread(receiver.stdout.readline) == b"engine gone\n"
        await asyncio.sleep(0.05)
        (importer,) = door.importers()
        assert importer.pid == receiver.pid and importer.over_at is not None


async def test_a_receiver_hears_when_the_senders_agent_is_gone(path: Path) -> None:
    async with opened(path) as door:
        handed = await open_memory(ticket_of(door), "decode-0")
    assert "is gone" in await handed.ending() and handed.is_peer_gone
    handed.close()
    assert handed.is_closed


# Callers that are slow, mute, loud or mad:


@pytest.mark.proves("T33")
async def test_a_mute_caller_and_a_slow_one_are_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "CALL_S", 0.2)
    async with opened(path) as door:
        with caller(door) as mute, caller(door) as slow:
            slow.send(speech(ticket_of(door))[:20])
            assert b"caller_slow" in await heard(mute) and b"caller_slow" in await heard(slow)
            assert await heard(mute) == b"" == await heard(slow)
        assert door.open == set() and door.importers() == []


async def test_time_in_which_we_stood_still_counts_against_no_caller(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had spoken meanwhile, and lost its route: the sender's agent had been stopped for longer than CALL_S."""
    monkeypatch.setattr(doors, "CALL_S", 0.5)
    async with opened(path) as door:
        with caller(door) as raw:
            while not door.open:  # noqa: ASYNC110 - the door has no event for it
                await asyncio.sleep(0.001)
            raw.send(speech(ticket_of(door)))
            time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still
            assert b"memory_opened" in await heard(raw)
        await until_held_by(door, 0)


async def test_an_opening_that_is_cancelled_as_the_answer_comes_leaks_no_descriptor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, receive = pipes(2), Connection.receive
    before = descriptors()

    async def received(connection: Connection[Any, Any]) -> Any:
        found = await receive(connection)
        if found is not None and isinstance(found[0], MemoryOpened):
            asyncio.get_running_loop().call_soon(opening.cancel)
        return found

    monkeypatch.setattr(Connection, "receive", received)
    async with opened(path, mine) as door:
        opening = asyncio.create_task(open_memory(ticket_of(door), "decode-0"))
        with contextlib.suppress(asyncio.CancelledError):
            (await opening).close()
        await until_held_by(door, 0)
    assert descriptors() == before
    close_fds(mine)


async def test_a_caller_that_does_not_take_the_handles_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    async with opened(path) as door:
        many = Handle(region=0, kind="cuda_ipc", device="GPU-1", payload=b"h" * 4096)
        door.share(Shared(4, (many,) * 1000, ()))
        with caller(door) as raw:
            raw.send(speech(ticket_of(door)))
            await until_held_by(door, 1)
            with closing(await open_memory(ticket_of(door, "s2"), "decode-0")) as handed:  # others go on meanwhile
                assert len(handed.handles) == 1000
        await until_held_by(door, 0)
        monkeypatch.setattr(doors, "HAND_OVER_S", 0.2)
        with caller(door) as raw:
            raw.send(speech(ticket_of(door)))
            await until_held_by(door, 1)
            await until_held_by(door, 0)
            assert door.open == set()
    assert descriptors() == before


async def test_an_epoch_that_ends_while_it_is_handed_over_sends_no_closed_descriptor(door: MemoryDoor) -> None:
    many = Handle(region=0, kind="cuda_ipc", device="GPU-1", payload=b"h" * 4096)
    door.share(Shared(4, (many,) * 1000, ()))
    with caller(door) as raw:
        raw.send(speech(ticket_of(door)))
        await until_held_by(door, 1)
        door.end(4, "the engine left")
        assert door.open == set()
        await until_held_by(door, 0)


HOSTILE = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", b"frame_too_large"),
    "a long frame": (struct.pack(">I", 1 << 20), b"frame_too_large"),
    "no msgpack": (struct.pack(">I", 3) + b"\xc1\xc1\xc1", b"frame_malformed"),
    "another message": (pack(MemoryOpened(version=1, epoch=3, handles=())), b"message_invalid"),
    "a short token": (pack({"type": "open_memory", "versions": [1, 1], "session": "s", "epoch": 3, "token": b"x",
                            "agent": "a"}), b"message_invalid"),
}  # fmt: skip


@pytest.mark.proves("T33")
@pytest.mark.parametrize("name", HOSTILE)
async def test_names_what_is_wrong_and_goes_on_with_others(path: Path, name: str) -> None:
    said, code = HOSTILE[name]
    async with opened(path) as door:
        with caller(door) as raw:
            raw.send(said)
            assert code in await heard(raw)
        (await open_memory(ticket_of(door), "decode-0")).close()


@pytest.mark.proves("T33")
async def test_takes_no_descriptors_from_a_caller(door: MemoryDoor) -> None:
    (mine,) = pipes(1)
    with caller(door) as raw:
        before = descriptors()
        socket.send_fds(raw, [speech(ticket_of(door))], [mine])
        assert b"too_many_fds" in await heard(raw)
        assert door.importers() == [] and descriptors() <= before
    os.close(mine)


async def test_a_holder_that_goes_on_talking_is_cut_off(door: MemoryDoor) -> None:
    with caller(door) as raw:
        raw.send(speech(ticket_of(door)))
        assert b"memory_opened" in await heard(raw)
        raw.send(speech(ticket_of(door)))
        assert b"message_invalid" in await heard(raw)
    await until_held_by(door, 0)


@pytest.mark.proves("T33")
async def test_a_flood_of_callers_is_bounded_and_leaves_holders_alone(path: Path) -> None:
    async with opened(path) as door:
        handed = await open_memory(ticket_of(door), "decode-0")
        callers, turned_away = [], 0
        for _ in range(4 * doors.MAX_CALLERS):
            callers.append(caller(door))
            await asyncio.sleep(0.001)
            assert len(door.open) <= doors.MAX_CALLERS + 2
        for each in callers:
            with contextlib.suppress(OSError):  # it was turned away, and the other end is closed
                each.shutdown(socket.SHUT_WR)
            turned_away += b"too_many_connections" in await heard(each)
            each.close()
        assert turned_away >= 2 * doors.MAX_CALLERS and len(door.importers()) == 1
        (await open_memory(ticket_of(door, "after"), "decode-0")).close()
        handed.close()


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        *((garbage, "door_unreachable", "door ") for garbage in (b"\xff" * 8, struct.pack(">I", 2) + b"\xc1\xc1", b"")),
        (pack(Refused(code="made_up", reasons=())), "door_refused", "made_up"),
        (
            pack(MemoryOpened(version=1, epoch=4, handles=())),
            "stale_epoch",
            "of the token 3, of the memory handed over 4",
        ),
        (pack(MemoryEnding(reason="bye")), "door_refused", "said MemoryEnding"),
    ],
)
async def test_a_receiver_survives_a_mad_door_and_takes_no_new_code_from_it(
    path: Path, said: bytes, code: str, reason: str
) -> None:
    async with opened(path) as door:
        ticket = change(ticket_of(door), socket="")  # whichever listens there
    before = descriptors()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(ticket.path)
        listening.listen(1)
        opening = asyncio.create_task(open_memory(ticket, "decode-0"))
        accepted, _ = await asyncio.to_thread(listening.accept)
        accepted.sendall(said)
        accepted.close()
        with pytest.raises(PeerError, match=reason) as raised:
            await opening
        assert raised.value.code == code
        del raised, opening
        assert descriptors() == before + 1
    os.unlink(ticket.path)


async def test_a_receiver_waits_for_a_mute_door_no_longer_than_it_says(path: Path) -> None:
    async with opened(path) as door:
        ticket = change(ticket_of(door), socket="")  # whichever listens there
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(ticket.path)
        listening.listen(0)
        for _ in range(2):  # the second finds its backlog full
            with pytest.raises(PeerError) as raised:
                await open_memory(ticket, "decode-0", within_s=0.2)
            assert raised.value.code == "door_unreachable"
