"""The agents and engines of a GPU bench: three of each for a route, and pairs of engines attached to them.

The sender has two ranks, for TP 2 -> 1. Both are on the sender's GPU. The second one is also the receiver of transfers
within that GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from bench.gpu.memory import GRAIN_TOKENS, windows
from bench.gpu.place import Place
from bench.gpu.processes import BenchAgent, Child, ask_all, end
from bench.scenario import Problem
from kvbridge.loopback.pools import Shape

SENDER_SEED, RECEIVER_SEED = 1, 2
MISMATCHED = "NHD -> HND, block 16 -> 64"
# What the two agents' journals say of a want by pull that followed its offer.
STEPS = (
    "receiver wanted", "receiver claimed", "sender claimed", "sender readable", "receiver readable",
    "receiver reading", "receiver read", "receiver done",
)  # fmt: skip
STEPS_OF = 100  # wants; an agent's journal keeps some hundred


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines that may disagree."""

    name: str
    sender: Shape
    receiver: Shape

    @property
    def wire_token_bytes(self) -> int:
        """Bytes of a token on the wire: those of the narrower rows."""
        return min(self.sender.token_bytes, self.receiver.token_bytes)


def pairs(shape: Shape) -> dict[str, Pair]:
    """The pairs by name. The sender always has vLLM's defaults: NHD, block 16."""

    def changed(**changes: Any) -> Shape:
        return msgspec.structs.replace(shape, **changes)

    two = changed(tp_size=2)
    receivers = {
        "equal": (shape, shape),
        MISMATCHED: (shape, changed(axes="LPBHTE", block_tokens=64)),
        "NHD -> HND": (shape, changed(axes="LPBHTE")),
        "block 16 -> 64": (shape, changed(block_tokens=64)),
        "TP 2 -> 1": (two, shape),
        "bf16 -> fp8": (shape, changed(codec="fp8_e4m3", scale=0.03125)),
    }
    return {name: Pair(name, sender, receiver) for name, (sender, receiver) in receivers.items()}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The processes of one route: the sender's two ranks, then the receiver. The agents allow only this route."""

    route: str
    agents: tuple[BenchAgent, BenchAgent, BenchAgent]
    engines: tuple[Child, Child, Child]

    @property
    def is_alive(self) -> bool:
        """Whether all processes run and the agents have served."""
        has_served = all(agent.address for agent in self.agents)
        return has_served and all(each.process.poll() is None for each in (*self.agents, *self.engines))

    def wait_serving(self) -> None:
        """Wait until the agents serve. Raises Problem."""
        for agent in self.agents:
            if not agent.address:
                agent.wait_serving()


@contextmanager
def fleet(place: Place, route: str, env: Mapping[str, str], suffix: str = "") -> Iterator[Fleet]:
    """Start all six processes at once, and end them together."""
    roles = (("sender-0", place.sender), ("sender-1", place.sender), ("receiver", place.receiver))
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(TemporaryDirectory(prefix="kvbridge-")))  # their paths must be short
        agents: list[BenchAgent] = []
        engines: list[Child] = []
        stack.callback(lambda: end([agent.process for agent in agents]))
        stack.callback(lambda: end([engine.process for engine in engines]))
        for role, device in roles:
            name = f"{route}-{role}{suffix}"
            options = {**place.agent_options, "device": device, "routes": route}
            agents.append(BenchAgent(sockets, place.bench.logs, f"agent-{name}", options, env))
            engines.append(Child("bench.gpu.engine", place.bench.logs / f"engine-{name}.log", env))
        yield Fleet(route, (agents[0], agents[1], agents[2]), (engines[0], engines[1], engines[2]))


