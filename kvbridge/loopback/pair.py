"""Two synthetic engines in this process: one sends the rows of a prompt to the other. The prompt fills all blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count

import torch
from kvbridge_proto.engine import Done, Released

from .engine import SyntheticEngine
from .messages import offer_of, want_of
from .pools import Shape, describe, rows_of, scattered
from .processes import AgentProcess


class Side:
    """One engine of a pair. `address` is its agent's, `table` has the blocks of the prompt."""

    def __init__(self, agent: AgentProcess, shape: Shape, regions: Sequence[torch.Tensor]) -> None:
        self.address, self.shape, self.table = agent.address, shape, scattered(shape)
        layers = shape.layers_apart if len(regions) > 1 else (None,)
        self.engine = SyntheticEngine(agent.socket, describe(shape, 0, layers), regions)


class EnginePair:
    numbers = count()  # an agent remembers the names of all pairs

    def __init__(self, sender: Side, receiver: Side) -> None:
        self.sender, self.receiver = sender, receiver

    def carry(self, tokens: int) -> tuple[float, int]:
        """Seconds from the want of so many first tokens to its end, and the bytes moved. The offer is made before.

        Raises RequestRejected with what an agent said.
        """
        name, sender, receiver = f"r{next(self.numbers)}", self.sender, self.receiver
        offered, size = sender.table[: -(-tokens // sender.shape.block_tokens)], receiver.shape.block_tokens
        want = want_of(name, sender.address, range(tokens), receiver.table, size)
        sender.engine.client.send(offer_of(name, tokens, offered))
        began = time.perf_counter()
        receiver.engine.client.send(want)
        done = receiver.engine.ended(Done, (name,))
        took = time.perf_counter() - began
        sender.engine.ended(Released, (name,))
        return took, done.moved_bytes

    def difference(self, tokens: range) -> str:
        """Where the receiver's rows of these tokens differ from the sender's, or ""."""
        ours, theirs = (rows_of(side.engine.regions, side.shape, side.table, tokens) for side in self)
        for (place, sent, at), (_, came, there) in zip(ours, theirs, strict=True):
            if not torch.equal(sent[at], came[there].to(sent.device)):
                return f"{place}: rows are not those that were sent"
        return ""

    def beside(self, tokens: range) -> str:
        """Whether more than these tokens was written to the receiver's memory, which was zero, or "". Clears them."""
        receiver = self.receiver
        for _, plane, at in rows_of(receiver.engine.regions, receiver.shape, receiver.table, tokens):
            plane[at] = 0
        return "memory of no request was written" if any(region.any() for region in receiver.engine.regions) else ""

    def __iter__(self) -> Iterator[Side]:
        return iter((self.sender, self.receiver))


def zeros(size_bytes: int, regions: int, device: str) -> list[torch.Tensor]:
    """Memory for one side. On a GPU give each layer a region, as engines do."""
    return [torch.zeros(size_bytes // regions, dtype=torch.uint8, device=device) for _ in range(regions)]


@contextmanager
def attached(
    agents: Sequence[AgentProcess], shapes: Sequence[Shape], memory: Sequence[Sequence[torch.Tensor]]
) -> Iterator[EnginePair]:
    """The sender's agent, shape and memory come first. Awaits what a GPU still writes. Raises RequestRejected."""
    for device in {region.device for regions in memory for region in regions}:
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    sides = [Side(*of_side) for of_side in zip(agents, shapes, memory, strict=True)]
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(closing(side.engine))
        for side in sides:
            side.engine.join((side.address,))
        yield EnginePair(*sides)
        for side in sides:
            side.engine.detach()
