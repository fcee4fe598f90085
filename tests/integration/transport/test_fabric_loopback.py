"""The loopback fabric keeps the contract, and the faults it can play."""

from __future__ import annotations

import ctypes

import pytest

from kvbridge.errors import FabricError
from kvbridge.transport.fabric import Noticed, WriteFailed, WriteLate, Wrote
from kvbridge.transport.fabric_loopback import LoopbackFabric, LoopbackNetwork


class Side:
    def __init__(self, network: LoopbackNetwork, boot: str) -> None:
        self.memory = ctypes.create_string_buffer(256)
        self.address = ctypes.addressof(self.memory)
        self.fabric = LoopbackFabric(network, boot)
        self.fabric.register(self.address, 256)


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def sides(network: LoopbackNetwork) -> tuple[Side, Side]:
    source, sink = Side(network, "source"), Side(network, "sink")
    source.fabric.connect("sink", sink.fabric.descriptor())
    return source, sink


def post(source: Side, sink: Side, content: bytes = b"rows", deadline: float = 10.0) -> int:
    ctypes.memmove(source.address, content, len(content))
    return source.fabric.write("sink", source.address, sink.address + 64, len(content), b"notice", deadline)


def test_moves_bytes_and_notice_when_the_writer_polls(sides: tuple[Side, Side]) -> None:
    source, sink = sides
    number = post(source, sink)
    assert source.fabric.is_busy and sink.fabric.poll(0) == []
    assert source.fabric.poll(0) == [Wrote(number)]
    assert sink.fabric.poll(0) == [Noticed(b"notice")]
    assert sink.memory.raw[64:68] == b"rows" and not source.fabric.is_busy


def test_a_stalled_write_is_late_once_and_lands_with_the_newer_bytes(
    network: LoopbackNetwork, sides: tuple[Side, Side]
) -> None:
    source, sink = sides
    network.stall("sink")
    number = post(source, sink, b"old!", deadline=1.0)
    assert source.fabric.poll(0.5) == []
    assert source.fabric.poll(1.0) == [WriteLate(number)]
    assert source.fabric.poll(2.0) == [] and source.fabric.is_busy
    ctypes.memmove(source.address, b"new!", 4)
    network.resume("sink")
    assert source.fabric.poll(3.0) == [Wrote(number)]
    assert sink.memory.raw[64:68] == b"new!"


def test_a_failed_write_leaves_half_and_no_notice_then_heals(
    network: LoopbackNetwork, sides: tuple[Side, Side]
) -> None:
    source, sink = sides
    network.fail("sink", "cable pulled")
    number = post(source, sink)
    assert source.fabric.poll(0) == [WriteFailed(number, "cable pulled")]
    assert sink.fabric.poll(0) == [] and sink.memory.raw[64:68] == b"ro\0\0"
    network.heal("sink")
    number = post(source, sink)
    assert source.fabric.poll(0) == [Wrote(number)]


def test_writes_to_a_closed_fabric_fail(sides: tuple[Side, Side]) -> None:
    source, sink = sides
    number = post(source, sink)
    sink.fabric.close()
    assert source.fabric.poll(0) == [WriteFailed(number, "peer_gone")]


def test_refuses_what_the_contract_refuses(network: LoopbackNetwork, sides: tuple[Side, Side]) -> None:
    source, sink = sides
    with pytest.raises(FabricError, match="peer says other, its descriptor sink"):
        source.fabric.connect("other", sink.fabric.descriptor())
    with pytest.raises(FabricError) as raised:
        source.fabric.connect("sink", b"nixl...")
    assert raised.value.code == "descriptor_malformed"
    with pytest.raises(FabricError) as raised:
        source.fabric.write("sink", source.address, sink.address + 250, 8, b"", 1.0)
    assert raised.value.code == "memory_not_registered"
    assert str(raised.value) == "write: 8 bytes from byte 0 of 256 of ours to sink: not all is registered"
    with pytest.raises(FabricError) as raised:
        source.fabric.register(source.address + 8, 8)
    assert raised.value.code == "region_overlaps"
    source.fabric.disconnect("sink")
    with pytest.raises(FabricError) as raised:
        post(source, sink)
    assert raised.value.code == "peer_not_connected"
    with pytest.raises(FabricError) as raised:
        LoopbackFabric(network, "sink")
    assert raised.value.code == "boot_taken"


def test_peers_write_only_into_targets(network: LoopbackNetwork, sides: tuple[Side, Side]) -> None:
    source, sink = sides
    private = ctypes.create_string_buffer(64)
    sink.fabric.register(ctypes.addressof(private), 64, is_target=False)
    with pytest.raises(FabricError):
        source.fabric.write("sink", source.address, ctypes.addressof(private), 8, b"", 1.0)
