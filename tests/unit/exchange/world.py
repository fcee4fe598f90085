"""A network in which everything that is under way happens, in an order that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from kvbridge_proto.engine import Done, Failed, Released, Scales
from kvbridge_proto.peer import Goodbye
from kvbridge_proto.pool import CodecName, Engine, Pool
from msgspec import structs

from kvbridge.dataplane.orders import LandedChunk, LeavingChunk
from kvbridge.geometry.check import rescaled
from kvbridge.geometry.plan import Part
from kvbridge.geometry.plane_pair import PlanePair
from kvbridge.loopback.messages import number_of
from testing.pools import Shape, describe
from tests.unit.exchange.network import Event, Network, Node

LAYERS, HEADS, BLOCKS = 2, 4, 64
T = TypeVar("T")


@cache
def make_pool(
    engine: str,
    rank: int,
    ranks: int,
    block_tokens: int,
    scale: float = 0.0,
    cp_rank: int = 0,
    late_tokens: int = 0,
    **shape: Any,
) -> Pool:
    """One rank of a small bf16 engine, or an fp8 one under this scale; heads are split evenly.

    Blocks of layers that do not keep all tokens are of `late_tokens`.
    """
    codec: CodecName = "fp8_e4m3" if scale else "bf16"
    scales = {"k": (scale,), "v": (scale,)} if scale else None
    whole = Shape(block_tokens=block_tokens, blocks=BLOCKS, tp_size=ranks, codec=codec, scales=scales)
    late = {kind: late_tokens for kind in ("sliding", "chunked", "state") if late_tokens}
    pool = describe(replace(whole, group_tokens=late, **shape), rank, cp_rank=cp_rank)
    return structs.replace(pool, engine=Engine(kind="test", version="1", id=engine))


class World(Network):
    """`run` makes everything happen that is under way.

    The engines are `senders` and `receivers` ranks that split the heads, or have the pools given.
    """

    def __init__(
        self,
        senders: int | Sequence[Pool] = 1,
        receivers: int | Sequence[Pool] = 1,
        slots: int = 4,
        local: int = 2,
        seed: int = 0,
    ) -> None:
        if isinstance(senders, int):
            senders = [make_pool("prefill", rank, senders, 4) for rank in range(senders)]
        if isinstance(receivers, int):
            receivers = [make_pool("decode", rank, receivers, 16) for rank in range(receivers)]
        super().__init__(senders, receivers, slots, local)
        self.random = random.Random(seed)
        self.hold: set[str] = set()  # kinds of events that do not happen now
        self.past: list[Event] = []
        self.moved: list[tuple[tuple[PlanePair, ...], bool, Pool]] = []  # by which plan, if gathered, of which pool

    # What engines say, and what follows from it:

    def serve(self, *said: Any, **more: Any) -> None:
        """An offer, and everything happens that is not held back."""
        self.offer(*said, **more)
        self.run()

    def fetch(self, *said: Any, **more: Any) -> None:
        """The same after a want."""
        self.want(*said, **more)
        self.run()

    def begin(self, request: str = "r", tokens: int = 64) -> None:
        """The same after both; it is offered whole."""
        self.offer(request, tokens, -(-tokens // 4))
        self.fetch(request, tokens)

    def rescale(self, node: Node, scale: float, revision: int = 0) -> None:
        """All planes of an engine rank come under another scale; its agent does what `Engines` does."""
        pool, revision = node.engine.pool, revision or node.engine.revision + 1
        scales = tuple(Scales(plane.layer, plane.part, (scale,)) for plane in pool.planes)
        ended = node.sending.rescaled("test", self.now)
        node.engine = replace(node.engine, epoch=node.engine.epoch + 1, pool=rescaled(pool, scales), revision=revision)
        self.do(node, ended)
        for other in self.receivers if node.is_sender else self.senders:
            if other.incarnation in node.accepted or node.incarnation in other.accepted:
                self.events.append(("message", node.name, other.name, Goodbye()))
            if node.accepted.pop(other.incarnation, None) is not None:
                self.do(node, node.sending.lost(other.incarnation))
        if not node.is_sender:
            self.do(node, node.receiving.rescaled(node.engine, self.now))

    # What happens next:

    def run(self, steps: int = 100_000) -> None:
        """Let events happen until none is left that may."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError("the world does not come to rest")

    def go_on(self) -> None:
        """Nothing is held back any more."""
        self.hold.clear()
        self.run()

    def step(self) -> bool:
        """Let one event happen; False if none may."""
        able = [event for event in self.events if event[0] not in self.hold]
        if able:
            self.happen(self.next_of(self.random.choice(able)))
        return bool(able)

    def happen(self, index: int) -> None:
        self.past.append(self.events[index])
        super().happen(index)

    def later(self, call: Callable[[], None]) -> None:
        """This is one of the events."""
        self.events.append(("call", "P0", call))

    def _call(self, _: Node, call: Callable[[], None]) -> None:
        call()

    def _begin_gather(self, sender: Node, leaving: LeavingChunk) -> None:
        super()._begin_gather(sender, leaving)
        plan = leaving.order.plan
        assert Part(plan, plan.chunk(leaving.chunk), leaving.tables, is_sender=True).moves()
        self.moved.append((plan.pairs, True, sender.engine.pool))

    def _begin_scatter(self, receiver: Node, landed: LandedChunk) -> None:
        super()._begin_scatter(receiver, landed)
        plan = landed.order.plan
        assert Part(plan, plan.chunk(landed.notice.chunk), landed.order.tables, is_sender=False).moves()
        self.moved.append((plan.pairs, False, receiver.engine.pool))

    # What must be true:

    def heard(self, kind: type[T]) -> list[T]:
        """All messages and reports of this kind that came."""
        heard = (each for event in self.past for each in (event[2] if event[0] == "report" else event[3:]))
        return [each for each in heard if isinstance(each, kind)]

    def answers(self, receiver: int = 0) -> dict[str, Done | Failed]:
        """The word on each want."""
        return self.receivers[receiver].answers

    def failure(self, request: str = "r", receiver: int = 0) -> Failed:
        answer = self.answers(receiver)[request]
        assert isinstance(answer, Failed), answer
        return answer

    def placed(self, request: str) -> int | None:
        """How many chunks of a want have been scattered; None if it is not open, or waits for a session."""
        wanted = self.receiver.receiving.wants.get(number_of(request))
        return next((each.placed for each in wanted.incoming_transfers.values()), None) if wanted else None

    def check_done(self, *requests: str) -> None:
        """Every receiver has what these asked for, and nothing is left over."""
        for receiver in range(len(self.receivers)):
            answers = self.answers(receiver)
            assert all(isinstance(answers[request], Done) for request in requests), answers
        self.check_rest()

    def released(self, sender: int = 0) -> dict[str, Released]:
        found: dict[str, Released] = {}
        for message in self.senders[sender].told:
            if isinstance(message, Released):
                assert message.request not in found, f"released twice: {message}"
                found[message.request] = message
        return found
