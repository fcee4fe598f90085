"""Which routes two sites share, and why the others are excluded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.peer import DeviceCard, FabricCard
from msgspec import structs

from kvbridge.exchange.route import Site
from kvbridge.exchange.session import Session, accept, answer, hello, welcome
from kvbridge.geometry.shard import common
from kvbridge.routes.choice import candidates
from tests.unit.exchange.world import World


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
        (("m1", False), ("m1", True), "share_memory: off at the sender"),
        (("m1", True), ("m1", False), "share_memory: off at the receiver"),
        (("m1", False), ("m2", False), "share_memory: off at the sender and the receiver"),
        (("m1", True), ("", True), "share_memory: off at the receiver"),  # as agents said it that knew no flag
        (("m1", True), ("m2", True), "hosts: sender m1, receiver m2"),
        (("m1", True), ("m1", True), ""),
    ],
)
def test_memory_that_is_not_shared_is_named_by_side_and_option(
    sender: tuple[str, bool], receiver: tuple[str, bool], reason: str
) -> None:
    """Both agents print the reason, so it says whose: `ours` is true on one of them only."""
    ours, theirs = (
        replace(CPU, machine=machine, shares_memory=shares, routes=("pull", "nixl"))
        for machine, shares in (sender, receiver)
    )
    engine = World().receivers[0].engine
    told = Site.of(hello(replace(engine, site=replace(theirs, fabric=engine.site.fabric))))
    assert dict(candidates(ours, told))["pull"] == (f"pull: {reason}" if reason else "")


@pytest.mark.parametrize("older", ["none", "sender", "receiver"])
def test_units_are_moved_if_both_agents_move_them(older: str) -> None:
    """Blocks of 4 and of 16 tokens. An older agent's greeting does not say it, and it ignores what ours says."""
    sender, receiver = (each[0].engine for each in (World().senders, World().receivers))
    asked = structs.replace(hello(receiver), moves_units=older != "receiver")
    taken = answer(asked, sender)
    assert isinstance(taken, Session)
    met = accept(structs.replace(welcome(taken, sender), moves_units=older != "sender"), receiver)
    assert isinstance(met, Session)
    takes = common(sender.pool, receiver.pool)
    units = [each.planner.plan(takes, 0, 32, 1024).pairs[0].unit_tokens for each in (taken, met)]
    assert units == [1 if older == "receiver" else 4, 1 if older == "sender" else 4]