class Joined:
    """A pair of engines attached to a fleet's agents, with room for `tokens` tokens on either side."""

    def __init__(self, place: Place, fleet: Fleet, pair: Pair, tokens: int, *, is_same_gpu: bool = False) -> None:
        ranks = pair.sender.tp_size
        assert not (is_same_gpu and ranks > 1), "the second sender agent is the receiver then"
        self.pair, self.route = pair, fleet.route
        self.tokens = -(-tokens // GRAIN_TOKENS) * GRAIN_TOKENS
        self._senders, self._receiver = fleet.engines[:ranks], fleet.engines[2]
        self._sender_agents = fleet.agents[:ranks]
        self._receiver_agent = fleet.agents[1] if is_same_gpu else fleet.agents[2]
        self._sender_device, self._receiver_device = place.sender, place.sender if is_same_gpu else place.receiver
        self._rooms = 0
        self._names: list[str] = []

    @property
    def _is_equal(self) -> bool:
        return self.pair.sender == self.pair.receiver

    @property
    def _all(self) -> tuple[Child, ...]:
        return (*self._senders, self._receiver)

    def __enter__(self) -> Joined:
        for agent in (*self._sender_agents, self._receiver_agent):
            agent.check_alive()
        self._make_pools()
        addresses = [agent.address for agent in self._sender_agents]
        attached = [{"socket": agent.socket, "ranks": addresses} for agent in self._sender_agents]
        attached.append({"socket": self._receiver_agent.socket, "ranks": [self._receiver_agent.address]})
        try:
            ask_all(self._all, "attach", attached)
        except Problem:
            ask_all(self._all, "drop", [{}] * len(self._all))
            raise
        return self

    def _make_pools(self) -> None:
        sender, receiver = msgspec.to_builtins(self.pair.sender), msgspec.to_builtins(self.pair.receiver)
        common = {"shape": sender, "tokens": self.tokens, "device": self._sender_device, "seed": SENDER_SEED}
        asked = [common | {"rank": rank, "fill": self.pair.sender.codec} for rank in range(len(self._senders))]
        asked.append(
            {
                "shape": receiver,
                "tokens": self.tokens,
                "device": self._receiver_device,
                "seed": RECEIVER_SEED,
                "rank": 0,
            }
        )
        ask_all(self._all, "pool", asked)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            ask_all(self._all, "detach", [{}] * len(self._all))
        ask_all(self._all, "drop", [{}] * len(self._all))
        if kind is not None:
            time.sleep(1.0)  # until the agents have noticed and are free again

    def carry(self, tokens: int, requests: int = 1, repeats: int = 1, gap_s: float = 0.0) -> dict[str, Any]:
        """Carry `requests` requests at once, `repeats` times, each of `tokens` tokens from and to other memory."""
        assert -(-tokens // GRAIN_TOKENS) * GRAIN_TOKENS * requests <= self.tokens, "requests at once would overlap"
        count = repeats * requests
        names = [f"{time.monotonic_ns():x}-{number}" for number in range(count)]
        rooms = dict(zip(names, windows(count, tokens, self.tokens, self._rooms), strict=True))
        self._rooms += count
        ask_all(self._senders, "offer", [{"rooms": rooms}] * len(self._senders))
        batches = [{name: rooms[name] for name in names[at : at + requests]} for at in range(0, count, requests)]
        self._names = names
        told = self._receiver.ask("want", sender=self._sender_agents[0].address, batches=batches, gap_s=gap_s)
        ask_all(self._senders, "released", [{"rooms": names}] * len(self._senders))
        return told

    def steps_us(self) -> dict[str, float]:
        """Where the time of the last wants went, as both agents' journals say: medians in microseconds, in order."""
        names = self._names[-STEPS_OF:]
        journals = {"sender": self._sender_agents[0].trace(names), "receiver": self._receiver_agent.trace(names)}
        at: dict[str, dict[str, float]] = {name: {} for name in names}
        for side, entries in journals.items():
            rendezvous = {entry.transfer: entry.rendezvous for entry in entries if entry.transfer and entry.rendezvous}
            for entry in entries:
                name = entry.rendezvous or rendezvous.get(entry.transfer, "") or entry.request
                if name in at:
                    at[name].setdefault(f"{side} {entry.what}", entry.at_s)
        pairs = list(itertools.pairwise(STEPS))
        whole = [each for each in at.values() if all(step in each for step in STEPS)]
        if not whole:
            return {}
        return {
            f"{before} -> {after}": statistics.median(each[after] - each[before] for each in whole) * 1e6
            for before, after in pairs
        }

    def poison(self) -> None:
        self._receiver.ask("poison")

    def verify(self) -> None:
        """Raises Problem if an element wanted since the poison is wrong, or if any other was touched."""
        wrong = self._receiver.ask("verify", codec=self.pair.sender.codec, is_equal=self._is_equal)["wrong"]
        if wrong:
            raise Problem(f"WRONG DATA: {wrong}")

    def prove_verify(self) -> None:
        """Raises Problem if `verify` would not see one wrong bit."""
        seen = self._receiver.ask("prove", codec=self.pair.sender.codec, is_equal=self._is_equal)
        if not all(seen.values()):
            raise Problem(f"the check sees no flipped bit: {seen}")

    def check_route(self) -> list[str]:
        """The routes of the receiver's sessions, as its agent shows them. Problem if one is not the forced one."""
        addresses = {agent.address for agent in self._sender_agents}
        said = [peer.route for peer in self._receiver_agent.status().peers if peer.address in addresses]
        if len(said) < len(addresses) or not all(route.startswith(self.route) for route in said):
            raise Problem(f"route: forced {self.route}, the receiver's agent says {said}")
        return said
