"""Attaching memory: each refusal has its error, refused memory is not mapped, and nothing stays mapped after close."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Handle, Pool, Step

from kvbridge.device import mapping
from kvbridge.device.memory import AttachedPool
from kvbridge.errors import EngineError, KVBridgeError, OperatorError
from testing.oracle import Shape, build
from testing.refusals import refused
from tests.integration.device.attached import Engine, attached, engine_of
from tests.integration.device.moving import gather, scatter

replace = msgspec.structs.replace


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_of(build(Shape())) as engine:
        yield engine


def maps_of(fd: int) -> list[str]:
    """This process's mappings of one file."""
    inode = str(os.fstat(fd).st_ino)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if line.split()[4] == inode and "/torch_" in line]


def test_close_unmaps_at_once_and_later_use_is_an_error(engine: Engine) -> None:
    before = [maps_of(fd) for fd in engine.fds]
    pool = AttachedPool.open(engine.held.pool, engine.handles, engine.fds)
    assert [len(maps_of(fd)) - len(was) for fd, was in zip(engine.fds, before, strict=True)] == [1, 1, 1, 1]
    pool.close()
    assert [maps_of(fd) for fd in engine.fds] == before
    pool.close()
    assert not pool.is_open
    for use in (gather, scatter):
        with refused(EngineError, "detached"):
            use(pool, [], torch.zeros(0, dtype=torch.uint8))


def test_close_waits_for_a_move_under_way() -> None:
    with attached(build(Shape())) as (held, pool):
        closing = threading.Thread(target=pool.close)
        with pool.hold() as regions:
            closing.start()
            closing.join(0.05)
            assert closing.is_alive()
            assert regions[0][0] == held.memory[0][0]
        closing.join(5)
        assert not pool.is_open


def with_plane(pool: Pool, **changes: object) -> Pool:
    return replace(pool, planes=(replace(pool.planes[0], **changes), *pool.planes[1:]))


def refusal(
    engine: Engine, pool: Pool | None = None, handles: Sequence[Handle] = (), fds: tuple[int, ...] = ()
) -> KVBridgeError:
    """Of this engine's memory but for what is said to be else; nothing of it is mapped then."""
    before = [maps_of(fd) for fd in engine.fds]
    with pytest.raises(KVBridgeError) as caught:
        AttachedPool.open(pool or engine.held.pool, handles or engine.handles, fds or engine.fds)
    assert [maps_of(fd) for fd in engine.fds] == before
    return caught.value


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"offset": 1}, 12289),
        ({"offset": 1 << 62}, (1 << 62) + 12288),
        ({"block_stride": 1 << 62}, 11 * (1 << 62) + 1024),
        ({"head_stride": 1 << 61}, 3 * (1 << 61) + 12288 - 48),
        ({"token_axis": (Step(16, 1 << 60),)}, 15 * (1 << 60) + 12288 - 15 * 64),
    ],
)
def test_refuses_a_plane_outside_its_region(engine: Engine, changes: dict[str, object], end: int) -> None:
    """Also where the sum does not fit 64 bits."""
    error = refusal(engine, with_plane(engine.held.pool, name="the first", **changes))
    assert error.code == "plane_outside_region"
    assert f"the first: ends at byte {end}, region 0 has 12288 bytes" in str(error)


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"token_axis": (Step(8, 64),)}, "bad_pool", "counts 8, block_tokens 16"),
        ({"region": 9}, "bad_plane", ""),
        ({"group": 3}, "bad_plane", ""),
    ],
)
def test_refuses_a_pool_that_cannot_be(engine: Engine, changes: dict[str, object], code: str, reason: str) -> None:
    error = refusal(engine, with_plane(engine.held.pool, **changes))
    assert error.code == code and reason in str(error)


@pytest.mark.proves("G24")
@pytest.mark.parametrize("offset", [0, 64])
def test_refuses_planes_on_top_of_each_other(engine: Engine, offset: int) -> None:
    """V where K is, or a token further: rows of one would be written over rows of the other, and nobody would know."""
    key, value, *others = engine.held.pool.planes
    value = replace(value, region=key.region, offset=offset, block_stride=key.block_stride)
    pool = replace(engine.held.pool, planes=(key, value, *others))
    if offset:
        pool = replace(pool, groups=(replace(pool.groups[0], blocks=11),))
    error = refusal(engine, pool)
    assert error.code == "planes_overlap"
    assert f"layer 0 k and layer 0 v: both hold byte {offset} of region 0" in str(error)


def small(_: Engine) -> int:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 12287)
    return fd


