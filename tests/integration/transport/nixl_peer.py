"""One NIXL fabric in a process of its own, with JSON commands on stdin. `python nixl_peer.py INCARNATION BYTES`.

During a `watch` it polls every 200 us, like an agent that expects something.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import time
import zlib
from typing import Any

from kvbridge.errors import FabricError
from kvbridge.transport.fabric import Noticed, WriteFailed, WriteLate, Wrote
from kvbridge.transport.fabric_nixl import NixlFabric

POLL_S = 0.0002


class Peer:
    def __init__(self, incarnation: str, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.fabric = NixlFabric(incarnation, net_devices="lo")
        self.fabric.register(self.address, size)

    def describe(self) -> dict[str, Any]:
        return {"descriptor": self.fabric.descriptor().hex(), "address": self.address}

    def unregistered(self) -> int:
        """The address of a page that nobody was told of."""
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._page))

    def read_unregistered(self) -> str:
        return self._page[:16].hex()

    def connect(self, incarnation: str, descriptor: str) -> None:
        self.fabric.connect(incarnation, bytes.fromhex(descriptor))

    def disconnect(self, incarnation: str) -> None:
        self.fabric.disconnect(incarnation)

    def distrust(self, incarnation: str) -> None:
        self.fabric.distrust(incarnation)

    def writers(self) -> int:
        """How many NIXL agents write."""
        return len(self.fabric._writers)

    def succeed(self, name: str) -> str:
        """Become another fabric for peers. Returns its descriptor."""
        descriptor, become = self.fabric.successor(name)
        become()
        return descriptor.hex()

    def writers_made(self) -> int:
        return self.fabric._writers_made

    def age(self, by_s: float) -> None:
        """As if so much time had passed since the last writer was made."""
        self.fabric._writer_at -= by_s

    def register_more(self, size: int) -> int:
        """The offset of more memory to write from."""
        self._more = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._more))
        self.fabric.register(address, size, is_target=False)
        return address - self.address

    def unregister(self, offset: int) -> bool:
        return self.fabric.unregister(self.address + offset)

    def fill(self, offset: int, size: int, byte: int) -> int:
        self.memory[offset : offset + size] = bytes([byte]) * size
        return self.sum(offset, size)

    def sum(self, offset: int, size: int) -> int:
        return zlib.crc32(memoryview(self.memory)[offset : offset + size])

    def write(self, incarnation: str, offset: int, remote: int, size: int, notice: str, deadline_s: float) -> int:
        deadline = time.monotonic() + deadline_s
        return self.fabric.write(incarnation, self.address + offset, remote, size, notice.encode(), deadline)

    def watch(self, for_s: float, until: str = "") -> list[list[Any]]:
        """The events of the next `for_s` seconds, or up to the first of kind `until`, each with its time."""
        seen: list[list[Any]] = []
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            for event in self.fabric.poll(time.monotonic()):
                seen.append([time.monotonic(), *_told(event)])
            if until and any(event[1] == until for event in seen):
                break
            time.sleep(POLL_S)
        return seen

    def close(self) -> float:
        begin = time.monotonic()
        self.fabric.close()
        return time.monotonic() - begin


def _told(event: object) -> tuple[str, Any, str]:
    match event:
        case Wrote(id=number):
            return "wrote", number, ""
        case WriteFailed(id=number, reason=reason):
            return "failed", number, reason
        case WriteLate(id=number):
            return "late", number, ""
        case Noticed(payload=payload):
            return "noticed", payload.decode(), ""
    raise AssertionError(event)


def main() -> None:
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps(peer.describe()), flush=True)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            answer: Any = {"ok": getattr(peer, verb)(**arguments)}
        except FabricError as error:
            answer = {"error": error.code, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
