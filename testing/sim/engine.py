"""Engines that keep the contract but use every freedom in it: they reuse blocks as soon as they may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from kvbridge_proto.common import Blocks as Piece
from kvbridge_proto.common import Rank as RankAddress
from kvbridge_proto.engine import (
    READERS_S,
    Abandon,
    Directory,
    Done,
    Expect,
    Failed,
    KeptBy,
    Offer,
    Reclaim,
    Released,
    ToEngine,
    Want,
    Withdraw,
)
from msgspec.structs import replace

from kvbridge.adapters.vllm.fetches import Fetch, Fetches

from .loop import ProcessLoop
from .matter import SimBlocks
from .rank import RETRY_S
from .rank import SimRank as SimRank

if TYPE_CHECKING:
    from .scenario import SimRequest
    from .world import World

GO_ON, STEP_S = 8, 0.004  # tokens that a prefill engine decodes after a prompt, and how long each takes
RENDEZVOUS_S = 3.0  # how long a request waits for blocks, or for all ranks to be attached


@dataclass(slots=True)
class HeldBlocks:
    """A request's blocks, and the ranks whose agents may still touch them."""

    number: int  # of its offer or want
    request: SimRequest
    blocks: list[int]
    open: set[int] = field(default_factory=set)
    tokens: int = 0
    fetched: int = 0  # tokens that are there already
    is_ended: bool = False  # the engine will say no more about it
    is_aborted: bool = False  # nobody waits for what is fetched
    said_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.name

    @property
    def is_waiting(self) -> bool:
        """Whether rows come into these blocks, and somebody waits for them."""
        return bool(self.open) and not self.is_aborted


