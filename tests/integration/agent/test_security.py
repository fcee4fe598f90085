"""Real agents with and without keys: who is served, who is dialled, and what never leaves the process."""

from __future__ import annotations

import contextlib
import fcntl
import re
import signal
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Failed

from demo.processes import free_port
from kvbridge.transport.keys import write_pair
from testing.agents import agent, attached
from testing.oracle import Shape
from testing.pairs import Benches
from testing.proc import listening
from testing.waiting import wait_for

pytestmark = pytest.mark.proves("G23")

SIOCGIFADDR = 0x8915
WATCHED = "tests.integration.agent.watched_agent"
NUMBERS = {10: re.compile(r"\b[0-9]{9,}"), 16: re.compile(r"(?:\b|0x)([0-9a-fA-F]{8,})")}  # by base


def keygen(folder: Path, name: str) -> tuple[Path, str]:
    """A new key: its file, and the line for the others' lists."""
    path = folder / f"{name}.key"
    return path, f"{name} {write_pair(path)}\n"


def write_peers(folder: Path, *lines: str) -> Path:
    path = folder / "peers"
    path.write_text("".join(lines))
    path.chmod(0o600)
    return path


def start_fails(folder: Path, **options: Any) -> str:
    """What an agent says that must not start."""
    with pytest.raises(AssertionError, match="does not serve") as caught, agent(folder, "refused", **options):
        pass
    return str(caught.value)


# Keys:


def test_one_line_makes_a_fleet_that_nobody_else_can_speak_to(tmp_path: Path, bench_of: Benches) -> None:
    key, line = keygen(tmp_path, "fleet")
    public = line.split()[1]
    pair = bench_of(key=key)
    pair.works("r")
    assert pair.sender.agent.address.endswith(f"#{public}")
    (seen,) = pair.sender.agent.status.peers
    assert seen.key == "fleet" and "curve" in pair.sender.agent.status.security
    assert f"key={public}" in pair.sender.agent.text()
    with agent(tmp_path, "x", connect_s=4) as bare, attached(bare, Shape("hnd")) as stranger:
        stranger.want("steal", pair.sender.agent.address.partition("#")[0], [1], range(16))
        failed = stranger.answer("steal")
        assert isinstance(failed, Failed) and failed.code in ("peer_unreachable", "peer_disconnected"), failed
    pair.works("again")


def test_a_list_lets_in_by_name_and_a_reload_cuts_off(tmp_path: Path, bench_of: Benches) -> None:
    (prefill, prefill_line), (decode, decode_line) = keygen(tmp_path, "prefill"), keygen(tmp_path, "decode")
    peers = write_peers(tmp_path, prefill_line, decode_line)
    pair = bench_of(peers=peers, p={"key": prefill}, d={"key": decode, "connect_s": 4})
    pair.works("r")
    assert [peer.key for peer in pair.sender.agent.status.peers] == ["decode"]
    assert [peer.key for peer in pair.receiver.agent.status.peers] == ["prefill"]

    peers.write_text(prefill_line)
    pair.sender.agent.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "peers read again" in pair.sender.agent.text() and not pair.sender.agent.status.peers)
    wait_for(lambda: "not on our list" in pair.receiver.agent.text())
    failed = pair.carry("revoked")
    assert isinstance(failed, Failed) and failed.code == "peer_unreachable", (
        failed,
        pair.receiver.agent.text(),
        pair.sender.agent.text(),
    )

    peers.write_text("nonsense\n")  # is refused, and changes nothing
    pair.sender.agent.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the old list stays" in pair.sender.agent.text())
    assert "1 keys allowed" in pair.sender.agent.status.security

    peers.write_text(prefill_line + decode_line)
    pair.sender.agent.process.send_signal(signal.SIGHUP)
    wait_for(lambda: pair.sender.agent.text().count("peers read again") == 2)
    pair.works("restored")


