"""A fabric descriptor is a peer's own words and goes to NIXL and UCX as it is: a known weakness, kept in sight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..transport.test_fabric_nixl import Remote

ROOT = Path(__file__).parents[2]
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
    return subprocess.run(command, input=descriptor, capture_output=True, text=True, timeout=60, cwd=ROOT)


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
