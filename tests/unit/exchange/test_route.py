"""Which routes two sites share, and why the others are excluded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.peer import DeviceCard, FabricCard

from kvbridge.dataplane.routes.choice import candidates
from kvbridge.exchange.route import Site


def card(memory: str) -> FabricCard:
    return FabricCard(
        kind="nixl", name="incarnation", memory=memory, descriptor=b"", base=1 << 30, slot_bytes=1 << 20, slots=4
    )


def gpu(machine: str = "m1", host: bool = True, routes: tuple = ("direct", "nixl", "host")) -> Site:
    device = DeviceCard(machine=machine, uuid="GPU-1", payload=b"")
    return Site(card("vram"), card("dram") if host else None, device, routes)


CPU = Site(card("dram"))

CASES = [
    ("two GPUs of a machine", gpu(), gpu(), ["direct", "nixl", "host"]),
    ("two machines", gpu(), gpu("m2"), ["nixl", "host"]),
    ("two CPUs", CPU, CPU, ["nixl"]),
    ("a GPU and a CPU", gpu(), CPU, ["host"]),
    ("a CPU and a GPU", CPU, gpu(), ["host"]),
    ("a GPU without host slots and a CPU", gpu(host=False), CPU, []),
    ("a receiver that allows less", gpu(), gpu(routes=("host",)), ["host"]),
    ("the sender's order counts", gpu(routes=("host", "nixl")), gpu(), ["host", "nixl"]),
]


@pytest.mark.parametrize(
    ("sender", "receiver", "possible"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_finds_every_route_there_is_in_the_senders_order(sender: Site, receiver: Site, possible: list[str]) -> None:
    found = candidates(sender, receiver)
    assert [route for route, against in found if not against] == possible
    assert [route for route, _ in found] == list(sender.routes)
    assert all(against.startswith(f"{route}: ") for route, against in found if against)


def test_says_both_values() -> None:
    assert dict(candidates(gpu(), gpu("m2")))["direct"] == "direct: hosts: sender m1, receiver m2"
    assert dict(candidates(CPU, gpu()))["nixl"] == "nixl: slots: sender dram, receiver vram"
    less = gpu(routes=("nixl",))
    assert dict(candidates(gpu(), less))["host"] == "host: the receiver allows nixl (routes)"
    assert dict(candidates(gpu(host=False), gpu()))["host"] == "host: no slots in host memory at the sender"


@pytest.mark.parametrize(
    ("sender", "receiver", "reason"),
    [
        ("", "m1", "share_memory: off at the sender"),
        ("m1", "", "share_memory: off at the receiver"),
        ("", "", "share_memory: off at the sender and the receiver"),
        ("m1", "m2", "hosts: sender m1, receiver m2"),
        ("m1", "m1", ""),
    ],
)
def test_memory_that_is_not_shared_is_named_by_side_and_option(sender: str, receiver: str, reason: str) -> None:
    """Both agents print the reason, so it says whose: `ours` is true on one of them only."""
    pulling = [replace(CPU, machine=machine, routes=("pull", "nixl")) for machine in (sender, receiver)]
    assert dict(candidates(*pulling))["pull"] == (f"pull: {reason}" if reason else "")