def test_another_key_in_the_file_waits_for_a_restart_and_costs_no_link(tmp_path: Path, bench_of: Benches) -> None:
    key, line = keygen(tmp_path, "fleet")
    pair = bench_of(key=key)
    pair.works("r")
    keygen(tmp_path, "other")[0].replace(key)
    both = (pair.sender.agent, pair.receiver.agent)
    for running in both:
        running.process.send_signal(signal.SIGHUP)
    wait_for(lambda: all("peers read again" in running.text() for running in both))
    pair.works("after")
    for running in both:
        assert "it counts after a restart" in running.text() and "key_revoked" not in running.text()
        assert f"own key {line.split()[1]}, 1 keys allowed" in running.status.security


def test_a_reload_without_keys_harms_nobody(tmp_path: Path) -> None:
    with agent(tmp_path, "a") as running:
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "peers read again" in running.text())
        assert running.status.state == "serving"


# Addresses:


@pytest.mark.proves("T1")
def test_does_not_start_where_others_could_reach_it_without_a_key(tmp_path: Path) -> None:
    said = start_fails(tmp_path, **WIDE)
    assert "unauthenticated_listen" in said and "kvbridge keygen" in said
    assert "wildcard_metrics" in start_fails(tmp_path, metrics="0.0.0.0:0")


WIDE = {"listen": "tcp://0.0.0.0:0", "allow_wildcard": True, "advertise": "tcp://127.0.0.1:1"}


@pytest.mark.proves("T39")
@pytest.mark.parametrize("wide", [WIDE, {"dial": "127.0.0.0/8:*,10.0.0.0/24:7700"}])
def test_does_not_start_before_it_knows_by_which_network_other_hosts_come(tmp_path: Path, wide: dict[str, Any]) -> None:
    """UCX lets in whoever reaches its port, whatever key the agent has."""
    key, _ = keygen(tmp_path, "fleet")
    for guard in ({"key": key}, {"allow_unauthenticated": True}):
        said = start_fails(tmp_path, **wide, **guard)
        assert "no_net_devices" in said and ("0.0.0.0:0" in said or "10.0.0.0/24:7700" in said)
    with agent(tmp_path, "named", key=key, net_devices="lo", **wide) as running:
        assert [
            place for place in listening(running.process.pid) if not place.startswith(("127.0.0.1:", "0.0.0.0:"))
        ] == []


def test_the_hatch_is_said_aloud(tmp_path: Path) -> None:
    options = WIDE | {"net_devices": "lo"}
    with agent(tmp_path, "a", allow_unauthenticated=True, **options) as running:
        assert "WARNING kvbridge.agent: allow_unauthenticated" in running.text()
        assert "allow_unauthenticated" in running.status.security and "NONE" in running.status.security


@pytest.mark.proves("T4")
def test_a_want_cannot_send_the_agent_where_it_may_not_go(stack: ExitStack, bench_of: Benches) -> None:
    """A request's address is anybody's: not one packet goes to a place that the configuration does not name."""
    bait = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    bait.settimeout(1.0)
    forbidden = f"tcp://127.0.0.1:{bait.getsockname()[1]}"
    port = free_port()
    pair = bench_of(d={"dial": f"127.0.0.0/8:{port}"}, p={"listen": f"tcp://127.0.0.1:{port}"})
    failed = pair.carry("ssrf", forbidden)
    assert isinstance(failed, Failed) and failed.code == "peer_not_allowed", failed
    add = f'add "{forbidden.removeprefix("tcp://")}"'
    assert f"dial: {forbidden} is on loopback, dial is set and no pattern of dial names it; {add}" in failed.reason
    with pytest.raises(TimeoutError):
        bait.accept()
    pair.works("r")


@pytest.mark.proves("T16")
@pytest.mark.parametrize("has_key", [False, True])
def test_a_want_reaches_loopback_only(tmp_path: Path, bench_of: Benches, has_key: bool) -> None:
    """transport/test_trust.py has the other addresses."""
    pair = bench_of(**{"key": keygen(tmp_path, "fleet")[0]} if has_key else {})
    failed = pair.carry("ssrf", address := "tcp://169.254.169.254:80")
    assert isinstance(failed, Failed) and failed.code == "peer_not_allowed" and address in failed.reason
    assert "key" in failed.reason or 'add "169.254.169.254:80"' in failed.reason
    assert "loopback only" in pair.receiver.agent.status.security
    pair.works()


