"""An agent and its engine on each of two hosts: what one offers, the other wants across the path between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvbridge.transport.keys import write_pair
from testing.engine import Job
from testing.hosts import DEVICE, Host, NetworkPath, two_hosts
from testing.proc import Stopwatch
from tests.system.faults.processes import Agent, Engine

PORT = 7700


class HostAgent(Agent):
    """`kvbridge agent` on a host, which serves the other host and may dial it."""

    def __init__(self, host: Host, **options: str | bool) -> None:
        told: dict[str, str | bool] = {"name": host.name, "listen": f"tcp://{host.address}:{PORT}", "device": "cpu"}
        told |= {"net_devices": DEVICE, "dial": f"10.231.77.0/24:{PORT}", **options}
        super().__init__(host.folder, "agent", told, place=host.inside)


class HostEngine(Engine):
    """An engine on a host, beside its agent."""

    def __init__(self, host: Host, role: str, socket: str, **job: Any) -> None:
        told = Job(role=role, socket=socket, name=f"kvbridge-{role}", **job)
        super().__init__(told, host.folder / "engine.log", place=host.inside)

    def hear(self, seconds: float = 0.0) -> bool:
        is_more = super().hear(seconds)
        wrong = [each for each in self.said if each["event"] == "wrong"]
        assert not wrong, f"{self.log}: {wrong[:3]}"
        return is_more


class HostPair:
    """A sender on the first host and a receiver on the second. Both agents have the same key."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        hosts: tuple[Host, Host],
        path: NetworkPath,
        options: Mapping[str, str | bool],
        **job: Any,
    ) -> None:
        self.path = path
        self._stack, self._hosts, self._job = stack, hosts, job
        self._options: dict[str, str | bool] = {**options, "key": str(folder / "key")}
        write_pair(folder / "key")
        self.agents = [HostAgent(host, **self._options) for host in hosts]
        for agent in self.agents:
            stack.callback(agent.end)
        self.at_start = [agent.serving() for agent in self.agents]
        self.sender, self.receiver = (
            HostEngine(host, role, agent.socket, **job)
            for host, role, agent in zip(hosts, ("sender", "receiver"), self.agents, strict=True)
        )
        for engine in (self.sender, self.receiver):
            stack.callback(engine.kill)
        for engine in (self.sender, self.receiver):
            engine.wait_for("attached")
        self._count = 0

    def begin(self) -> None:
        """Offer one more prompt on one side, and want it on the other."""
        self.offer(self.want())

    def replace_sender(self) -> None:
        """Its agent and engine are killed at once, and others come that share no file with them, as in a new pod."""
        host = self._hosts[0]
        self.agents[0].kill()
        self.sender.kill()
        (host.folder / "new").mkdir()
        self.agents[0] = HostAgent(host, **self._options, socket=str(host.folder / "new" / "agent.sock"))
        self._stack.callback(self.agents[0].end)
        self.agents[0].wait_serving()
        self.sender = HostEngine(host, "sender", self.agents[0].socket, **self._job)
        self._stack.callback(self.sender.kill)
        self.sender.wait_for("attached")

    def audit(self) -> None:
        """Whether both engines' blocks are right."""
        for engine in (self.sender, self.receiver):
            engine.tell("audit")
            engine.wait_for("audited")
            engine.hear()

    def want(self) -> int:
        """Want one more prompt. Returns its number."""
        self._count += 1
        self.receiver.tell("run", first=self._count, count=1, sender=self.agents[0].address)
        return self._count

    def offer(self, number: int) -> None:
        self.sender.tell("run", first=number, count=1)

    def request(self) -> dict[str, Any]:
        """How a want ended, begun now with none before it."""
        self.begin()
        self.sender.wait_for("ended")
        return self.receiver.wait_for("ended")

    def seconds_to_success(self, most_s: float) -> float:
        """How long until a want ends well that was begun now or later, one every so often. Less what one of our threads
        waited for a processor."""
        before, watch = self._count, Stopwatch()
        next_at = time.monotonic()
        while (seconds := watch.whole_s() - watch.slowest_thread_waited_s()) < most_s:
            if time.monotonic() >= next_at:
                next_at += 0.25
                self.begin()
            ended = [each for each in self._heard() if each["event"] == "ended" and each["rendezvous"] > before]
            if not all(each["code"] for each in ended):
                return seconds
        raise AssertionError(f"nothing ended well in {most_s} s:\n{self.agents[0].tail()}\n{self.agents[1].tail()}")

    def keep_on(self, seconds: float, every_s: float = 0.25) -> None:
        """Begin a want every so often, however they end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.begin()
            next_at = time.monotonic() + every_s
            while time.monotonic() < next_at:
                self._heard()

    def _heard(self) -> list[dict[str, Any]]:
        """What the receiver has said since it was last asked."""
        self.sender.hear()
        self.receiver.hear(0.02)
        heard, self.receiver.said = self.receiver.said, []
        self.sender.said.clear()
        return heard


@contextmanager
def host_pair(
    folder: Path, options: Mapping[str, str | bool] | None = None, is_one_machine: bool = False, **job: Any
) -> Iterator[HostPair]:
    """Both agents have these options besides the usual ones."""
    with ExitStack() as stack:
        first, second, path = stack.enter_context(two_hosts(folder, is_one_machine))
        yield HostPair(stack, folder, (first, second), path, options or {}, **job)
