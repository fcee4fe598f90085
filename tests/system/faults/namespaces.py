"""Two network namespaces joined by a cable that can be cut: packets are dropped, and nobody is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

RULES = """
table inet kvbridge_faults {
  chain input { type filter hook input priority 0; policy drop; }
  chain output { type filter hook output priority 0; policy drop; }
}
"""


def why_not() -> str:
    """Why this machine cannot have them; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)}: install iproute2 and nftables"
    name = f"kvb-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    ruled = subprocess.run(_in(name, "nft", "-f", "-"), input=RULES, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no packet filter in a namespace: {ruled.stderr.strip()[:200]}" if ruled.returncode else ""


@dataclass(frozen=True)
class Cable:
    """`names` are the namespaces, each with one device of that name and one address."""

    names: tuple[str, str]
    device: str = "kvb0"
    addresses: tuple[str, str] = ("10.231.77.1", "10.231.77.2")

    def cut(self) -> None:
        """From now on every packet at the second end is dropped, both ways."""
        subprocess.run(_in(self.names[1], "nft", "-f", "-"), input=RULES, text=True, check=True, timeout=10)

    def heal(self) -> None:
        subprocess.run(_in(self.names[1], "nft", "flush", "ruleset"), check=True, timeout=10)


@contextmanager
def cable() -> Iterator[Cable]:
    made = Cable((f"kvb-{os.getpid()}-a", f"kvb-{os.getpid()}-b"))
    first, second = made.names
    try:
        for name in made.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", made.device, "type", "veth", "peer", made.device, "netns", second)
        for name, address in zip(made.names, made.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", made.device)
            _ip("-n", name, "link", "set", made.device, "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _in(name: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", name, *command]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