# What leaves the process:


@pytest.mark.proves("T38", "T41")
@pytest.mark.parametrize(("routes", "fabrics"), [("nixl", 2), ("pull", 0)])
def test_carries_without_pickling_and_logs_no_secret(
    tmp_path: Path, bench_of: Benches, monkeypatch: pytest.MonkeyPatch, routes: str, fabrics: int
) -> None:
    written = tmp_path / "secrets"
    monkeypatch.setenv("SECRETS", str(written))
    key, _ = keygen(tmp_path, "fleet")
    pair = bench_of(key=key, log_level="debug", module=WATCHED, routes=routes)
    for number in range(3):
        assert isinstance(pair.carry(f"r{number}"), Done)
    assert isinstance(pair.carry("bad", "tcp://127.0.0.1:1#" + "x" * 40), Failed)
    pair.sender.agent.process.send_signal(signal.SIGHUP)
    status = repr((pair.sender.agent.status, pair.receiver.agent.status))
    found = [line.split() for line in written.read_text().splitlines()]
    tokens = [bytes.fromhex(text) for name, text in found if name == "token" and len(text) == 32]
    descriptors = [bytes.fromhex(text) for name, text in found if name == "descriptor"]
    regions = [struct.unpack(">QQ", bytes.fromhex(text)) for name, text in found if name == "region"]
    assert len(tokens) >= 3 and len(descriptors) >= fabrics and len(regions) >= 2 * fabrics  # there was what to find
    secret = next(line for line in key.read_text().splitlines() if not line.startswith("#"))
    for running in (pair.sender.agent, pair.receiver.agent):
        running.stop()
        said = running.text() + status
        assert "PICKLED" not in said and "may not pickle" not in said
        assert "DEBUG" in said
        assert secret not in said
        assert addresses_in(said, regions) == []
        for each in [*tokens, *descriptors, *(d[20:40] for d in descriptors)]:
            assert each.hex() not in said and repr(each)[2:-1] not in said


def addresses_in(said: str, regions: list[Any]) -> list[str]:
    """The numbers, decimal or hexadecimal, that lie in one of these regions, each its address and size."""
    numbers = {(text, int(text, base)) for base, form in NUMBERS.items() for text in form.findall(said)}
    return sorted(text for text, n in numbers if any(begin <= n < begin + size for begin, size in regions))


@pytest.mark.proves("T41")
def test_what_the_fabric_refuses_is_said_without_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "secrets"
    monkeypatch.setenv("SECRETS", str(written))
    monkeypatch.setenv("OVERLAP", "1")
    said = start_fails(tmp_path, module=WATCHED, routes="nixl")
    lines = [line.split() for line in written.read_text().splitlines()]
    regions = [struct.unpack(">QQ", bytes.fromhex(text)) for name, text in lines if name == "region"]
    assert regions and "region_overlaps" in said and str(regions[0][1]) in said
    assert addresses_in(said, regions) == []


@pytest.mark.proves("T39")
@pytest.mark.parametrize("is_keyed", [False, True])
def test_listens_nowhere_but_where_it_was_told(tmp_path: Path, is_keyed: bool) -> None:
    """NIXL's own listener would be on every interface, and so would UCX's, if it were given no device."""
    metrics = f"127.0.0.1:{free_port()}"
    options = {"key": keygen(tmp_path, "fleet")[0]} if is_keyed else {}
    with agent(tmp_path, "a", metrics=metrics, routes="nixl", **options) as running:
        places = listening(running.process.pid)
        assert running.address.partition("#")[0].removeprefix("tcp://") in places and metrics in places
        assert [place for place in places if not place.startswith("127.0.0.1:")] == []


def test_data_may_go_by_several_devices(tmp_path: Path) -> None:
    """By NIXL's own option the first would be the only one."""
    places: dict[str, str] = {}
    with socket.socket() as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                said = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                places[name] = socket.inet_ntoa(said[20:24])
    with agent(tmp_path, "a", net_devices=",".join(places), routes="nixl") as running:
        data = listening(running.process.pid) - {running.address.removeprefix("tcp://")}
        assert {place.rpartition(":")[0] for place in data} == set(places.values())
