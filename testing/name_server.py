"""A name server of one name, of which a test says the addresses, as a headless Service has them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from testing.nursery import Place

PORT = 53
NO_SUCH_NAME, ANSWERED = 0x8403, 0x8400
TYPE_A = 1


class NameServer:
    """Answers with `addresses`; without any, that there is no such name. `asked` counts its questions."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.asked = name, 0
        self.addresses: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, PORT))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            question, client = self._socket.recvfrom(512)
            if not question:
                return
            self.asked += 1
            self._socket.sendto(_answer(question, self.name, self.addresses), client)

    def close(self) -> None:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as other:
            other.sendto(b"", self._socket.getsockname())
        self._thread.join(10)
        self._socket.close()


def _answer(question: bytes, name: str, addresses: Sequence[str]) -> bytes:
    end = question.index(b"\0", 12) + 5  # behind the name: its type and class
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    is_ours = question[12:end] == labels + b"\0" + struct.pack("!HH", TYPE_A, 1)
    found = addresses if is_ours else []
    head = question[:2] + struct.pack("!HHHHH", ANSWERED if found else NO_SUCH_NAME, 1, len(found), 0, 0)
    rows = [struct.pack("!HHHIH", 0xC00C, TYPE_A, 1, 0, 4) + socket.inet_aton(address) for address in found]
    return head + question[12:end] + b"".join(rows)


@contextlib.contextmanager
def name_server(folder: Path, name: str) -> Iterator[tuple[NameServer, Place]]:
    """The server, and where processes ask it. Its address is of this process alone. Needs root."""
    pid = os.getpid()
    address = f"127.53.{pid >> 8 & 255}.{pid & 255 or 1}"
    (resolver := folder / "resolv.conf").write_text(f"nameserver {address}\noptions timeout:1 attempts:5\n")
    server = NameServer(name, address)
    try:
        yield server, Place(mounts=((str(resolver), "/etc/resolv.conf", ""),))
    finally:
        server.close()
