"""One rank of a bench engine: a process for the whole bench, which takes commands and answers in lines of JSON.

It takes the place of vLLM's worker. It shares its memory by handle and speaks through adapters/engine/client.py. It
times what an engine would wait for: from before `Want` is sent until `Done` is read.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from gpu_shapes import Memory
from kvbridge_proto.common import OURS, Blocks, Rank
from kvbridge_proto.engine import (
    Attach,
    Attached,
    Detach,
    Detached,
    Directory,
    Done,
    Failed,
    Offer,
    Refused,
    Released,
    Want,
)
from kvbridge_proto.pool import CodecName
from kvbridge_proto.status import Status, StatusQuery

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.device.fence import EngineFence
from kvbridge.device.handles import export_all
from kvbridge.loopback.pools import Shape

PATIENCE_S = 30.0  # the first transfer of a new kind waits for kernels to be compiled
HOLD_S = 120.0


class EngineRank:
    """The rank's memory and its connection. Every public method is a command."""

    def __init__(self) -> None:
        self._memory: Memory
        self._client: EngineClient
        self._fence: EngineFence
        self._heard: list[Any] = []
        self._is_spinning = False
        self._wanted: list[tuple[int, int]] = []

    def pool(
        self, shape: dict[str, Any], rank: int, tokens: int, device: str, seed: int, fill: CodecName | None = None
    ) -> None:
        """Make the memory. It is poisoned, or filled as an engine of this codec would."""
        if device != "cpu":
            torch.cuda.set_device(device)
        self._is_spinning = device != "cpu"  # a GPU engine has a core of its own
        self._memory = Memory(msgspec.convert(shape, Shape), rank, tokens, device, seed)
        self._wanted = []
        if fill is not None:
            self._memory.fill(fill)

    def attach(self, socket: str, ranks: list[str]) -> None:
        """Share the memory with the agent. `ranks` are the agents of all ranks of this engine."""
        memory = self._memory
        self._client = EngineClient(socket)
        if not self._client.connect(PATIENCE_S):
            raise RuntimeError(self._client.why)
        self._heard = []
        self._fence = EngineFence(str(memory.device))
        handles, fds = export_all(region.untyped_storage() for region in memory.regions)
        message = Attach(versions=OURS, pool=memory.pool, handles=handles, fence_fd=len(fds))
        self._client.send(message, (*fds, self._fence.fd))
        for fd in fds:
            os.close(fd)
        self._await(lambda message: isinstance(message, Attached))
        self._client.send(
            Directory(ranks=tuple(Rank(tp_rank=i, pp_rank=0, address=address) for i, address in enumerate(ranks)))
        )

    def offer(self, rooms: dict[str, tuple[int, int]]) -> None:
        """Offer a window of the sequence under each rendezvous id. Returns once the agent has read all offers."""
        fence = self._fence.mark()
        for room, window in rooms.items():
            self._client.send(
                Offer(
                    rendezvous=room,
                    request=room,
                    tokens=window[1] - window[0],
                    blocks=self._blocks(window),
                    is_last=True,
                    hold_s=HOLD_S,
                    fence=fence,
                )
            )
        self._client.send(StatusQuery())
        self._await(lambda message: isinstance(message, Status))

    def released(self, rooms: list[str]) -> None:
        """Wait until the agent has released the blocks of every rendezvous id."""
        for room in rooms:
            answer = self._await(partial(_is_about, room=room, kind=Released))
            if answer.code:
                raise RuntimeError(f"{room}: {answer.code}: {answer.reason}")

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
        self._client.send(Detach())
        self._await(lambda message: isinstance(message, Detached))
        self._client.close()
        self._fence.close()

    def drop(self) -> None:
        """Drop connection and memory, in whatever state they are."""
        for name in ("_client", "_fence"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()
        self.__dict__.pop("_memory", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _blocks(self, window: tuple[int, int]) -> tuple[Blocks, ...]:
        size = self._memory.shape.block_tokens
        return (Blocks(0, 0, tuple(self._memory.table[window[0] // size : -(-window[1] // size)])),)

    def _want(self, sender: str, room: str, window: tuple[int, int]) -> Want:
        return Want(
            request=room,
            rendezvous=room,
            sender=sender,
            first_token=0,
            end_token=window[1] - window[0],
            blocks=self._blocks(window),
            deadline_s=PATIENCE_S,
        )

    def _carry(self, wants: list[Want]) -> tuple[list[float], int]:
        """Send these wants. Returns the seconds until each was done."""
        began = time.perf_counter()
        fence = self._fence.mark()
        for want in wants:
            self._client.send(msgspec.structs.replace(want, fence=fence))
        left, ends, moved = {want.request for want in wants}, [], 0
        while left:
            message = self._await(lambda message: isinstance(message, Done))
            ends.append(time.perf_counter() - began)
            left.remove(message.request)
            moved += message.moved_bytes
        return ends, moved

    def _await(self, is_wanted: Callable[[Any], bool]) -> Any:
        """Wait for the first message that is wanted, and keep the others. A refusal or failure is an error."""
        end = time.monotonic() + PATIENCE_S
        while True:
            for message in self._heard:
                if is_wanted(message):
                    self._heard.remove(message)
                    return message
                if isinstance(message, Refused | Failed):
                    raise RuntimeError(f"the agent says {message}")
            if not self._client.is_connected:
                raise RuntimeError(self._client.why)
            if time.monotonic() > end:
                raise RuntimeError(f"no answer in {PATIENCE_S:g} s; heard {str(self._heard)[:500]}")
            if not self._is_spinning:
                select.select([self._client], [], [], 0.02)
            self._heard += self._client.poll()

    def _rest(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - 0.0002))


def _is_about(message: Any, room: str, kind: type) -> bool:
    return isinstance(message, kind) and getattr(message, "request", None) == room


def main() -> None:
    """Serve commands until stdin ends."""
    torch.set_num_threads(1)
    rank = EngineRank()
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = getattr(rank, told.pop("do"))(**told) or {}
        except Exception as error:  # tell the bench, which goes on
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
