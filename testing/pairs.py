"""Two engines, each rank of them beside a real agent of its own, and requests that are carried between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

from kvbridge_proto.engine import Done, Failed

from testing.agents import PATIENT_S, OracleEngine, agent
from testing.oracle import Shape, build_all, fill, mismatch
from testing.waiting import wait_for

Benches = Callable[..., "Bench"]
PROOFS = count(1)


class Bench:
    """A sender and a receiver. `options` are of all agents, and those of `p` and `d` of one side's."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        sender: Shape = Shape("nhd"),  # noqa: B008 - it is frozen
        receiver: Shape = Shape("hnd"),  # noqa: B008
        *,
        engine: type[OracleEngine] = OracleEngine,
        p: Mapping[str, Any] | None = None,
        d: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._folder, self._stack, self._engine = folder, stack, engine
        told = options | dict(d or {})
        self._is_hasty = told.get("connect_s", PATIENT_S) < PATIENT_S
        self._loses_sessions = told.get("silence_s", PATIENT_S) < PATIENT_S  # when the machine is busy
        self.senders = self._started("p", sender, options | dict(p or {}))
        self.receivers = self._started("d", receiver, options | dict(d or {}))
        self.sender_shape, self.receiver_shape = sender, receiver
        self.before = [each.held.copy() for each in self.receivers]

    def _started(self, name: str, shape: Shape, options: dict[str, Any]) -> list[OracleEngine]:
        engines = []
        for i, held in enumerate(build_all(shape)):
            running = self._stack.enter_context(agent(self._folder, f"{name}{i}", **options))
            engines.append(self._stack.enter_context(closing(self._engine(running, held))))
            engines[-1].attach()
        for each in engines:
            each.directory(*(other.agent for other in engines))
        return engines

    @property
    def sender(self) -> OracleEngine:
        """Its only rank."""
        (sender,) = self.senders
        return sender

    @property
    def receiver(self) -> OracleEngine:
        (receiver,) = self.receivers
        return receiver

    @property
    def engines(self) -> list[OracleEngine]:
        return [*self.senders, *self.receivers]

    @property
    def address(self) -> str:
        return self.senders[0].agent.address

    def fill(self, table: list[int], tokens: range) -> None:
        for engine in self.senders:
            fill(engine.held, table, tokens)

    def offer(self, request: str, table: list[int], tokens: int, **more: Any) -> None:
        for engine in self.senders:
            engine.offer(request, table, tokens, **more)

    def want(self, request: str, table: list[int], tokens: range, **more: Any) -> None:
        address = self.address
        for engine in self.receivers:
            engine.want(request, address, table, tokens, **more)

    def done(self, request: str) -> None:
        for engine in self.receivers:
            engine.done(request)
        for engine in self.senders:
            assert engine.released(request).code == ""

    def check(self, table: list[int], tokens: range) -> None:
        """Exactly these rows were written since the beginning."""
        for engine, before in zip(self.receivers, self.before, strict=True):
            tail = range(tokens.stop, len(table) * self.receiver_shape.block_tokens)
            assert not (wrong := mismatch(engine.held, before, table, tokens, tail)), wrong

    def carries(self, request: str, given: list[int], wanted: list[int], tokens: range) -> None:
        """Between all ranks. Nothing but this has been written since the beginning."""
        self.fill(given, tokens)
        self.offer(request, given, tokens.stop)
        self.want(request, wanted, tokens)
        self.done(request)
        self.check(wanted, tokens)

    def went_by(self, route: str) -> None:
        """Every session is of this route."""
        for engine in self.receivers:
            assert {peer.route.split()[0] for peer in engine.agent.status.peers} == {route}, engine.agent.text()
            for peer in engine.agent.status.peers:
                assert peer.route_name == route and peer.bytes_per_s, peer
                assert f" {peer.bytes_per_s / 1e9:.3g} GB/s" in peer.route

    def fetch(self, given: list[int], wanted: list[int], tokens: range, *, p: str, d: str, rendezvous: str) -> None:
        """A request that either side calls by a name of its own."""
        self.sender.offer(p, given, tokens.stop, rendezvous=rendezvous)
        self.receiver.want(d, self.address, wanted, tokens, rendezvous=rendezvous)
        self.receiver.done(d)
        self.sender.released(p)

    def carry(self, request: str, address: str = "") -> Done | Failed:
        return carry(self.sender, self.receiver, request, address=address)

    def works(self, request: str = "") -> None:
        """They still serve, at once; a receiver with a short `connect_s` may meet the sender at a later try."""
        is_met = any(peer.state == "sender open" for peer in self.receivers[0].agent.status.peers)
        may_fail = self._is_hasty and (self._loses_sessions or not is_met)
        tried: list[Failed] = []
        wait_for(lambda: self._tries(request or f"proof {next(PROOFS)}", tried, may_fail), why=lambda: f"{tried[-1]}")

    def _tries(self, request: str, tried: list[Failed], may_fail: bool) -> bool:
        answer = self.carry(f"{request}{' again' * len(tried)}")
        if isinstance(answer, Done):
            return True
        assert answer.code == "peer_unreachable" and may_fail, f"{answer}\n{self.receivers[0].agent.text()}"
        tried.append(answer)
        return False


def carry(
    sender: OracleEngine,
    receiver: OracleEngine,
    request: str,
    given: Sequence[int] = (5,),
    wanted: Sequence[int] = (6,),
    tokens: int = 16,
    address: str = "",
    **more: Any,
) -> Done | Failed:
    """How a request ends. If it is done, exactly its rows have been written."""
    before, size = receiver.held.copy(), receiver.pool.groups[0].block_tokens
    fill(sender.held, given, range(tokens))
    sender.offer(request, list(given), tokens)
    receiver.want(request, address or sender.agent.address, list(wanted), range(tokens), **more)
    answer = receiver.answer(request)
    if isinstance(answer, Done):
        wrong = mismatch(receiver.held, before, wanted, range(tokens), range(tokens, len(wanted) * size))
        assert not wrong, wrong
    return answer