@pytest.mark.parametrize(
    ("made", "code", "reason"),
    [
        (small, "region_too_small", "ends at byte 12288, its fd has 12287"),
        (lambda _: os.pipe()[0], "region_unmappable", ""),
        (lambda engine: os.open(f"/proc/self/fd/{engine.fds[0]}", os.O_RDONLY), "region_unmappable", "Permission den"),
    ],
    ids=["holds less than the region", "is no memory", "cannot be written"],
)
def test_refuses_an_fd_by_what_it_is(engine: Engine, made: Callable[[Engine], int], code: str, reason: str) -> None:
    fd = made(engine)
    error = refusal(engine, fds=(fd, *engine.fds[1:]))
    assert error.code == code and reason in str(error)
    os.close(fd)


def test_refuses_an_offset_that_leaves_too_little(engine: Engine) -> None:
    error = refusal(engine, handles=(replace(engine.handles[0], offset=1), *engine.handles[1:]))
    assert "ends at byte 12289, its fd has 12288" in str(error)


@pytest.mark.parametrize("offset", [0, 1, 100, 4096, 5000])
def test_a_region_may_begin_inside_its_allocation(engine: Engine, offset: int) -> None:
    inside = os.memfd_create("inside")
    os.write(inside, bytes(offset) + bytes(range(256)) * 49)
    handles = (replace(engine.handles[0], offset=offset), *engine.handles[1:])
    with (
        closing(AttachedPool.open(engine.held.pool, handles, (inside, *engine.fds[1:]))) as pool,
        pool.hold() as regions,
    ):
        assert regions[0].numel() == 12288
        assert np.array_equal(regions[0][:256].numpy(), np.arange(256))
    os.close(inside)


def test_refuses_handles_that_do_not_match_the_regions(engine: Engine) -> None:
    first, *others = engine.handles
    for handles, fds, code in (
        (others, engine.fds, "handle_missing"),
        ([first, first, *others], engine.fds, "handle_repeated"),
        ([first, *others, replace(first, region=7)], engine.fds, "handle_missing"),
        ([first, *others], engine.fds[:1], "fd_missing"),
        ([replace(first, fd=None), *others], engine.fds, "fd_missing"),
    ):
        assert refusal(engine, handles=handles, fds=fds).code == code


@pytest.mark.parametrize("kind", ["cuda_ipc", "vmm_fd"])
def test_refuses_gpu_memory_on_a_cpu_and_says_which_device_it_takes(engine: Engine, kind: str) -> None:
    error = refusal(engine, handles=(replace(engine.handles[0], kind=kind, device="GPU-1"), *engine.handles[1:]))
    assert isinstance(error, OperatorError) and error.code == "handle_kind_unsupported"
    expected = f"handle kind: {kind}, this agent on cpu opens shm_fd; start the agent with --device GPU-1"
    assert expected in str(error)


IPC = Handle(region=2, kind="cuda_ipc", device="GPU-1", payload=bytes(64))
SHM = Handle(region=2, kind="shm_fd", fd=0)


@pytest.mark.parametrize(
    ("check", "code", "reason"),
    [
        (
            lambda: mapping.check_kind(SHM, "cuda:1"),
            "handle_kind_unsupported",
            "shm_fd, this agent on cuda:1 opens cuda_ipc and vmm_fd; start the agent with --device cpu",
        ),
        (
            lambda: mapping.check_device(IPC, "GPU-2"),
            "wrong_device",
            "region 2: lies on GPU-1, this agent serves GPU-2; .* start this one with --device GPU-1",
        ),
        (
            lambda: mapping.check_payload(replace(IPC, payload=bytes(63))),
            "region_unmappable",
            "payload of region 2: 63 bytes, must be 64",
        ),
        (
            lambda: mapping.check_end(replace(IPC, offset=1 << 62), 512, 1024, "its allocation"),
            "region_too_small",
            f"region 2: ends at byte {(1 << 62) + 512}, its allocation has 1024",
        ),
        (
            lambda: mapping.check_peer("GPU-1", "GPU-2", False, "slots of agent b"),
            "no_peer_access",
            "slots of agent b: GPU-1 cannot access the memory of GPU-2; use the route",
        ),
    ],
)
def test_refuses_a_gpu_handle_before_any_cuda_call(check: Callable[[], None], code: str, reason: str) -> None:
    with refused(KVBridgeError, code, reason):
        check()


def test_lets_right_gpu_handles_through() -> None:
    for kind in ("cuda_ipc", "vmm_fd"):
        mapping.check_kind(replace(IPC, kind=kind), "cuda:0")
    mapping.check_device(IPC, "GPU-1")
    mapping.check_payload(IPC)
    mapping.check_end(replace(IPC, offset=512), 512, 1024, "its allocation")
    for can_access in (True, None):  # None: its device is hidden from us, opening it will tell
        mapping.check_peer("GPU-1", "GPU-2", can_access, "slots")


def test_names_a_machine_without_a_gpu_to_attach_on() -> None:
    code = """if True:
        from kvbridge.device.driver import Gpu
        from kvbridge.errors import OperatorError
        try:
            Gpu.open("cuda:0")
        except OperatorError as error:
            print(error.code, error)
        """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("cuda_unavailable "), done.stdout
