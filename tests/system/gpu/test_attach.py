"""Attaching an engine's GPU memory from another process: bit-exact if it can be attached, else refused by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
import pytest
import torch
from kvbridge_proto.pool import Handle, Pool

from kvbridge.device import driver
from kvbridge.device.handles import export
from kvbridge.device.mapping import open_ipc, wrap
from kvbridge.device.memory import AttachedPool
from kvbridge.errors import KVBridgeError
from kvbridge.loopback.pools import Shape, describe
from testing.refusals import refused
from tests.system.gpu.engine import Engine, Told, free_bytes, pattern

pytestmark = pytest.mark.gpu

# Three layers of 3 MiB, each a region: torch puts such tensors into blocks of 20 MiB.
SHAPE = Shape(name="small", axes="LPBTHE", block_tokens=16, blocks=384, layers=3, kv_heads=2, width=64)
SIZES = [SHAPE.rank_bytes // SHAPE.layers] * SHAPE.layers
GONE_S = 1.0
change = msgspec.structs.replace


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One for all tests that neither kill it nor need another environment."""
    with Engine() as started:
        yield started


def pool_of(shape: Shape) -> Pool:
    return describe(shape, 0, shape.layers_apart)


def attach(engine: Engine, handles: Sequence[Handle], shape: Shape = SHAPE, device: str = "cuda:0") -> AttachedPool:
    return AttachedPool.open(pool_of(shape), handles, engine.fds, device)


def check_both_ways(engine: Engine, attached: AttachedPool) -> None:
    """We see every byte the engine wrote, and it sees every byte of ours."""
    engine.ask("write", 1)
    with attached.hold() as regions:
        for index, memory in enumerate(regions):
            assert isinstance(memory, torch.Tensor)
            assert torch.equal(memory, pattern(memory.numel(), 1 + index, str(memory.device)))
            memory.copy_(pattern(memory.numel(), 7 + index, str(memory.device)))
    torch.cuda.synchronize()
    assert engine.ask("holds", 7)
    assert not engine.ask("holds", 8)


def test_torch_memory_inside_a_block_of_its_allocator(engine: Engine) -> None:
    handles = engine.export("torch", SIZES)
    assert {handle.kind for handle in handles} == {"cuda_ipc"}
    assert len({handle.payload for handle in handles}) < len(handles), "no two regions in one allocation"
    assert any(handle.offset for handle in handles), "every region begins its allocation"
    with closing(attach(engine, handles)) as attached:
        check_both_ways(engine, attached)


