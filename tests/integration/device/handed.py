"""An engine's pool in another process, handed over at a real door, and pulls from it into our own pool.

`Sender` is the test's end. The other end is this module run as a program: engine and agent in one, told by lines what
to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from kvbridge_kernels.launch_ref import move as move_on_cpu
from kvbridge_kernels.tables import Work
from kvbridge_proto.door import Ticket
from kvbridge_proto.framing import decode, encode
from kvbridge_proto.pool import Handle

from kvbridge.device.handles import export_all
from kvbridge.device.mapping import SharedHandles
from kvbridge.device.memory import AttachedPool, PartSide, Templates
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from kvbridge.transport.door import MemoryDoor, Shared
from kvbridge.transport.lock import Lock
from testing.carried import Mapped
from testing.nursery import PipedChild
from testing.oracle import Shape, block_table, fill, tables_of, tail_of
from testing.pools import Held, build
from testing.slow_rows import twin_of, wrong

TOKENS = range(5, 90)
NHD16 = Shape(layout="nhd", layers=2, block_tokens=16, blocks=24, key_width=16, value_width=16)
HND64 = Shape(layout="hnd", layers=2, block_tokens=64, blocks=6, key_width=16, value_width=16)
PACKED = Shape(layout="packed", layers=2, block_tokens=8, blocks=48, key_width=16, value_width=16)
FP8 = Shape(layout="hnd", layers=2, block_tokens=32, blocks=12, key_width=16, value_width=16, codec="fp8_e4m3")
SHAPES = {"nhd16": NHD16, "hnd64": HND64, "packed": PACKED, "fp8": FP8}


class Sender:
    """An engine with a filled pool of the shape called `name` on `device`, behind a door beside `path`.

    Each of its regions is the beginning of an allocation with `slack_bytes` more.
    """

    def __init__(self, path: Path, name: str, device: str = "cpu", slack_bytes: int = 0) -> None:
        self.process = PipedChild("tests.integration.device.handed", path, name, device, slack_bytes)

    def ask(self, said: str) -> str:
        self.process.stdin.write(f"{said}\n".encode())
        self.process.stdin.flush()
        answer = self.process.stdout.readline().decode().strip()
        assert answer, "the sender died"
        return answer

    def ticket(self) -> Ticket:
        return decode(bytes.fromhex(self.ask("ticket")), Ticket)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()


def filled(shape: Shape) -> Held:
    held = build(shape)
    fill(held, tables_of(held.pool, TOKENS.stop, seed=1), range(TOKENS.stop), is_tame=True)
    return held


def pulled(
    shape: Shape, sender: AttachedPool, receiver_shape: Shape, device: str, by: Callable[..., None] = move_on_cpu
) -> str:
    """What is wrong in a pool of `receiver_shape` on our `device` once TOKENS were pulled into it: nothing."""
    sent, receiver = filled(shape), build(receiver_shape)
    before, tables = (
        receiver.copy(),
        (tables_of(sent.pool, TOKENS.stop, seed=1), tables_of(receiver.pool, TOKENS.stop, seed=2)),
    )
    ours = Mapped(receiver.pool, [torch.from_numpy(region.copy()).to(device) for region in receiver.memory])
    (takes,) = assign([sent.pool], receiver.pool)
    planned = plan(sent.pool, receiver.pool, takes, TOKENS.start, TOKENS.stop, 1 << 14)
    ends = (block_table(sent.pool, tables[0], 0, TOKENS.stop), block_table(receiver.pool, tables[1], 0, TOKENS.stop))
    templates, work = Templates(), Work(device)
    with sender.hold() as regions, ours.hold() as our_regions:
        for index in range(planned.chunks):
            chunk = planned.chunk(index)
            parts = Part(planned, chunk, ends[0], True), Part(planned, chunk, ends[1], False)
            sums = torch.zeros(1, dtype=torch.int64, device=device)
            sides = PartSide(sender, regions, parts[0]), PartSide(ours, our_regions, parts[1])
            by(templates.of(*sides, chunk.size_bytes), work, None, sums)
            if device != "cpu":
                torch.cuda.synchronize(device)
    found = Held(receiver.pool, tuple(np.asarray(memory.cpu().numpy()) for memory in ours.memories))
    assert any((now != then).any() for now, then in zip(found.memory, before.memory, strict=True))
    tail = tail_of([sent], receiver, tables[1], TOKENS)
    return wrong(twin_of(shape, receiver_shape, (0, 0, 0)), found, before, tables[1], TOKENS, tail)


@contextlib.contextmanager
def shared_on(
    held: Held, device: str, slack_bytes: int = 0
) -> Iterator[tuple[list[torch.Tensor], tuple[Handle, ...], list[int]]]:
    """The pool's memory on `device`, as an engine would export it."""
    tensors = [torch.zeros(region.size + slack_bytes, dtype=torch.uint8, device=device) for region in held.memory]
    for tensor, region in zip(tensors, held.memory, strict=True):
        tensor[: region.size] = torch.from_numpy(region)
    handles, fds = export_all(tensor.untyped_storage() for tensor in tensors)
    try:
        yield tensors, handles, fds
    finally:
        for fd in fds:
            os.close(fd)


async def _serve(path: str, name: str, device: str, slack_bytes: str) -> None:
    held = filled(SHAPES[name])
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        tensors, handles, fds = stack.enter_context(shared_on(held, device, int(slack_bytes)))
        kept = stack.enter_context(closing(SharedHandles.keep(handles, fds)))
        lock = stack.enter_context(contextlib.closing(Lock(path, "0123456789abcdef")))
        async with MemoryDoor(lock) as door:
            door.share(Shared(1, kept.handles, kept.fds))
            serving = asyncio.create_task(door.serve())
            sessions = 0
            while said := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                sessions += 1
                if said == "ticket":
                    ticket = door.admit(f"session-{sessions}")
                    answer = encode(ticket).hex() if ticket is not None else "none"
                elif said == "end":
                    door.end(1, "the engine leaves")
                    answer = "ended"
                elif said == "importers":
                    answer = f"{len(door.importers())} importers"
                else:
                    same = all(
                        torch.equal(tensor[: region.size].cpu(), torch.from_numpy(region))
                        for tensor, region in zip(tensors, held.memory, strict=True)
                    )
                    answer = "unchanged" if same else "changed"
                print(answer, flush=True)
            serving.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
