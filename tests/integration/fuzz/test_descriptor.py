"""NIXL and UCX believe every descriptor, a peer's or a stranger's: these tests show the known weaknesses.

docs/threat-model.md says what follows for those who run agents.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testing.proc import listening
from tests.integration.transport.test_fabric_nixl import Remote

ROOT = Path(__file__).parents[3]
CONNECT = """
import sys
from kvbridge.errors import FabricError
from kvbridge.transport.fabric_nixl import NixlFabric
fabric = NixlFabric("us")
try:
    fabric.connect("them", bytes.fromhex(sys.stdin.read()))
except FabricError as error:
    print(error.code)
else:
    print("connected")
fabric.close()
"""


def connected(descriptor: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a process that is given this descriptor."""
    command = [sys.executable, "-c", CONNECT]
    return subprocess.run(command, input=descriptor, capture_output=True, text=True, cwd=ROOT)


def test_a_descriptor_as_the_peer_made_it_connects() -> None:
    with Remote("them") as peer:
        assert connected(peer.descriptor).stdout == "connected\n"


@pytest.mark.xfail(strict=True, reason="UCX (of nixl 1.5.1) asserts the version of an address and aborts")
def test_a_descriptor_with_an_address_of_an_unknown_version_is_refused() -> None:
    with Remote("them") as peer:
        changed = bytearray.fromhex(peer.descriptor)
        at = changed.index(b"UCX|c") + len(b"UCX|c") + 8  # behind the blob's length
        changed[at] |= 0x0F
        told = connected(changed.hex())
        assert told.returncode == 0 and told.stdout == "descriptor_malformed\n", told


@pytest.mark.xfail(strict=True, reason="UCX (of nixl 1.5.1) copies to whatever address a message over TCP names")
def test_a_peer_whose_descriptor_was_changed_writes_no_more_than_was_registered() -> None:
    """The bounds of what is registered are looked at by who writes, not by whose memory it is."""
    by_tcp = {"UCX_TLS": "tcp"}
    with Remote("them", environment=by_tcp) as them, Remote("us", environment=by_tcp) as us:
        page = them.ask("unregistered")
        told, registered = bytes.fromhex(them.descriptor), struct.pack("<Q", them.address)
        assert told.count(registered) == 1
        us.ask("connect", incarnation="them", descriptor=told.replace(registered, struct.pack("<Q", page)).hex())
        us.ask("fill", offset=0, size=16, byte=0x5A)
        us.ask("write", incarnation="them", offset=0, remote=page, size=16, notice="n", deadline_s=60)
        us.ask("watch", for_s=60.0, until="wrote")
        assert them.ask("read_unregistered") == bytes(16).hex()


@pytest.mark.xfail(strict=True, reason="UCX (of nixl 1.5.1) asks nobody who connects to its port who that is")
def test_a_stranger_at_the_port_of_the_data_ends_nobody() -> None:
    greeting, put = struct.pack("<Q", 0xCAFEBABE12345678), 33  # uct/tcp/tcp.h: UCT_TCP_MAGIC_NUMBER, a write's request
    with Remote("them") as them, socket.create_connection(port_of(them.pid), 5) as stranger:
        stranger.sendall(greeting + struct.pack("<BI", put, 20) + struct.pack("<QQI", 1, 64, 1) + bytes(64))
        end, maps = time.monotonic() + 60.0, Path(f"/proc/{them.pid}/maps")
        while time.monotonic() < end:
            assert maps.read_text(), "it died"  # a zombie maps nothing
            time.sleep(0.05)


def port_of(pid: int) -> tuple[str, int]:
    """The one that it listens on."""
    (place,) = listening(pid)
    return "127.0.0.1", int(place.rpartition(":")[2])