def test_regions_with_allocations_of_their_own(engine: Engine) -> None:
    shape = change(SHAPE, blocks=384 * 8)
    handles = engine.export("torch", [shape.rank_bytes // 3] * 3)
    assert len({handle.payload for handle in handles}) == 3
    with closing(attach(engine, handles, shape)) as attached:
        check_both_ways(engine, attached)


def test_virtual_memory_by_its_descriptor(engine: Engine) -> None:
    handles = engine.export("virtual", SIZES)
    assert [(handle.kind, handle.fd) for handle in handles] == [("vmm_fd", 0), ("vmm_fd", 1), ("vmm_fd", 2)]
    with closing(attach(engine, handles)) as attached:
        check_both_ways(engine, attached)


def test_an_expandable_segment_within_one_piece() -> None:
    with Engine(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as engine:
        handles = engine.export("torch", SIZES)
        assert {handle.kind for handle in handles} == {"vmm_fd"}
        with closing(attach(engine, handles)) as attached:
            check_both_ways(engine, attached)


@pytest.mark.parametrize(
    ("kind", "size_bytes", "environment", "code", "remedy"),
    [
        ("torch", 64 << 20, "expandable_segments:True", "vmm_in_pieces", "expandable_segments:False"),
        ("closed", 3 << 20, "", "vmm_not_exportable", "no --enable-sleep-mode"),
        ("managed", 3 << 20, "", "managed_memory", "cudaMalloc"),
        ("pooled", 3 << 20, "", "pool_memory", "backend:native"),
        ("torch", 3 << 20, "backend:cudaMallocAsync", "pool_memory", "backend:native"),
    ],
)
def test_refuses_memory_that_cannot_be_mapped(
    kind: str, size_bytes: int, environment: str, code: str, remedy: str
) -> None:
    with Engine(PYTORCH_CUDA_ALLOC_CONF=environment) as engine, refused(Told, code, remedy):
        engine.export(kind, [size_bytes])


def test_refuses_pinned_host_memory() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8, pin_memory=True).untyped_storage()
    with refused(KVBridgeError, "pinned_memory"):
        export(storage, 0, 0)


def first(handles: Sequence[Handle], **changes: object) -> list[Handle]:
    return [change(handles[0], **changes), *handles[1:]]


HUGE = change(SHAPE, blocks=SHAPE.blocks * 1000)
WRONG: list[tuple[str, str, Callable[[Sequence[Handle]], list[Handle]], Shape, str]] = [
    ("uuid", "torch", lambda good: first(good, device="GPU-1"), SHAPE, "wrong_device"),
    ("size", "torch", list, HUGE, "region_too_small"),
    ("offset", "torch", lambda good: first(good, offset=1 << 40), SHAPE, "region_too_small"),
    ("offset past the end", "torch", lambda good: first(good, offset=(20 << 20) - 1), SHAPE, "region_too_small"),
    ("payload", "torch", lambda good: first(good, payload=b"\x5a" * 64), SHAPE, "region_unmappable"),
    ("length", "torch", lambda good: first(good, payload=b"\x5a" * 63), SHAPE, "region_unmappable"),
    ("kind", "torch", lambda good: first(good, kind="shm_fd", fd=0), SHAPE, "handle_kind_unsupported"),
    ("said size", "virtual", lambda good: first(good, payload=bytes(5) + b"\1\0\0"), SHAPE, "region_unmappable"),
    ("no size", "virtual", lambda good: first(good, payload=b""), SHAPE, "region_unmappable"),
    ("no fd", "virtual", lambda good: first(good, fd=9), SHAPE, "fd_missing"),
    ("size of a piece", "virtual", list, HUGE, "region_too_small"),
    ("offset in a piece", "virtual", lambda good: first(good, offset=1 << 30), SHAPE, "region_too_small"),
]


@pytest.mark.parametrize(("name", "kind", "spoil", "shape", "code"), WRONG, ids=[case[0] for case in WRONG])
def test_refuses_a_wrong_handle_and_keeps_nothing_open(
    engine: Engine, name: str, kind: str, spoil: Callable[[Sequence[Handle]], list[Handle]], shape: Shape, code: str
) -> None:
    handles = engine.export(kind, SIZES)
    with pytest.raises(KVBridgeError) as caught:
        attach(engine, spoil(handles), shape)
    assert caught.value.code == code, caught.value
    if name == "uuid":
        assert "GPU-1" in str(caught.value) and handles[0].device in str(caught.value)
    with closing(attach(engine, handles)) as attached:  # what was refused left nothing in the way
        check_both_ways(engine, attached)


def test_refuses_a_descriptor_that_is_no_gpu_memory(engine: Engine) -> None:
    handles = engine.export("virtual", SIZES)
    other = os.memfd_create("other")
    with refused(KVBridgeError, "region_unmappable"):
        AttachedPool.open(pool_of(SHAPE), handles, [other, *engine.fds[1:]], "cuda:0")
    os.close(other)


def test_refuses_memory_of_its_own_process() -> None:
    memory = torch.zeros(SIZES[0], dtype=torch.uint8, device="cuda:0")
    handle, _ = export(memory.untyped_storage(), 0, 0)
    with refused(KVBridgeError, "own_memory"):
        AttachedPool.open(pool_of(change(SHAPE, layers=1)), [handle], [], "cuda:0")


def test_refuses_the_handle_of_an_engine_that_is_gone() -> None:
    with Engine() as engine:
        handles = engine.export("torch", SIZES)
        engine.kill()
        with refused(KVBridgeError, "region_unmappable"):
            attach(engine, handles)


@pytest.mark.proves("G19")
@pytest.mark.parametrize("kind", ["torch", "virtual"])
def test_a_killed_engines_memory_is_free_once_its_agent_closes(kind: str) -> None:
    shape = change(SHAPE, layers=2, blocks=(1 << 30) // (SIZES[0] // SHAPE.blocks))  # two regions of 1 GiB
    size_bytes = shape.rank_bytes // 2
    torch.cuda.init()
    check_reattach(kind)
    before = free_bytes()
    with Engine() as engine:
        handles = engine.export(kind, [size_bytes] * 2)
        attached = attach(engine, handles, shape)
        engine.close_fds()  # the agent keeps none either
        engine.kill()
        time.sleep(0.5)
        assert free_bytes() < before - 2 * size_bytes + (64 << 20), "nothing was attached"
        began = time.monotonic()
        attached.close()
        closed_s = time.monotonic() - began
        while free_bytes() < before - (64 << 20):
            assert time.monotonic() - began < GONE_S, f"{before - free_bytes()} bytes are still held"
            time.sleep(0.005)
        print(f"{kind}: closed in {closed_s * 1e3:.1f} ms, free in {(time.monotonic() - began) * 1e3:.1f} ms")
    check_reattach(kind)


def check_reattach(kind: str) -> None:
    """The next engine is as welcome as the first."""
    with Engine() as again, closing(attach(again, again.export(kind, SIZES))) as attached:
        check_both_ways(again, attached)


def test_many_regions_are_attached_fast(engine: Engine) -> None:
    """A model of 64 layers attaches in no time; what it takes is printed."""
    shape = change(SHAPE, layers=64, blocks=384 * 8)
    handles = engine.export("torch", [shape.rank_bytes // 64] * 64)
    began = time.monotonic()
    attached = attach(engine, handles, shape)
    opened_s, began = time.monotonic() - began, time.monotonic()
    attached.close()
    closed_s = time.monotonic() - began
    print(f"64 regions: opened in {opened_s * 1e3:.1f} ms, closed in {closed_s * 1e3:.1f} ms")
    assert opened_s < 2 and closed_s < 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["torch", "virtual"])
def test_processes_that_count_gpus_differently(kind: str) -> None:
    """The engine's cuda:0 is our cuda:1."""
    with Engine(CUDA_VISIBLE_DEVICES="1") as engine:
        handles = engine.export(kind, SIZES)
        ours = driver.Gpu.open(handles[0].device)
        assert ours.device == "cuda:1"
        with refused(KVBridgeError, "wrong_device"):
            attach(engine, handles, device="cuda:0")
        with closing(attach(engine, handles, device=ours.device)) as attached, attached.hold() as regions:
            assert {str(memory.device) for memory in regions} == {"cuda:1"}
        with closing(attach(engine, handles, device=ours.device)) as attached:
            check_both_ways(engine, attached)


@pytest.mark.multi_gpu
def test_memory_of_another_gpu_opens_on_ours() -> None:
    """Opened with our device current, so that our kernels reach it; it lies on the other all the same."""
    ours = driver.Gpu.open("cuda:0")
    with Engine(CUDA_VISIBLE_DEVICES="1") as engine:
        (handle,) = engine.export("torch", [SIZES[0]])
        assert handle.device != ours.uuid and driver.can_access_peer(ours, handle.device) is True
        engine.ask("write", 3)
        address = open_ipc(ours, handle.payload, "slots", peer=handle.device) + handle.offset
        found = torch.empty(SIZES[0], dtype=torch.uint8, device="cuda:0")
        with ours.current():
            stream = torch.cuda.current_stream("cuda:0")
            driver.copy_on_device(found.data_ptr(), address, SIZES[0], stream.cuda_stream)
            stream.synchronize()
            assert torch.equal(found, pattern(SIZES[0], 3, "cuda:0"))
            found.copy_(pattern(SIZES[0], 9, "cuda:0"))
            driver.copy_on_device(address, found.data_ptr(), SIZES[0], stream.cuda_stream)
            stream.synchronize()
            driver.ipc_close(address - handle.offset)
        assert engine.ask("holds", 9)


def test_a_device_that_is_not_there_is_named() -> None:
    for device in ("cuda:99", "GPU-1", "cpu", "cuda:x"):
        with refused(KVBridgeError, "device_unknown", "this process sees cuda:0 = GPU-"):
            driver.Gpu.open(device)


def test_every_name_of_a_gpu_opens_it() -> None:
    gpu = driver.Gpu.open("cuda")
    assert gpu.uuid == driver.Gpu.open(gpu.device).uuid == driver.Gpu.open(gpu.uuid).uuid
    assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert driver.can_access_peer(gpu, gpu.uuid) is True
    assert driver.can_access_peer(gpu, "GPU-hidden") is None
    print("under MPS:", gpu.is_under_mps)


def test_own_memory_can_be_wrapped_registered_and_copied() -> None:
    gpu = driver.Gpu.open("cuda:0")
    host = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    with gpu.current():
        address = driver.allocate(host.numel())
        driver.host_register(host.data_ptr(), host.numel())
        stream = torch.cuda.current_stream()
        driver.copy_to_device(address, host.data_ptr(), host.numel(), stream.cuda_stream)
        wrapped = wrap(address, host.numel(), gpu)
        assert wrapped.data_ptr() == address and torch.equal(wrapped.cpu(), host)
        wrapped += 1
        driver.copy_to_host(host.data_ptr(), address, host.numel(), stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(wrapped.cpu(), host)
        driver.host_unregister(host.data_ptr())
        driver.free(address)
