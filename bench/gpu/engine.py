"""One rank of a bench engine: a process for the whole bench, which takes commands and answers in lines of JSON.

It takes the place of vLLM's worker. It shares its memory by handle and speaks through adapters/engine/client.py. It
times what an engine would wait for: from before `Want` is sent until `Done` is read.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import torch
from kvbridge_proto.engine import Done, Released, Want
from kvbridge_proto.pool import CodecName
from kvbridge_proto.status import Status, StatusQuery

from bench.gpu.memory import Memory
from bench.gpu.processes import serve
from kvbridge.loopback.engine import SyntheticEngine
from kvbridge.loopback.messages import offer_of, want_of
from kvbridge.loopback.pools import Shape

DEADLINE_S = 30.0  # the first transfer of a new kind waits for kernels to be compiled
HOLD_S = 120.0


class EngineRank:
    """The rank's memory and its connection. Every public method is a command."""

    def __init__(self) -> None:
        self._memory: Memory
        self._engine: SyntheticEngine
        self._wanted: list[tuple[int, int]] = []

    def pool(
        self, shape: dict[str, Any], rank: int, tokens: int, device: str, seed: int, fill: CodecName | None = None
    ) -> None:
        """Make the memory. It is poisoned, or filled as an engine of this codec would."""
        if device != "cpu":
            torch.cuda.set_device(device)
        self._memory = Memory(msgspec.convert(shape, Shape), rank, tokens, device, seed)
        self._wanted = []
        if fill is not None:
            self._memory.fill(fill)

    def attach(self, socket: str, ranks: list[str]) -> None:
        """Share the memory with the agent. `ranks` are the agents of all ranks of this engine."""
        memory = self._memory
        is_spinning = memory.device.type != "cpu"  # a GPU engine has a core of its own
        self._engine = SyntheticEngine(socket, memory.pool, memory.regions, is_spinning=is_spinning)
        self._engine.join(ranks)

    def offer(self, rooms: dict[str, tuple[int, int]]) -> None:
        """Offer a window of the sequence under each rendezvous id. Returns once the agent has read all offers."""
        fence = self._engine.fence.mark()
        for room, (first, end) in rooms.items():
            offer = offer_of(room, end - first, self._memory.blocks(first, end), hold_s=HOLD_S, fence=fence)
            self._engine.client.send(offer)
        self._engine.client.send(StatusQuery())
        self._engine.told(Status)

    def released(self, rooms: list[str]) -> None:
        """Wait until the agent has released the blocks of every rendezvous id."""
        for room in rooms:
            self._engine.ended(Released, (room,))

    def want(self, sender: str, batches: list[dict[str, tuple[int, int]]], gap_s: float = 0.0) -> dict[str, Any]:
        """Want batches of windows, about `gap_s` apart. Returns the seconds of each batch and of each want."""
        prepared = [[self._want(sender, *each) for each in batch.items()] for batch in batches]
        seconds: list[float] = []
        each: list[list[float]] = []
        moved = 0
        chance = random.Random(0)
        began = time.monotonic()
        for batch in prepared:
            if gap_s:
                self._rest(gap_s * chance.uniform(0.5, 1.5))
            ends, moved_bytes = self._carry(batch)
            seconds.append(max(ends))
            each.append(ends)
            moved += moved_bytes
        ended = time.monotonic()
        self._wanted += [window for batch in batches for window in batch.values()]
        return {"seconds": seconds, "each": each, "moved_bytes": moved, "began": began, "ended": ended}

    def poison(self) -> None:
        self._memory.poison()
        self._wanted = []

    def verify(self, codec: CodecName, is_equal: bool) -> dict[str, str]:
        """What is wrong in the memory since it was poisoned, or nothing.

        Between equal pools whole blocks may be sent, so the rest of a last block may hold the sender's bytes.
        """
        wrong = self._memory.wrong(self._wanted, codec)
        if wrong and is_equal:
            size = self._memory.shape.block_tokens
            whole = [(first, -(-end // size) * size) for first, end in self._wanted]
            wrong = self._memory.wrong(whole, codec)
        return {"wrong": wrong}

    def prove(self, codec: CodecName, is_equal: bool) -> dict[str, bool]:
        """Whether `verify` sees a flipped bit in a wanted token, and one where nothing was wanted."""
        seen = []
        for token in (self._wanted[-1][1] - 1, None):
            self._memory.spoil(token)
            seen.append(bool(self.verify(codec, is_equal)["wrong"]))
            self._memory.spoil(token)
        return {"sees_wanted": seen[0], "sees_others": seen[1]}

    def detach(self) -> None:
        self._engine.detach()

    def drop(self) -> None:
        """Drop connection and memory, in whatever state they are."""
        if "_engine" in self.__dict__:
            self.__dict__.pop("_engine").close()
        self.__dict__.pop("_memory", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _want(self, sender: str, room: str, window: tuple[int, int]) -> Want:
        first, end = window
        ids, size = self._memory.blocks(first, end), self._memory.shape.block_tokens
        return want_of(room, sender, range(end - first), ids, size, deadline_s=DEADLINE_S)

    def _carry(self, wants: list[Want]) -> tuple[list[float], int]:
        """Send these wants. Returns the seconds until each was done."""
        began = time.perf_counter()
        fence = self._engine.fence.mark()
        for want in wants:
            self._engine.client.send(msgspec.structs.replace(want, fence=fence))
        left, ends, moved = {want.request for want in wants}, [], 0
        while left:
            message = self._engine.ended(Done, left)
            ends.append(time.perf_counter() - began)
            left.remove(message.request)
            moved += message.moved_bytes
        return ends, moved

    def _rest(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - 0.0002))


if __name__ == "__main__":
    serve(EngineRank())
