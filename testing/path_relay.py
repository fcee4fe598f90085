"""Carries packets between the network devices of two namespaces: `python path_relay.py PID PID`.

A kernel may lack netem, so packets are delayed and dropped here. Each line of JSON on stdin says how from then on:
seconds one way, the share that is lost, and whether all are. Each is answered with a line. Ends with its stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from typing import IO

DEVICE = b"kvb0"
IFF_TUN, IFF_NO_PI, TUNSETIFF = 1, 0x1000, 0x400454CA  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 1 << 16
AT_ONCE = 64  # packets of one direction before the other has its turn


def device_in(pid: int) -> int:
    """A new TUN device in the network namespace of that process."""
    with open("/proc/self/ns/net") as before:
        enter_network(pid)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE, IFF_TUN | IFF_NO_PI))
        _enter(before)
    return device


def enter_network(pid: int) -> None:
    """This thread goes to the network namespace of that process."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        _enter(namespace)


def _enter(namespace: IO[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


class Relay:
    def __init__(self, devices: list[int]) -> None:
        self.sinks = dict(zip(devices, reversed(devices), strict=True))
        self.waiting: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
        self.chance = random.Random(0)
        self.delay_s, self.loss, self.is_cut = 0.0, 0.0, False

    def serve(self) -> None:
        while True:
            next_at = min((queue[0][0] for queue in self.waiting.values() if queue), default=None)
            wait_s = None if next_at is None else max(0.0, next_at - time.monotonic())
            ready, _, _ = select.select([*self.sinks, sys.stdin], [], [], wait_s)
            for device in self.sinks:
                if device in ready:
                    self.take(device)
                self.deliver(device)
            if sys.stdin in ready:
                if not (line := sys.stdin.readline()):
                    return
                told = json.loads(line)
                self.delay_s, self.loss, self.is_cut = told["delay_s"], told["loss"], told["is_cut"]
                print("so", flush=True)

    def take(self, device: int) -> None:
        for _ in range(AT_ONCE):
            try:
                packet = os.read(device, PACKET_BYTES)
            except OSError:  # no more, or the device is down
                return
            if not self.is_cut and self.chance.random() >= self.loss:
                self.waiting[device].append((time.monotonic() + self.delay_s, packet))

    def deliver(self, device: int) -> None:
        queue, now = self.waiting[device], time.monotonic()
        while queue and queue[0][0] <= now:
            with contextlib.suppress(OSError):  # the device at the other end is down
                os.write(self.sinks[device], queue.popleft()[1])


if __name__ == "__main__":
    relay = Relay([device_in(int(pid)) for pid in sys.argv[1:]])
    print("so", flush=True)
    relay.serve()
