"""The loopback fabric: it keeps the contract, and plays faults."""

from __future__ import annotations

import ctypes

import pytest

from kvbridge.errors import FabricError
from kvbridge.transport.fabric import Noticed, WriteFailed, WriteLate, Wrote
from testing.fabric_loopback import LoopbackFabric, LoopbackNetwork
from testing.refusals import refused


class Side:
    def __init__(self, network: LoopbackNetwork, incarnation: str) -> None:
        self.memory = ctypes.create_string_buffer(256)
        self.address = ctypes.addressof(self.memory)
        self.fabric = LoopbackFabric(network, incarnation)
        self.fabric.register(self.address, 256)


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def sides(network: LoopbackNetwork) -> tuple[Side, Side]:
    sender, receiver = Side(network, "sender"), Side(network, "receiver")
    sender.fabric.connect("receiver", receiver.fabric.descriptor())
    return sender, receiver


def post(sender: Side, receiver: Side, content: bytes = b"rows", deadline: float = 10.0) -> int:
    ctypes.memmove(sender.address, content, len(content))
    return sender.fabric.write("receiver", sender.address, receiver.address + 64, len(content), b"notice", deadline)


def test_moves_bytes_and_notice_when_the_writer_polls(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    number = post(sender, receiver)
    assert sender.fabric.is_busy and receiver.fabric.poll(0) == []
    assert sender.fabric.poll(0) == [Wrote(number)]
    assert receiver.fabric.poll(0) == [Noticed(b"notice")]
    assert receiver.memory.raw[64:68] == b"rows" and not sender.fabric.is_busy


def test_a_stalled_write_is_late_once_and_lands_with_the_newer_bytes(
    network: LoopbackNetwork, sides: tuple[Side, Side]
) -> None:
    sender, receiver = sides
    network.stall("receiver")
    number = post(sender, receiver, b"old!", deadline=1.0)
    assert sender.fabric.poll(0.5) == []
    assert sender.fabric.poll(1.0) == [WriteLate(number)]
    assert sender.fabric.poll(2.0) == [] and sender.fabric.is_busy
    ctypes.memmove(sender.address, b"new!", 4)
    network.resume("receiver")
    assert sender.fabric.poll(3.0) == [Wrote(number)]
    assert receiver.memory.raw[64:68] == b"new!"


def test_a_failed_write_leaves_half_and_no_notice_then_heals(
    network: LoopbackNetwork, sides: tuple[Side, Side]
) -> None:
    sender, receiver = sides
    network.fail("receiver", "cable pulled")
    number = post(sender, receiver)
    assert sender.fabric.poll(0) == [WriteFailed(number, "cable pulled")]
    assert receiver.fabric.poll(0) == [] and receiver.memory.raw[64:68] == b"ro\0\0"
    network.heal("receiver")
    number = post(sender, receiver)
    assert sender.fabric.poll(0) == [Wrote(number)]


def test_writes_to_a_closed_fabric_fail(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    number = post(sender, receiver)
    receiver.fabric.close()
    assert sender.fabric.poll(0) == [WriteFailed(number, "peer_gone")]


def test_refuses_what_the_contract_refuses(network: LoopbackNetwork, sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    with pytest.raises(FabricError, match="peer says other, its descriptor receiver"):
        sender.fabric.connect("other", receiver.fabric.descriptor())
    with refused(FabricError, "descriptor_malformed"):
        sender.fabric.connect("receiver", b"nixl...")
    with refused(FabricError, "memory_not_registered") as raised:
        sender.fabric.write("receiver", sender.address, receiver.address + 250, 8, b"", 1.0)
    assert str(raised.value) == "write: 8 bytes from byte 0 of 256 of ours to receiver: not all is registered"
    with refused(FabricError, "region_overlaps"):
        sender.fabric.register(sender.address + 8, 8)
    sender.fabric.disconnect("receiver")
    with refused(FabricError, "peer_not_connected"):
        post(sender, receiver)
    with refused(FabricError, "incarnation_taken"):
        LoopbackFabric(network, "receiver")


@pytest.mark.proves("G1")
def test_peers_write_only_into_targets(network: LoopbackNetwork, sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    private = ctypes.create_string_buffer(64)
    receiver.fabric.register(ctypes.addressof(private), 64, is_target=False)
    with pytest.raises(FabricError):
        sender.fabric.write("receiver", sender.address, ctypes.addressof(private), 8, b"", 1.0)
