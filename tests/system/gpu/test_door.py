"""Pulling from an engine's GPU memory handed over at a door, on this GPU and on another, and how either side ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from kvbridge_kernels.field import Mapped

from kvbridge.device import driver
from kvbridge.device.memory import AttachedPool
from kvbridge.errors import KVBridgeError
from kvbridge.transport.door import Handover, open_memory
from testing.pools import build
from tests.integration.device.handed import FP8, HND64, NHD16, PACKED, Sender, filled, pulled, shared_on
from tests.system.gpu.engine import free_bytes

pytest.importorskip("triton")
from kvbridge_kernels.launch import move

from testing.refusals import refused

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TWO_GPUS = pytest.param("cuda:1", marks=pytest.mark.multi_gpu)
OURS = pytest.mark.parametrize("ours", ["cuda:0", TWO_GPUS])
GONE_S = 1.0
SLACK_BYTES = 1 << 28  # at least a GiB with all regions
change = msgspec.structs.replace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def peer_of(handed: Handover, ours: str) -> AttachedPool:
    """The sender's pool, which is on cuda:0, as our GPU reads it."""
    sender = AttachedPool.open(build(NHD16).pool, handed.handles, handed.fds, ours, is_peers=True)
    handed.close_fds()
    return sender


async def until(is_so: Callable[[], bool], within_s: float) -> bool:
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > within_s:
            return False
        await asyncio.sleep(0.01)
    return True


@OURS
def test_rows_are_pulled_from_an_engine_of_another_process(path: Path, ours: str) -> None:
    async def story() -> None:
        with (
            Sender(path, "nhd16", "cuda:0") as sender,
            closing(await open_memory(sender.ticket(), "decode-0")) as handed,
        ):
            assert {handle.kind for handle in handed.handles} == {"cuda_ipc"} and handed.fds == []
            with torch.cuda.device(ours), closing(peer_of(handed, ours)) as pool:
                with pool.hold() as regions:
                    assert all(isinstance(each, Mapped) for each in regions)
                for receiver in (HND64, PACKED, FP8):
                    assert pulled(NHD16, pool, receiver, ours, move) == ""
            assert sender.ask("check") == "unchanged"

    asyncio.run(story())


@OURS
def test_an_engine_may_be_killed_while_its_memory_is_mapped(path: Path, ours: str) -> None:
    async def story() -> None:
        with (
            Sender(path, "nhd16", "cuda:0") as sender,
            closing(await open_memory(sender.ticket(), "decode-0")) as handed,
            torch.cuda.device(ours),
            closing(peer_of(handed, ours)) as pool,
        ):
            assert pulled(NHD16, pool, HND64, ours, move) == ""
            sender.process.send_signal(signal.SIGKILL)
            assert "is gone" in await handed.ending()
            sender.process.wait()
            for _ in range(3):
                assert pulled(NHD16, pool, HND64, ours, move) == ""

    asyncio.run(story())


@OURS
def test_memory_is_back_soon_after_the_last_reader_has_closed(path: Path, ours: str) -> None:
    async def story() -> None:
        torch.zeros(1, device="cuda:0")
        torch.zeros(1, device=ours)
        before = free_bytes()
        with (
            Sender(path, "nhd16", "cuda:0", SLACK_BYTES) as sender,
            closing(await open_memory(sender.ticket(), "decode-0")) as handed,
        ):
            with torch.cuda.device(ours), closing(peer_of(handed, ours)):
                sender.process.send_signal(signal.SIGKILL)
                sender.process.wait()
                await asyncio.sleep(GONE_S)
                assert before - free_bytes() > SLACK_BYTES // 2, "not held: then this test proves nothing"
            assert await until(lambda: before - free_bytes() < SLACK_BYTES // 8, GONE_S)

    asyncio.run(story())


def test_our_own_memory_is_refused_by_name() -> None:
    with shared_on(filled(NHD16), "cuda:0") as (_, handles, fds), refused(KVBridgeError, "own_memory"):
        AttachedPool.open(build(NHD16).pool, handles, fds, "cuda:0", is_peers=True)


def test_a_gpu_that_is_not_reached_is_named_before_its_memory_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair of H200s reaches each other: the driver's answer is made up."""

    async def story() -> None:
        with (
            Sender(path, "nhd16", "cuda:0") as sender,
            closing(await open_memory(sender.ticket(), "decode-0")) as handed,
        ):
            for kind, payload in (("cuda_ipc", bytes(64)), ("vmm_fd", (1 << 40).to_bytes(8, "little"))):
                far = [
                    change(each, device="GPU-far", kind=kind, payload=payload, offset=0, fd=0)
                    for each in handed.handles
                ]
                with pytest.raises(KVBridgeError) as raised:
                    AttachedPool.open(build(NHD16).pool, far, [0], "cuda:0", is_peers=True)
                assert raised.value.code == "no_peer_access" and "GPU-far" in str(raised.value)

    monkeypatch.setattr(driver, "can_access_peer", lambda gpu, peer: False)
    asyncio.run(story())


@pytest.mark.parametrize("spoilt", [b"\x5a" * 64, b"\x5a" * 63])
def test_a_handle_that_opens_nothing_is_refused_by_name(path: Path, spoilt: bytes) -> None:
    async def story() -> None:
        with (
            Sender(path, "nhd16", "cuda:0") as sender,
            closing(await open_memory(sender.ticket(), "decode-0")) as handed,
        ):
            bad = [change(each, payload=spoilt) for each in handed.handles]
            with refused(KVBridgeError, "region_unmappable"):
                AttachedPool.open(build(NHD16).pool, bad, [], "cuda:0", is_peers=True)
            with closing(peer_of(handed, "cuda:0")) as pool:  # what was refused left nothing in the way
                assert pulled(NHD16, pool, HND64, "cuda:0", move) == ""

    asyncio.run(story())
