"""The stand-in engine: a rank that serves rendezvous ids, as a process: `python -m testing.engine '<Job as JSON>'`.

It speaks to its agent through the adapters' own link, like an engine's worker, and reuses its blocks as soon as the
contract allows. Every block that is not under way has an owner, whose numbers are compared element by element. Lines of
JSON tell it what to do. In lines of JSON it says how each rendezvous ended, what its agent was late with, and what is
wrong.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from kvbridge_proto.common import OURS
from kvbridge_proto.engine import Abandon, Attach, Detach, Done, Failed, Refused, Released, Withdraw
from kvbridge_proto.pool import Handle

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.link import AgentLink, Over, ReadsOver, WritesOver
from kvbridge.device.fence import EngineFence
from kvbridge.device.handles import export_all
from kvbridge.loopback.messages import number_of, offer_of, want_of
from kvbridge.loopback.pools import Shape, describe
from testing.content import Content
from testing.made_rows import POISON

LOOK_S = 0.05
LEFT = "detached"  # why a connection is over that the engine has ended
PATIENCE_S = 20.0  # an agent that is well answers by the deadline; so much is a busy machine's
AWAY_S = 0.3  # between two tries to attach; an engine waits longer
# Of two engines that disagree: the order of their memory, tokens of a block.
SIDES = {"sender": ("BLPTHE", 16), "receiver": ("BLPHTE", 32)}
SPARE_BLOCKS = 3
NEVER = float("inf")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds are the limits told to the agent."""

    role: str
    socket: str
    name: str
    seed: int = 0
    device: str = "cpu"
    tokens: int = 256
    prompts: int = 6
    layers: int = 4
    heads: int = 4
    width: int = 32
    deadline_s: float = 2.0
    look_s: float = LOOK_S  # between two looks at all memory
    contents: int = 0  # so many prompts differ; none has the rows of another, if 0
    is_brief: bool = False  # rendezvous ids that ended well are only counted
    is_hasty: bool = False  # uses blocks of a want that failed before it looks at what they hold: a late write shows
    may_be_foreign: bool = False  # wants under way may hold anybody's rows: what was read too late does not count

    @property
    def shape(self) -> Shape:
        """Its pool has room for `prompts` prompts of `tokens` tokens."""
        axes, most = SIDES[self.role]
        size = min(self.tokens, most)
        blocks = self.prompts * (self.tokens // size) + SPARE_BLOCKS
        rows: dict[str, Any] = {"layers": self.layers, "kv_heads": self.heads, "width": self.width}
        return Shape(name=axes, axes=axes, block_tokens=size, blocks=blocks, **rows)


@dataclass(slots=True)
class Open:
    """A rendezvous under way."""

    rendezvous: int
    blocks: list[int]
    rows: torch.Tensor
    began: float
    late_at: float = NEVER
    abandon_at: float = NEVER
    offered: int = 0  # blocks
    rest_at: float = NEVER  # when the rest of them is offered
    is_asked_to_stop: bool = False
    is_foreign: bool = False  # rows were in its blocks that are no room's of its name


@dataclass(slots=True)
class Told:
    """Rendezvous that we were told of and have not begun, and how many of them will be given up after a moment.

    `pace_s` is how long the second half of a prompt takes. With `after_s`, each is given up so long after it was sent;
    or process `strike` gets the signal `number` then. Offers are held for `hold_s`, or until the deadline; if
    `is_announced`, we say when the first of them is made. With `is_offered` wants say that it was.
    """

    rendezvous_ids: deque[int] = field(default_factory=deque)
    sender: str = ""
    abandon: float = 0.0
    pace_s: float = 0.0
    deadline_s: float = 0.0
    hold_s: float = 0.0
    after_s: float = NEVER
    strike: int = 0
    strike_at: float = NEVER
    number: int = signal.SIGKILL
    is_announced: bool = False
    is_offered: bool = False


class Engine:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.content = Content(job.shape, job.tokens, job.device, job.contents)
        handles, self.fds = self._share()
        self.owned = torch.zeros_like(self.memory)  # what each block that is not under way must hold
        self.chance = random.Random(job.seed)
        self.free = deque(range(self.content.shape.blocks))
        self.open: dict[str, Open] = {}
        self.told = Told()
        self.begun = 0
        self.ends: dict[str, int] = {}
        self.patience_s = PATIENCE_S
        self._stamps = 0
        self._looked = self._read = 0.0
        self._is_detaching = False
        for block in self.free:
            self._stamp([block])
        self.fence = EngineFence(job.device)
        pool = describe(job.shape, 0)
        attach = Attach(versions=OURS, pool=pool, handles=handles, fence_fd=len(self.fds))
        fds = [*self.fds, self.fence.fd]
        self.link = AgentLink(EngineClient(job.socket), attach, fds, logging.getLogger("engine"))
        self.was_attached = False

    def _share(self) -> tuple[tuple[Handle, ...], list[int]]:
        """Make our memory. On the processor it has our name, by which a test finds who maps it."""
        size = self.content.shape.rank_bytes
        if self.job.device != "cpu":
            torch.cuda.set_device(self.job.device)
            memory = torch.full((size,), POISON, dtype=torch.uint8, device=self.job.device)
            self.memory = self.content.blocks_of(memory)
            return export_all([memory.untyped_storage()])
        fd = os.memfd_create(self.job.name)
        os.ftruncate(fd, size)
        self.memory = self.content.blocks_of(torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))
        return (Handle(region=0, kind="shm_fd", fd=0),), [fd]

    def serve(self) -> None:
        os.set_blocking(0, False)
        unread = b""
        while True:
            readable = [0] + ([fd] if (fd := self.link.client.fileno()) >= 0 else [])
            ready, _, _ = select.select(readable, [], [], self._pause_s())
            if 0 in ready:
                got = os.read(0, 1 << 16)
                if not got:
                    return
                *lines, unread = (unread + got).split(b"\n")
                for line in lines:
                    told = json.loads(line)
                    getattr(self, "do_" + told.pop("do"))(**told)
            self._turn()
            self._begin()
            self._look()

    def _pause_s(self) -> float:
        next_at = min([self.told.strike_at, *(each.abandon_at for each in self.open.values())])
        most_s = LOOK_S if self.open or not self.link.is_attached else 0.2
        return max(0.0, min(most_s, next_at - time.monotonic()))

    # What we are told:

    def do_run(self, first: int, count: int, deadline_s: float = 0.0, **more: Any) -> None:
        """Serve so many rendezvous ids; more is as in `Told`. Those before begin first, as they were told."""
        self._begin()
        waiting = self.told.rendezvous_ids
        waiting.extend(range(first, first + count))
        self.told = Told(waiting, deadline_s=deadline_s or self.job.deadline_s, **more)

    def do_audit(self) -> None:
        self._audit()
        say("audited", open=len(self.open), waiting=len(self.told.rendezvous_ids), begun=self.begun, ends=self.ends)

    def do_bear(self, patience_s: float) -> None:
        """So long after its deadline a rendezvous has our agent asked to stop, and after as long again given up."""
        self.patience_s = patience_s

    def do_forget(self) -> None:
        """Rendezvous that were not begun will not be (the soak of bench asks this)."""
        self.told.rendezvous_ids.clear()

    def do_take_back(self) -> None:
        """All that is offered. Its blocks are used again once our agent says so."""
        for name, each in self.open.items():
            self._withdraw(name, each)

    def do_reuse(self) -> None:
        """Use the blocks of all that is offered, unheard: an engine does so READERS_S after it took them back."""
        for each in self.open.values():
            self._stamp(each.blocks)
        say("reused", why="as we were told")

    def do_give_up(self) -> None:
        """Our agent. What it reads, or promised, is used again as soon as the link says that nobody counts on it."""
        self.link.give_up("as told")

    def do_detach(self) -> None:
        self._is_detaching = self.link.send(Detach())

    # Rendezvous:

    def _begin(self) -> None:
        while self.told.rendezvous_ids and not self.link.is_attached:
            rendezvous = self.told.rendezvous_ids.popleft()
            say("ended", rendezvous=rendezvous, code="no_agent", reason=self.link.why, seconds=0.0)
        while self.told.rendezvous_ids and len(self.free) >= self.content.rendezvous_blocks:
            rendezvous = self.told.rendezvous_ids.popleft()
            blocks = [self.free.popleft() for _ in range(self.content.rendezvous_blocks)]
            rows = self.content.rows(rendezvous)
            began = Open(rendezvous, blocks, rows, began=time.monotonic())
            self.open[f"rendezvous-{rendezvous}"] = began
            self.begun += 1
            if self.job.role == "sender":
                self._offer(began)
            else:
                self._want(began)
            if self.told.strike:
                self.told.strike_at = time.monotonic() + self.told.after_s
            else:
                began.abandon_at = time.monotonic() + self.told.after_s
            if self.chance.random() < self.told.abandon:
                began.abandon_at = began.began + self.chance.random() * 0.02
            # We may have been stopped before we had said it all.
            began.late_at = time.monotonic() + self.told.deadline_s + self.patience_s

    def _offer(self, began: Open) -> None:
        """The prompt is computed, and offered in two pieces."""
        if half := len(began.blocks) // 2:
            self._offer_up_to(began, half)
        began.rest_at = began.began + self.told.pace_s
        if not self.told.pace_s:
            self._offer_up_to(began, len(began.blocks))

    def _offer_up_to(self, began: Open, upto: int) -> None:
        name, given = f"rendezvous-{began.rendezvous}", began.offered
        blocks = began.blocks[given:upto]
        self.memory[blocks] = self.owned[blocks] = began.rows[given:upto]
        began.offered, is_last = upto, upto == len(began.blocks)
        if is_last:
            began.rest_at = NEVER
        more = {"is_more": given > 0, "is_last": is_last, "hold_s": self.told.hold_s or self.told.deadline_s}
        tokens = upto * self.content.shape.block_tokens
        self.link.send(offer_of(name, tokens, blocks, first=given, fence=self.fence.mark(), **more))
        if not given and self.told.is_announced:
            say("offered", rendezvous=began.rendezvous)

    def _withdraw(self, name: str, each: Open) -> None:
        each.rest_at = NEVER
        self.link.send(Withdraw(number=number_of(name), reason="as we were told"))

    def _want(self, began: Open) -> None:
        name = f"rendezvous-{began.rendezvous}"
        tokens, size = range(self.job.tokens), self.content.shape.block_tokens
        more = {"deadline_s": self.told.deadline_s, "fence": self.fence.mark(), "is_offered": self.told.is_offered}
        self.link.send(want_of(name, self.told.sender, tokens, began.blocks, size, **more))

    def _end(self, name: str, code: str, reason: str = "") -> None:
        """What an engine may do from now on, it does at once."""
        ended = self.open.pop(name, None)
        if ended is None:
            return
        seconds = time.monotonic() - ended.began
        if self.job.role == "receiver" and not code:
            self.owned[ended.blocks] = ended.rows
            self._compare(ended.blocks, f"{name} is done")
            self.free.extend(ended.blocks)  # these are looked at until they are somebody else's
        else:
            if self.job.role == "receiver" and not self.job.is_hasty:
                self._look_for_foreign(name, ended)
            self._stamp(ended.blocks)
            self.free.extend(ended.blocks)
        self.ends[code] = self.ends.get(code, 0) + 1
        if code or not self.job.is_brief:
            say(
                "ended",
                rendezvous=ended.rendezvous,
                code=code,
                reason=reason[:200],
                seconds=seconds,
            )

    def _stamp(self, blocks: list[int]) -> None:
        """Somebody else's numbers, no row of any rendezvous."""
        self._stamps += 1
        self.memory[blocks] = self.owned[blocks] = 0x5A00 + self._stamps % 251
        if self.job.device != "cpu":
            torch.cuda.synchronize()  # what is written there after this shows

    # The agent:

    def _turn(self) -> None:
        self._read = time.monotonic()
        for message in self.link.turn():
            match message:
                case Done(request=name):
                    self._end(name, "")
                case Failed(request=name, code=code, reason=reason):
                    self._end(name, code or "failed", reason)
                case Released(request=name, code=code, reason=reason):
                    self._end(name, code, reason)
                case Refused(number=number, code=code, reasons=reasons):
                    for name in [name for name in self.open if number_of(name) == number]:
                        self._end(name, f"refused {code}", "; ".join(reasons))
                case ReadsOver(why=why) if self.job.role == "sender":
                    for name in list(self.open):
                        self._end(name, "agent_gone", why)
                    say("reused", why=why)
                case WritesOver(why=why) if self.job.role == "receiver":
                    for name in list(self.open):
                        self._end(name, "agent_gone", why)
                case Over(why=why):
                    for name in list(self.open):
                        self._end(name, "agent_gone", LEFT if self._is_detaching else why)
                    self._is_detaching = False
        if self.link.state.name == "AWAY":
            self.link._at = min(self.link._at, time.monotonic() + AWAY_S)
        if self.link.is_attached and not self.was_attached:
            say("attached", address=self.link.address)
        self.was_attached = self.link.is_attached

    def _look(self) -> None:
        now = time.monotonic()
        if now > self.told.strike_at:
            self.told.strike_at = NEVER
            os.kill(self.told.strike, self.told.number)
        for name, each in list(self.open.items()):
            if now > each.rest_at:
                self._offer_up_to(each, len(each.blocks))
            if now > each.abandon_at:
                each.abandon_at = NEVER
                if self.job.role == "sender":
                    self._withdraw(name, each)
                else:
                    self.link.send(Abandon(number=number_of(name), reason="as the seed says"))
            # What came while we were stopped is no less in time for being unread.
            if self._read > each.late_at and not each.is_asked_to_stop and self.job.role == "receiver":
                each.is_asked_to_stop, each.late_at = True, now + self.patience_s
                self.link.send(Abandon(number=number_of(name), reason="late"))
                say("late", what=f"{name}: no answer {now - each.began:.1f} s after it was wanted; asked to stop")
            elif self._read > each.late_at:
                each.late_at = NEVER
                self.link.give_up(f"{name}: no answer in time")
                say("late", what=f"{name}: no answer {now - each.began:.1f} s after it was told; the agent is given up")
        if now > self._looked + self.job.look_s:
            self._looked = now
            self._audit()

    def _audit(self) -> None:
        """Every element of all memory: its owner's, or if a want of it is under way the rendezvous's."""
        under_way = {block for each in self.open.values() for block in each.blocks}
        if self.job.role == "sender" or not under_way:
            if not torch.equal(self.memory, self.owned):
                self._compare(range(len(self.memory)), "audit")
            return
        self._compare([block for block in range(len(self.memory)) if block not in under_way], "audit")
        for name, each in self.open.items():
            self._look_for_foreign(name, each)

    def _look_for_foreign(self, name: str, each: Open) -> None:
        """Numbers in the blocks of a want that neither were there before nor are the rendezvous's."""
        if each.is_foreign:
            return
        wrong = 0
        for piece in self.content.pieces(len(each.blocks)):
            found = self.memory[each.blocks[piece]]
            wrong += int(((found != each.rows[piece]) & (found != self.owned[each.blocks[piece]])).sum())
        if not wrong:
            return
        each.is_foreign = self.job.may_be_foreign
        if each.is_foreign:
            say("foreign", rendezvous=each.rendezvous)
        else:
            say("wrong", what=f"{name}: {wrong} numbers are neither old nor the rendezvous's")

    def _compare(self, blocks: Sequence[int], when: str) -> None:
        for piece in self.content.pieces(len(blocks)):
            ids = list(blocks[piece])
            wrong = self.memory[ids] != self.owned[ids]
            if wrong.any():
                block, place = wrong.nonzero()[0].tolist()
                which = [each for each, is_wrong in zip(ids, wrong.any(1).tolist(), strict=True) if is_wrong]
                found = int(self.memory[ids[block], place]) & 0xFFFF
                say("wrong", what=f"{when}: {int(wrong.sum())} numbers in blocks {which[:8]}, first {found:#x}")


def say(event: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    engine = Engine(msgspec.json.decode(sys.argv[1], type=Job))
    say("ready")
    engine.serve()
