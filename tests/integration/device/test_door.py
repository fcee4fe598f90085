"""Pulling on a CPU from an engine of another process, whose memory was handed over at a door."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from kvbridge_kernels.field import Mapped
from kvbridge_proto.pool import Handle

from kvbridge.device.mapping import PeerMappings, SharedHandles
from kvbridge.device.memory import AttachedPool
from kvbridge.errors import KVBridgeError
from kvbridge.transport.door import Handover, open_memory
from testing.pools import build
from testing.proc import descriptors
from testing.refusals import refused
from tests.integration.device.attached import engine_of
from tests.integration.device.handed import FP8, HND64, NHD16, PACKED, SHAPES, Sender, filled, pulled

change = msgspec.structs.replace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def peer_of(handed: Handover, name: str = "nhd16") -> AttachedPool:
    """Its memory, open for reading; the descriptors are needed no longer."""
    sender = AttachedPool.open(build(SHAPES[name]).pool, handed.handles, handed.fds, is_peers=True)
    handed.close_fds()
    return sender


@pytest.mark.parametrize("name", ["nhd16", "packed", "fp8"])
async def test_rows_are_pulled_out_of_another_process_into_any_pool(path: Path, name: str) -> None:
    with Sender(path, name) as sender, closing(await open_memory(sender.ticket(), "decode-0")) as handed:
        with closing(peer_of(handed, name)) as pool:
            for receiver in (HND64, PACKED, FP8):
                assert pulled(SHAPES[name], pool, receiver, "cpu") == ""
        assert sender.ask("check") == "unchanged"


@pytest.mark.proves("G1", "T36")
async def test_what_is_handed_over_cannot_be_mapped_to_write(path: Path) -> None:
    with Sender(path, "nhd16") as sender, closing(await open_memory(sender.ticket(), "decode-0")) as handed:
        for fd in handed.fds:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, mmap.PAGESIZE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            with pytest.raises(OSError, match="Invalid argument"):
                os.ftruncate(fd, 0)
        with refused(KVBridgeError, "region_unmappable"):  # as an engine's own, which is mapped to be written
            AttachedPool.open(build(NHD16).pool, handed.handles, handed.fds)
        assert sender.ask("check") == "unchanged"


WRITE = """
import asyncio, sys, torch
from contextlib import closing
from kvbridge_proto.framing import decode
from kvbridge_proto.door import Ticket
from kvbridge.device.memory import AttachedPool
from kvbridge.transport.door import open_memory
from tests.integration.device.handed import NHD16
from testing.pools import build
async def main():
    with closing(await open_memory(decode(bytes.fromhex(sys.argv[1]), Ticket), "decode-0")) as handed:
        with AttachedPool.open(build(NHD16).pool, handed.handles, handed.fds, is_peers=True).hold() as regions:
            print(int(regions[0][5]), flush=True)
            regions[0][5] = 77