class SimEngine:
    """All ranks of one engine and its scheduler, in one process that may die or freeze."""

    def __init__(
        self, world: World, name: str, agents: list[str], blocks: int, block_tokens: int, drafts: int, has_states: bool
    ) -> None:
        self.world = world
        self.name = name
        self.shape = (len(agents), block_tokens, blocks, drafts, has_states)
        self.block_tokens = block_tokens
        self.agents = agents
        self.starts = 0
        self.ranks = [SimRank(self, number, agent) for number, agent in enumerate(agents)]
        self.loop: ProcessLoop
        self.numbers = count(1)  # of offers and wants, also after a restart
        self.expected: dict[str, int] = {}  # requests that their agents know of and that have no blocks: their numbers
        self.held: dict[str, HeldBlocks] = {}
        self.waiting: dict[str, SimRequest] = {}
        self.free: list[int] = []
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.identity = f"{self.name}/{self.starts}"
        self.loop = ProcessLoop(self.world.clock, self.world.foul)
        self.held.clear()
        self.free = list(range(self.shape[2]))
        for rank in self.ranks:
            rank.begin()

    def die(self) -> None:
        for rank in self.ranks:
            rank.blocks.is_gone = True
            rank.hang_up()
        self.loop.is_dead = True
        for held in self.held.values():
            self.world.ended(self.prefills(held.request), held.request, "its engine died")
        for request in self.waiting.values():
            self.world.ended(self.prefills(request), request, "its engine died")
        self.held.clear()
        self.waiting.clear()

    @property
    def is_dead(self) -> bool:
        return self.loop.is_dead

    def prefills(self, request: SimRequest) -> bool:
        """Whether it computes this request's prompt, or else wants it."""
        return request.prefill == self.name

    def held_as(self, is_prefill: bool) -> list[HeldBlocks]:
        return [held for held in self.held.values() if self.prefills(held.request) is is_prefill]

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        self.loop.post(seconds, event)

    def here(self) -> None:
        """A rank was attached. If all are, tell their agents where each rank's agent is."""
        world = self.world
        if all(rank.is_here for rank in self.ranks):
            ranks = tuple(
                RankAddress(tp_rank=rank.number, pp_rank=0, address=world.address_of(rank.agent)) for rank in self.ranks
            )
            for rank in self.ranks:
                rank.say(Directory(ranks=ranks))

    def begin(self, request: SimRequest, tries: int = 0) -> None:
        """A request arrives. It waits a while for blocks."""
        # While a prompt is computed on, its state changes: what is offered is a copy.
        needed = self.rows_end(request.tokens) + (2 if self.prefills(request) else 1) * self.shape[4]
        self.waiting.pop(request.name, None)
        if len(self.free) < needed or not all(rank.is_here for rank in self.ranks):
            if tries * RETRY_S > RENDEZVOUS_S:
                self.turned_away(request)
                self.world.ended(self.prefills(request), request, "no room")
            else:
                self.short_of(needed - len(self.free))
                self.waiting[request.name] = request
                self.later(RETRY_S, lambda: self.begin(request, tries + 1))
            return
        number = self.expected.pop(request.name, 0) or next(self.numbers)
        held = HeldBlocks(number, request, [self.free.pop() for _ in range(needed)])
        self.held[request.name] = held
        self.go_on(held)

    def rows_end(self, tokens: int) -> int:
        """How many of a request's blocks hold rows of so many tokens. The blocks of its states are behind these."""
        return -(-tokens // self.block_tokens)

    def go_on(self, held: HeldBlocks) -> None:
        raise NotImplementedError

    def held_under(self, number: int) -> HeldBlocks | None:
        return next((held for held in self.held.values() if held.number == number), None)

    def short_of(self, blocks: int) -> None:
        """A new request waits for this many blocks."""

    def turned_away(self, request: SimRequest) -> None:
        """A request gave up waiting for blocks."""

    def preempt(self) -> None:
        """Take back all blocks that agents may read."""

    def answered(self, rank: SimRank, message: ToEngine) -> None:
        raise NotImplementedError

    def unread(self, rank: SimRank) -> None:
        """Reads of what was offered over this connection do not count any more."""

    def unwritten(self, rank: SimRank) -> None:
        """The agent's process is gone: nothing is written for what was wanted over this connection."""

    def gone(self, rank: SimRank) -> None:
        """The agent will answer nothing more over this connection, and no longer touches memory."""
        raise NotImplementedError

    def stream(self, rank: SimRank, work: Callable[[], None]) -> int:
        """Enqueue work on the engine's stream. It runs in order, even if the process is frozen or dead.

        Returns the fence's count that says it is done. Without fences it is done at once, and the count is 0.
        """
        world, blocks = self.world, rank.blocks
        if not world.has_fences:
            work()
            return 0
        rank.marks += 1
        mark = rank.marks

        def reach() -> None:
            work()
            blocks.reached = mark
            if (process := world.processes.get(rank.agent)) is not None:
                process.rouse()

        blocks.stream_at = max(blocks.stream_at, world.clock.now) + world.gather_s()
        world.clock.at(blocks.stream_at, reach)
        return mark

    def release_if_over(self, held: HeldBlocks, how: str) -> None:
        """Free the blocks once no agent may touch them. They are overwritten at once."""
        if held.open or not held.is_ended or held.request.name not in self.held:
            return
        del self.held[held.request.name]
        for rank in self.ranks:
            rank.rows.waste(rank.blocks, held.blocks, self.world.waste())
        self.free += held.blocks
        self.world.ended(self.prefills(held.request), held.request, how)


class Prefill(SimEngine):
    """Computes prompts piece by piece and offers them. A state changes with each piece, and goes on after the last.

    So it is offered as a copy, in a block of its own.
    """

    def go_on(self, held: HeldBlocks) -> None:
        request = held.request
        if held.is_ended or request.name not in self.held:
            return
        if not held.tokens and request.withdraw_s is not None:
            self.later(request.withdraw_s, lambda: self._withdraw(held))
        before, is_more = held.tokens or request.offered_from, bool(held.tokens)
        first = -(-before // self.block_tokens) if held.tokens else before // self.block_tokens
        held.tokens = min(request.tokens, max(before + request.piece_tokens, held.fetched))
        is_last = held.tokens == request.tokens
        ids = tuple(held.blocks[first : self.rows_end(held.tokens)])
        pieces = (Piece(0, first, ids),) if ids else ()
        if is_last and self.shape[4]:
            pieces = (*pieces, Piece(1, 0, (self.state_to_offer(held),)))
        for rank in self.ranks:
            fence = self._compute(rank, held, max(before, held.fetched))
            if is_more and rank.number not in held.open:
                continue  # it has ended there
            offer = Offer(
                number=held.number,
                rendezvous=request.rendezvous,
                request=request.name,
                tokens=held.tokens,
                blocks=pieces,
                is_last=is_last,
                is_more=is_more,
                hold_s=request.hold_s,
                fence=fence,
                first_token=request.offered_from,
                prefixes=(prefix_of(request),) if is_last and request.is_kept else (),
            )
            # As an adapter does: more of an offer that has ended is not said, and nobody would answer it.
            if (not is_more or rank.number in held.open) and rank.say(offer):
                held.open.add(rank.number)
        if is_last:
            held.is_ended = True
            self._go_on_after(held, 0)
            self.release_if_over(held, "nobody was told")
        else:
            self.later(request.piece_s, lambda: self.go_on(held))

    def short_of(self, blocks: int) -> None:
        for rank in self.ranks:
            if blocks > 0:
                rank.say(Reclaim(blocks=blocks))

    def _compute(self, rank: SimRank, held: HeldBlocks, before: int) -> int:
        """Write the rows of the new tokens. Returns the fence's count that says they are written."""
        request, tokens, blocks = held.request, range(before, held.tokens), rank.blocks
        ids = list(held.blocks)

        def compute() -> None:
            rank.rows.compute(blocks, ids, self.block_tokens, request.prompt, tokens)
            for block in ids[self.rows_end(request.tokens) :]:  # the state, and its copy
                self._put_state(rank, blocks, block, request, tokens.stop)

        return self.stream(rank, compute)

    def _put_state(self, rank: SimRank, blocks: SimBlocks, block: int, request: SimRequest, tokens: int) -> None:
        for at, value in rank.rows.state(block, request.prompt, tokens):
            blocks.cells[at] = value

    def state_to_offer(self, held: HeldBlocks) -> int:
        """The block of the copy, which nobody writes while the request goes on."""
        return held.blocks[-1]

    def _go_on_after(self, held: HeldBlocks, more: int) -> None:
        """Decode a few tokens, as long as the request has its blocks. Only its state changes that anybody reads."""
        if not self.shape[4] or more == GO_ON or self.held.get(held.request.name) is not held:
            return
        request, state = held.request, held.blocks[-2]
        for rank in self.ranks:

            def put(rank: SimRank = rank, blocks: SimBlocks = rank.blocks) -> None:
                if self.held.get(request.name) is held:
                    self._put_state(rank, blocks, state, request, request.tokens + more + 1)

            self.stream(rank, put)
        self.later(STEP_S, lambda: self._go_on_after(held, more + 1))

    def preempt(self) -> None:
        for held in self.held_as(True):
            self._withdraw(held)

    def _withdraw(self, held: HeldBlocks) -> None:
        if held.request.name not in self.held:
            return
        held.is_ended = True
        for rank in self.ranks:
            if rank.number in held.open:
                rank.say(Withdraw(number=held.number, reason="aborted", comes_again=self._comes_again(held.request)))
        if held.open and self.world.scenario.is_impatient:
            self.later(READERS_S, lambda: self._lose_patience(held))
        self.release_if_over(held, "withdrawn")

    def _comes_again(self, request: SimRequest) -> bool:
        """Whether the same prompt will be offered again."""
        others = (each for each in self.world.scenario.requests if each.number != request.number)
        return any(
            (each.prefill, each.rendezvous) == (self.name, request.rendezvous) and each.at > self.world.clock.now
            for each in others
        )

    def _lose_patience(self, held: HeldBlocks) -> None:
        """Take blocks although agents may still read them. Give these agents up, or stay connected."""
        if self.held.get(held.request.name) is not held:
            return
        if self.world.chance(0.5):
            for rank in self.ranks:
                if rank.number in held.open:
                    rank.give_up()
        held.open.clear()
        self.release_if_over(held, "taken back")

    def answered(self, rank: SimRank, message: ToEngine) -> None:
        match message:
            case Released(number=number, code=code):
                held = self.held_under(number)
                if held is not None:
                    held.open.discard(rank.number)
                    self.release_if_over(held, f"released {code}".strip())

    def unread(self, rank: SimRank) -> None:
        for held in self.held_as(True):
            held.open.discard(rank.number)
            self.release_if_over(held, "its agent was lost")

    def gone(self, rank: SimRank) -> None:
        Prefill.unread(self, rank)


class Decode(SimEngine):
    """Wants prompts, and checks every row of those that its agents say are done. Requests share fetches as in vLLM."""

    def __init__(self, *args: object) -> None:
        self._failed: dict[str, str] = {}
        super().__init__(*args)  # type: ignore[arg-type]

    def start(self) -> None:
        self._fetches = Fetches(lambda held: held.is_waiting)
        self._joined: dict[int, list[HeldBlocks]] = {}  # by the number of the want whose rows they get
        self._returned: set[int] = set()  # numbers of wants by which offers that nobody needs are given back
        super().start()

    def begin(self, request: SimRequest, tries: int = 0) -> None:
        if not request.queued_s or tries:
            return super().begin(request, tries)
        self.waiting[request.name] = request
        number = self.expected[request.name] = next(self.numbers)
        for rank in self.ranks:
            sender = self.world.address_of(request.sender, request.number)
            rank.say(Expect(number=number, rendezvous=request.rendezvous, sender=sender))
        self.later(request.queued_s, lambda: super(Decode, self).begin(request))

    def turned_away(self, request: SimRequest) -> None:
        if number := self.expected.pop(request.name, 0):
            for rank in self.ranks:
                rank.say(Abandon(number=number, reason="no room"))

    def go_on(self, held: HeldBlocks) -> None:
        request, world = held.request, self.world
        first_block = request.first_token // self.block_tokens
        rows_end = self.rows_end(request.tokens)
        ids, states = tuple(held.blocks[first_block:rows_end]), tuple(held.blocks[rows_end:])
        pieces = (*((Piece(0, first_block, ids),) if ids else ()), *(Piece(1, 0, (state,)) for state in states))
        held.is_ended, held.said_at = True, world.clock.now
        held.open = {rank.number for rank in self.ranks}
        is_some = request.first_token < request.tokens
        want = Want(
            number=held.number,
            request=request.name,
            rendezvous=request.rendezvous,
            sender=world.address_of(request.sender, request.joins or request.number),
            first_token=request.first_token,
            end_token=request.tokens,
            blocks=pieces if is_some else (),
            deadline_s=request.deadline_s,
            common=str(held.number),
            is_offered=world.is_offered(request),
        )
        for rank in self.ranks:
            rank.rows.expect(
                rank.blocks, held.blocks, self.block_tokens, request.prompt, range(request.first_token, request.tokens)
            )
            if is_some:
                for state in states:
                    rank.blocks.expected.update(rank.rows.state(state, request.prompt, request.tokens))
        if request.abandon_s is not None:
            self.later(request.abandon_s, lambda: self._abandon(held))
        fetch = self._fetches.find(want, None) if request.joins and is_some else None
        if fetch is not None and fetch.brings(want.first_token, want.end_token):
            self._join(held, want, fetch)
        else:
            self._fetch(held, want, ids + states)

    def _fetch(self, held: HeldBlocks, want: Want, ids: tuple[int, ...]) -> None:
        self._fetches.begin(held, want)
        for rank in self.ranks:
            fence = self.stream(rank, partial(self._hand_over, rank, rank.blocks, held, ids))
            if not rank.say(replace(want, fence=fence)):
                held.open.discard(rank.number)
                self._failed[held.request.name] = "nobody was told"
                self._take_back(rank, held)
        self._over(held)

    def _hand_over(self, rank: SimRank, blocks: SimBlocks, held: HeldBlocks, ids: tuple[int, ...]) -> None:
        """Let the agent write these blocks. An earlier forward pass has just written to them for the last time."""
        if rank.number in held.open and self.held.get(held.request.name) is held:
            rank.rows.waste(blocks, ids, self.world.waste())
            blocks.wanted.update(dict.fromkeys(ids, held.request.name))

    def _join(self, held: HeldBlocks, want: Want, fetch: Fetch) -> None:
        """Its blocks get copies of the rows that this fetch brings, at each rank once they are there."""
        source = fetch.requests[fetch.want.number]
        nothing = replace(want, number=next(self.numbers), first_token=want.end_token, blocks=())
        self._fetches.join(held, want, fetch, nothing)
        self._joined.setdefault(fetch.want.number, []).append(held)
        for rank in self.ranks:
            if rank.number not in source.open:
                self._share(rank, source, held)
        self._over(held)

    def _share(self, rank: SimRank, source: HeldBlocks, held: HeldBlocks) -> None:
        if rank.number not in held.open:
            return
        held.open.discard(rank.number)
        if code := self._failed.get(source.request.name, ""):
            if code == "aborted":
                self.world.foul(f"{source.request.name} was given up, though {held.request.name} needs its rows")
            self._failed[held.request.name] = code
        else:
            rank.rows.copy(rank.blocks, source.blocks, held.blocks)
            rank.rows.check(rank.blocks, held.blocks, held.request.name)
        self._take_back(rank, held)

    def _abandon(self, held: HeldBlocks) -> None:
        """Its client has gone away."""
        if self.held.get(held.request.name) is not held:
            return
        may_keep, held.is_aborted = held.request.name not in self._fetches, True
        for abandon in self._fetches.ended(held.request.name, "aborted"):
            if self._leaves(abandon.number):
                continue
            for rank in self.ranks:
                if (given_up := self.held_under(abandon.number)) is not None and rank.number in given_up.open:
                    rank.say(abandon)
        if may_keep:
            self.fetched(held)
        self._over(held)

    def _leaves(self, number: int) -> bool:
        """Whether this one had joined another: its blocks are not written any more."""
        for joined in self._joined.values():
            for held in joined:
                if held.number == number:
                    joined.remove(held)
                    held.open.clear()
                    self._failed[held.request.name] = "aborted"
                    for rank in self.ranks:
                        self._take_back(rank, held)
                    return True
        return False

    def answered(self, rank: SimRank, message: ToEngine) -> None:
        match message:
            case Done(number=number) | Failed(number=number) if number in self._returned:
                return
            case Done(number=number, request=name) | Failed(number=number, request=name):
                held = self.held_under(number)
                if held is None or rank.number not in held.open:
                    if isinstance(message, Failed) and message.code == "not_attached":
                        return  # it was abandoned and has ended
                    self.world.foul(f"{rank.blocks.name}: {name} was answered twice, the second time by {message}")
                    return
                held.open.discard(rank.number)
                if isinstance(message, Done):
                    rank.rows.check(rank.blocks, held.blocks, name)
                else:
                    self._failed[name] = message.code
                    if message.code == "deadline":
                        self.world.waited(held)
                    if message.code == "peer_unreachable" and "is gone" in message.reason:
                        self.world.given_up(held)
                    if message.code == "digest_mismatch":
                        self.world.on_mismatch(name)
                self.world.answered(self, rank, held)
                self._came(rank, held)

    def _came(self, rank: SimRank, held: HeldBlocks) -> None:
        """This rank's rows are there, or never will be."""
        self._take_back(rank, held)
        joined = list(self._joined.get(held.number, ()))
        for each in joined:
            self._share(rank, held, each)
        self._over(held)
        for each in joined:
            self._over(each)

    def _over(self, held: HeldBlocks) -> None:
        if held.open or self.held.get(held.request.name) is not held:
            return
        code = self._failed.pop(held.request.name, "")
        if code:
            self._fetches.failed({held.request.name}, set())
        _, returned = self._fetches.reported(held.request.name)
        for want in returned:
            self._returned.add(want.number)
            for rank in self.ranks:
                rank.say(want)
        self._joined.pop(held.number, None)
        if not code and not held.is_aborted:
            self.fetched(held)
        self.release_if_over(held, f"failed {code}" if code else "aborted" if held.is_aborted else "done")

    def fetched(self, held: HeldBlocks) -> None:
        """The engine has all rows of this request, and may go on with it."""

    def _take_back(self, rank: SimRank, held: HeldBlocks) -> None:
        for block in held.blocks:
            rank.blocks.wanted.pop(block, None)
        rank.rows.forget(rank.blocks, held.blocks)

    def gone(self, rank: SimRank) -> None:
        self.unwritten(rank)

    def unwritten(self, rank: SimRank) -> None:
        for held in self.held_as(False):
            if rank.number in held.open and self.held.get(held.request.name) is held:
                held.open.discard(rank.number)
                self._failed[held.request.name] = "its agent was lost"
                self._came(rank, held)


class Both(Decode, Prefill):
    """Computes some prompts and wants others, as the two engines of a chat do whose answers go back."""

    def go_on(self, held: HeldBlocks) -> None:
        (Prefill if self.prefills(held.request) else Decode).go_on(self, held)

    def begin(self, request: SimRequest, tries: int = 0) -> None:
        (SimEngine if self.prefills(request) else Decode).begin(self, request, tries)

    def turned_away(self, request: SimRequest) -> None:
        if not self.prefills(request):
            super().turned_away(request)

    def fetched(self, held: HeldBlocks) -> None:
        """Go on with it, in its blocks: compute what follows, and offer all."""
        after = self.world.goes_on(held.request)
        if after is None:
            return
        more = self.rows_end(after.tokens) - len(held.blocks)
        if len(self.free) < more:
            return self.world.ended(True, after, "no room")
        blocks = [*held.blocks, *(self.free.pop() for _ in range(more))]
        held.blocks = []
        its = self.held[after.name] = HeldBlocks(next(self.numbers), after, blocks, fetched=held.request.tokens)
        Prefill.go_on(self, its)

    def answered(self, rank: SimRank, message: ToEngine) -> None:
        match message:
            case Released():
                Prefill.answered(self, rank, message)
            case KeptBy(rendezvous=rendezvous, prefixes=prefixes):
                self.world.heard_kept(self, rendezvous, prefixes)
            case _:
                Decode.answered(self, rank, message)

    def gone(self, rank: SimRank) -> None:
        Prefill.unread(self, rank)
        Decode.gone(self, rank)


def prefix_of(request: SimRequest) -> bytes:
    """Stands for the digest of what an answer begins with."""
    return request.prompt.to_bytes(20, "big")
