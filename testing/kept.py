"""Real engines that a test module keeps, each rank beside a real agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import pytest

from demo.model import prompt
from testing.agents import AgentProcess, agent


class Engine(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_ready(self) -> None: ...
    def kill(self) -> None: ...


E = TypeVar("E", bound=Engine)
K = TypeVar("K")
T = TypeVar("T")
SYSTEM, USER = 1000, 40  # tokens
TRIES = 200  # until word of what is kept came in time


def kept(make: Callable[..., K], **options: Any) -> Callable[..., Iterator[K]]:
    """A fixture of a module: what `make` makes, with these options."""

    @pytest.fixture(scope="module")
    def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[K]:
        with ExitStack() as stack:
            yield make(tmp_path_factory.mktemp("fleet"), stack, **options)

    return fleet


class Kept(Generic[E]):
    """Engines by name, started when first asked for; the one that was longest not asked for makes room."""

    agent_options: Mapping[str, Any] = {
        **{"slot_bytes": 1 << 20, "receive_slots": 16, "log_level": "debug"},
        "connect_s": 30,  # the ranks of an idle engine may leave other processes no processor for seconds
    }

    def __init__(self, folder: Path, stack: ExitStack, most: int, routes: str | None = None) -> None:
        self.folder = folder
        self.agents: dict[str, list[AgentProcess]] = {}
        self._stack = stack
        self._most = most  # engines at a time
        self._routes = routes  # None: the agents' own choice
        self._up: dict[str, E] = {}

    def _begin(self, name: str) -> E:
        """Start it, and its agents if it has any and they do not run."""
        raise NotImplementedError

    def _ranks(self, name: str) -> int:
        raise NotImplementedError

    def start(self, *names: str) -> None:
        """Have these engines ready; their start-ups overlap."""
        for name in names:
            if name in self._up:
                self._up[name] = self._up.pop(name)  # the last one to go
        new = [name for name in dict.fromkeys(names) if name not in self._up]
        for name in list(self._up)[: max(0, len(self._up) + len(new) - self._most)]:
            if name not in names:
                self._up.pop(name).kill()
                for running in self.agents.pop(name, []):
                    running.stop()
        for name in new:
            self._up[name] = self._begin(name)
        for name in new:
            self._up[name].wait_ready()

    def __getitem__(self, name: str) -> E:
        self.start(name)
        return self._up[name]

    def kill(self, name: str) -> None:
        """The engine and its workers, by SIGKILL; another one is started beside the same agents when asked for."""
        self._up.pop(name).kill()

    def start_agents(self, name: str) -> None:
        """One agent for each rank, on the address its predecessor had, if there was one."""
        before = self.agents.get(name, [])
        options = {"routes": self._routes, **self.agent_options}
        addresses = [old.listen for old in before] or ["tcp://127.0.0.1:0"] * self._ranks(name)
        self.agents[name] = [
            self._stack.enter_context(agent(self.folder, f"{name}-{rank}", listen=address, **options))
            for rank, address in enumerate(addresses)
        ]
        for running in self.agents[name]:
            running.listen = running.address

    def logs(self, lines: int = 40) -> list[tuple[str, str]]:
        """The end of each agent's and each engine's log."""
        paths = sorted(self.folder.glob("*.log"))
        return [(p.name, "\n".join(p.read_text(errors="replace").splitlines()[-lines:])) for p in paths]

    def moved_bytes(self, name: str) -> float:
        """How much KV this engine has been brought so far."""
        counters = [running.status.counters for running in self.agents[name]]
        return sum(each.get("kvbridge_wire_bytes_total{role=receiver}", 0.0) for each in counters)


class AllMeet(Kept[E]):
    """Beside a fleet's own class, before it: the agents of all its engines `meet` each other."""

    def __init__(self, folder: Path, stack: ExitStack, **more: Any) -> None:
        self._listed = folder / "agents"
        self._listed.touch()
        self.agent_options = {**Kept.agent_options, "meet": f"file://{self._listed}"}
        self._seeds = count(100)
        super().__init__(folder, stack, **more)

    def new(self, tokens: int) -> list[int]:
        """A prompt that no engine has seen."""
        return prompt(tokens, seed=next(self._seeds))

    def users(self, count: int) -> list[list[int]]:
        """Prompts with one new system prompt."""
        system = self.new(SYSTEM)
        return [system + self.new(USER) for _ in range(count)]

    def search(self, tried: Callable[[list[int], list[int]], T | None]) -> T:
        """What is found once the second of two new users' prompts fetches what the first has brought."""
        for _ in range(TRIES):
            if (found := tried(*self.users(2))) is not None:
                return found
        raise AssertionError("nothing was ever fetched of what another engine has")

    def start_agents(self, name: str) -> None:
        super().start_agents(name)
        addresses = [each.address for agents in self.agents.values() for each in agents]
        self._listed.write_text("".join(f"{address}\n" for address in addresses))