asyncio.run(main())
"""


@pytest.mark.proves("T36")
def test_a_write_to_the_mapping_is_a_fault_of_who_writes(path: Path) -> None:
    with Sender(path, "nhd16") as sender:
        command = [sys.executable, "-c", WRITE, msgspec.msgpack.encode(sender.ticket()).hex()]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (-signal.SIGSEGV, f"{filled(NHD16).memory[0][5]}\n"), ran.stderr
        assert sender.ask("check") == "unchanged" and sender.ask("importers") == "0 importers"


async def test_the_engine_may_die_while_its_memory_is_read(path: Path) -> None:
    with (
        Sender(path, "nhd16") as sender,
        closing(await open_memory(sender.ticket(), "decode-0")) as handed,
        closing(peer_of(handed)) as pool,
    ):
        sender.process.send_signal(signal.SIGKILL)
        assert "is gone" in await handed.ending()
        assert pulled(NHD16, pool, HND64, "cpu") == ""


async def test_the_sender_knows_when_the_mapping_is_closed(path: Path) -> None:
    with Sender(path, "nhd16") as sender, closing(await open_memory(sender.ticket(), "decode-0")) as handed:
        with closing(peer_of(handed)):
            assert sender.ask("end") == "ended" and sender.ask("importers") == "1 importers"
            assert await handed.ending() == "the engine leaves"
        handed.close()
        async with asyncio.timeout(60):
            while sender.ask("importers") != "0 importers":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        assert sender.ask("ticket") == "none"


@pytest.mark.proves("T35")
def test_a_region_that_is_not_what_its_pool_says_is_refused() -> None:
    with engine_of(filled(NHD16)) as engine, closing(SharedHandles.keep(engine.handles, engine.fds)) as kept:
        pool = engine.held.pool
        huge = change(pool, regions=tuple(change(each, size_bytes=each.size_bytes << 9) for each in pool.regions))
        on_gpu = tuple(change(each, kind="cuda_ipc", payload=bytes(64), device="GPU-1") for each in kept.handles)
        for wrong, handles, code in (
            (huge, kept.handles, "region_too_small"),
            (pool, kept.handles[1:], "handle_missing"),
            (pool, tuple(change(each, fd=99) for each in kept.handles), "fd_missing"),
            (pool, on_gpu, "handle_kind_unsupported"),
        ):
            with refused(KVBridgeError, code):
                AttachedPool.open(wrong, handles, kept.fds, is_peers=True)


# What is kept to be handed over:


def test_keeps_descriptors_of_its_own_in_the_order_of_the_handles() -> None:
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second, tempfile.TemporaryFile() as fence:
        fds = [fence.fileno(), second.fileno(), first.fileno()]
        handles = [
            Handle(region=0, kind="shm_fd", fd=2),
            Handle(region=1, kind="cuda_ipc", device="GPU-1", payload=b"h" * 64, offset=512),
            Handle(region=2, kind="vmm_fd", device="GPU-1", payload=b"s" * 8, fd=1),
            Handle(region=3, kind="shm_fd", offset=4096, fd=2),
        ]
        with closing(SharedHandles.keep(handles, fds)) as kept:
            assert [handle.fd for handle in kept.handles] == [0, None, 1, 0]
            assert tuple(change(each, fd=None) for each in kept.handles) == tuple(change(h, fd=None) for h in handles)
            inodes = [os.fstat(fd).st_ino for fd in kept.fds]
            assert inodes == [os.fstat(file.fileno()).st_ino for file in (first, second)]
            assert not {*kept.fds} & {*fds} and not any(os.get_inheritable(fd) for fd in kept.fds)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(kept.fds[0], b"x")
            ours = kept.fds
        for fd in ours:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        kept.close()


def test_a_missing_descriptor_leaves_none_open() -> None:
    with tempfile.TemporaryFile() as file:
        before = descriptors()
        handles = [Handle(region=0, kind="shm_fd", fd=0), Handle(region=1, kind="shm_fd", fd=1)]
        with refused(KVBridgeError, "fd_missing"):
            SharedHandles.keep(handles, [file.fileno()])
        assert descriptors() == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_memory_of_another_user_is_not_shared() -> None:
    keep = (
        "import os, sys\nfrom kvbridge_proto.pool import Handle\nfrom kvbridge.device.mapping import SharedHandles\n"
        "from kvbridge.errors import KVBridgeError\nos.setuid(65534)\n"
        "try: SharedHandles.keep([Handle(region=0, kind='shm_fd', fd=0)], [int(sys.argv[1])])\n"
        "except KVBridgeError as error: print(error.code)"
    )
    fd = os.memfd_create("region")
    os.fchmod(fd, 0o600)
    try:
        command = [sys.executable, "-c", keep, str(fd)]
        ran = subprocess.run(command, pass_fds=[fd], capture_output=True, text=True)
    finally:
        os.close(fd)
    assert ran.stdout == "not_shareable\n", ran.stderr


def test_memory_of_another_gpu_is_no_tensor() -> None:
    """torch would choose the GPU by the address: what kernels get is a number."""

    class Opened:
        def open(self, handle: Handle, size_bytes: int, fds: object) -> int:
            return 0x7F0000000000 + handle.offset

    class Gpu:
        device, uuid, ordinal = "cuda:1", "GPU-1", 1

        def current(self) -> object:
            return torch.no_grad()

    mappings = PeerMappings.__new__(PeerMappings)
    mappings._gpu, mappings._mappings = Gpu(), Opened()
    handle = Handle(region=0, kind="cuda_ipc", device="GPU-0", payload=bytes(64), offset=512)
    assert mappings.map(handle, 4096, ()) == Mapped(0x7F0000000200, 4096, 1)
