"""The faults of a run, kind by kind, and how each ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .scenario import Fault, FaultKind

if TYPE_CHECKING:
    from .loop import Thread
    from .process import Process
    from .world import World

FAULTS_END_S = 7.0
RESTART_S = 0.05  # the fastest restart; the writes of the process before have landed by then


class Faults:
    """The faults at work.

    `blocked` counts, by pair, the faults that keep messages and writes from one agent to another. `disorder` has the
    faults that single messages suffer. `troubled` says until when an agent or engine suffers a fault, `gone` which
    engines never come back.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.blocked: dict[tuple[str, str], int] = {}
        self.disorder: dict[tuple[str, str], tuple[FaultKind, ...]] = {}
        self.troubled: dict[str, float] = {}
        self.gone: set[str] = set()
        self._stalled: set[Process] = set()
        self._held: set[tuple[str, str]] = set()  # pairs whose writes hang because an agent is stalled

    def happen(self, fault: Fault) -> None:
        if self._world.clock.now >= FAULTS_END_S:
            return
        self._world.outcome.faults.append(fault.kind)
        self._world.say("fault", f"{fault.kind} {' and '.join(fault.who)} for {fault.seconds} s".replace("  ", " "))
        getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))(fault, *fault.who)

    def _until(self, fault: Fault, end: Callable[[], None]) -> None:
        def over() -> None:
            self._world.say("fault", f"{fault.kind} {' and '.join(fault.who)} is over".replace("  ", " "))
            end()

        self._world.clock.at(min(self._world.clock.now + fault.seconds, FAULTS_END_S - 1e-3), over)

    def _kill_agent(self, fault: Fault, name: str) -> None:
        process = self._world.processes[name]
        if process.is_dead:
            return
        self.troubled[name] = FAULTS_END_S
        process.die()
        again = max(self._world.clock.now + fault.seconds, process.died_at + RESTART_S)
        self._world.clock.at(again, lambda: self._world.start(name) if self._world.processes[name].is_dead else None)

    def _stop_agent(self, fault: Fault, name: str) -> None:
        """SIGTERM: the agent drains, ends, and is started again some time later."""
        process = self._world.processes[name]

        def gone() -> None:
            if not process.is_dead:
                process.die()
                self._world.clock.after(RESTART_S, again)

        def again() -> None:
            if self._world.processes[name].is_dead:
                self._world.start(name)

        if not process.is_dead:
            self.troubled[name] = FAULTS_END_S
            process.stop_gently(gone)

    def _freeze_agent(self, fault: Fault, name: str) -> None:
        process = self._world.processes[name]
        self._freeze(fault, process, process.loop, process.thread)

    def _freeze_loop(self, fault: Fault, name: str) -> None:
        process = self._world.processes[name]
        self._freeze(fault, process, process.loop)

    def _freeze_data_plane(self, fault: Fault, name: str) -> None:
        process = self._world.processes[name]
        self._freeze(fault, process, process.thread)

    def _stall_agent(self, fault: Fault, name: str) -> None:
        process = self._world.processes[name]
        if process.is_dead:
            return

        def over() -> None:
            if not process.is_dead:
                self._world.say("fault", f"stall agent {name} is over")
                process.thaw()
            self._world.data.hung -= self._held
            self._held.clear()
            self._world.data.go_on()

        if self._world.scenario.seed & 16:  # as over TCP, whose target must be awake; over RDMA writes land anyway
            self._held |= {(other, name) for other in self._world.processes}
            self._world.data.hung |= self._held

        self._stalled.add(process)
        self.troubled[name] = self._world.clock.now + fault.seconds
        process.freeze(process.loop, process.thread)
        self._world.clock.after(fault.seconds, over)

    def _preempt(self, fault: Fault, name: str) -> None:
        """Freeze the agent in the middle of its next gather, while its engine takes back all that it offers.

        One time in five the engine gives its agent up just before, for a reason of its own. The agent's data plane then
        goes on before its loop can hear of that.
        """
        process = self._world.processes[name]
        engine = next(each for each in self._world.engines.values() if name in each.agents)
        is_given_up = int(fault.seconds * 1e4) % 5 == 2

        def give_up() -> None:
            for rank in engine.ranks:
                rank.give_up()
            engine.preempt()

        def begin() -> None:
            if self._world.clock.now >= FAULTS_END_S or process.is_dead:
                return
            self._freeze(fault, process, process.loop, process.thread)
            if is_given_up:
                engine.later(fault.seconds / 4, give_up)
                self._world.clock.after(fault.seconds / 2, process.thaw_data_plane)
            else:
                engine.later(self._world.uniform(0.0, 0.3), engine.preempt)

        process.on_gather = begin

    def _freeze(self, fault: Fault, process: Process, *threads: Thread) -> None:
        name = process.name
        self.troubled[name] = max(self.troubled.get(name, 0.0), self._world.clock.now + fault.seconds)
        process.freeze(*threads)
        self._until(fault, process.thaw)

    def _kill_engine(self, fault: Fault, name: str) -> None:
        engine = self._world.engines[name]
        if not engine.is_dead:
            engine.die()
            self._until(fault, lambda: engine.start() if engine.is_dead and name not in self.gone else None)

    def _freeze_engine(self, fault: Fault, name: str) -> None:
        loop = self._world.engines[name].loop
        self.troubled[name] = max(self.troubled.get(name, 0.0), self._world.clock.now + fault.seconds)
        loop.freeze()
        self._until(fault, loop.thaw)

    def _lose_engine(self, fault: Fault, name: str) -> None:
        """The engine never comes back. Its agents stay."""
        if not self._world.engines[name].is_dead:
            self._world.engines[name].die()
        self.gone.add(name)

    def _rescale(self, fault: Fault, name: str) -> None:
        for rank in self._world.engines[name].ranks:
            rank.rescale()

    def _detach(self, fault: Fault, name: str) -> None:
        for rank in self._world.engines[name].ranks:
            rank.detach()

    def _hang_up(self, fault: Fault, name: str) -> None:
        for rank in self._world.engines[name].ranks:
            rank.give_up()

    def _cut(self, fault: Fault, one: str, other: str) -> None:
        for link in list(self._world.processes[one].links.open):
            if link.peer is not None and link.peer.links.process.name == other:
                link.cut()

    def _half_open(self, fault: Fault, one: str, other: str) -> None:
        self._block(fault, [(one, other)])

    def _partition(self, fault: Fault, one: str, other: str) -> None:
        self._block(fault, [(one, other), (other, one)])

    def _block(self, fault: Fault, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self.blocked[pair] = self.blocked.get(pair, 0) + 1

        def end() -> None:
            for pair in pairs:
                self.blocked[pair] -= 1
            self._go_on()

        self._until(fault, end)

    def _go_on(self) -> None:
        self._world.data.go_on()
        held_up, self._world.held_up = self._world.held_up, []
        for link in held_up:
            link.go_on()

    def _mistreat(self, fault: Fault, one: str, other: str) -> None:
        self.disorder[one, other] = (*self.disorder.get((one, other), ()), fault.kind)

        def end() -> None:
            self.disorder.pop((one, other), None)

        self._until(fault, end)

    _drop = _duplicate = _reorder = _mistreat

    def _slow_writes(self, fault: Fault, *pair: str) -> None:
        self._world.data.slow[pair[0], pair[1]] = 2.0 * fault.seconds

        def end() -> None:
            self._world.data.slow.pop((pair[0], pair[1]), None)

        self._until(fault, end)

    def _hang_writes(self, fault: Fault, *pair: str) -> None:
        self._world.data.hung.add((pair[0], pair[1]))

        def end() -> None:
            self._world.data.hung.discard((pair[0], pair[1]))
            self._world.data.go_on()

        self._until(fault, end)

    def _fail_writes(self, fault: Fault, *pair: str) -> None:
        self._world.data.failing.add((pair[0], pair[1]))
        self._until(fault, lambda: self._world.data.failing.discard((pair[0], pair[1])))

    def _fail_halfway(self, fault: Fault, *pair: str) -> None:
        self._world.data.halfway[pair[0], pair[1]] = 2

    def _spoil(self, fault: Fault) -> None:
        self._world.data.spoil += 1

    def _repeat_notice(self, fault: Fault) -> None:
        self._world.data.repeat += 2

    def _forge_notice(self, fault: Fault, name: str) -> None:
        """Before each of the next notices send a copy with one field changed. Also send one that is no message."""
        process = self._world.processes[name]
        self._world.data.forging[process.incarnation] = 4
        self._world.data.notify(process, process.incarnation, b"\xc1 no message")

    def calm(self) -> None:
        """End all faults. Whoever died or froze comes back, except lost engines and stalled agents."""
        self._world.say("world", "calm from here on")
        for name, process in list(self._world.processes.items()):
            if process.is_dead and self._world.clock.now > process.died_at + RESTART_S:
                self._world.start(name)
            elif process.is_frozen and process not in self._stalled:
                process.thaw()
        for engine in self._world.engines.values():
            if engine.is_dead and engine.name not in self.gone:
                engine.start()
            elif engine.loop.is_frozen:
                engine.loop.thaw()
        self.blocked.clear()
        self.disorder.clear()
        self._world.data.slow.clear()
        self._world.data.failing.clear()
        self._world.data.halfway.clear()
        self._world.data.hung &= self._held
        self._world.data.spoil = self._world.data.repeat = 0
        self._world.data.forging.clear()
        self._go_on()
