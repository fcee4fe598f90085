"""The copier on a GPU: kernels on three streams, copies to and from host slots on two more, and no call waits.

Gathers and scatters have a stream each, so that incoming chunks do not queue behind outgoing ones. Pulls take turns on
two, so that one launch fills the multiprocessors that the one before leaves at its end. Buffers and events are made in
advance; a move takes one bundle of them and gives it back at its end.

A small pull that others follow is launched by `poll`, once a bundle is free, together with them."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from kvbridge_kernels.clear import warm as warm_clear
from kvbridge_kernels.kernel import Kernel
from kvbridge_kernels.launch import ENOUGH_PROGRAMS, Launch, NotCompiled, chunks_at_once, move, prepare, warm
from kvbridge_kernels.prepared import Placed
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import TABLE_BYTES, Kernels, Work

from ..device import driver
from ..errors import EngineError, KVBridgeError
from ..geometry.plan import Part, Plan, any_tables
from ..geometry.tokens import BlockTable
from .copier import BlockCopier, Compiling, DeviceLost, Moved, compared
from .memory import AttachedPool, PartSide
from .small_pulls import SMALL_PULL_BYTES, SmallPull, SmallPulls
from .staging import Staging

log = logging.getLogger("kvbridge.data_plane")


@dataclass(slots=True)
class _Bundle:
    """What one move needs besides its slot."""

    work: Work
    sums: torch.Tensor  # int64 [1] on the GPU: the sum of the digests of all its moves so far
    total: torch.Tensor  # the same, pinned
    before: int = 0  # the total at the end of the last move
    halfway: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    end: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def fetch(self, stream: torch.cuda.Stream) -> None:
        """Enqueue a copy of the total to the host."""
        size_bytes = self.total.itemsize
        driver.copy_to_host(self.total.data_ptr(), self.sums.data_ptr(), size_bytes, stream.cuda_stream)

    def digest(self) -> int:
        """The digest of the move that just ended. Sums are never reset: that would cost a launch before each move."""
        total = int(self.total)
        found, self.before = (total - self.before) % (1 << 64), total
        return found


@dataclass(frozen=True, slots=True)
class _GpuMove:
    tickets: Sequence[int]  # several of pulls that share launches
    pool: AttachedPool | None
    bundle: _Bundle
    expected: int | None
    has_digest: bool
    sender: AttachedPool | None = None  # the peer's pool that is read


class GpuBlockCopier(BlockCopier):
    """Keeps the contract of `copier.BlockCopier`. At most `moves` moves and `pulls` launches of pulls at once.

    Each move has room, pinned and on the GPU, for where its rows are: 8 bytes per token and list of places, a sixteenth
    of `slot_bytes` in all, and TABLE_BYTES at least. geometry/group_plan.py cuts chunks accordingly. A pull takes at
    most `pull_ctas` CTAs. None means few if they run beside the engine's own (MPS), and all if they take turns. With
    `only_fills`, pulls read zeros of our own only, and no peer pulls from us. The caller's thread compiles new kernels.
    With `aside` another does, and a move that needs some raises Compiling.
    """

    memory = "vram"
    digests = ("sum64",)
    brief_bytes = sys.maxsize  # it is only enqueued

    def __init__(
        self,
        gpu: driver.Gpu,
        moves: int,
        slot_bytes: int = 0,
        pulls: int = 0,
        pull_ctas: int | None = None,
        *,
        only_fills: bool = False,
        aside: bool = False,
    ) -> None:
        super().__init__()
        self._pull_ctas = pull_ctas or (ENOUGH_PROGRAMS if gpu.is_under_mps else None)
        self._kept = moves  # bundles for moves that do not check `has_room`
        self._has_pulls = pulls > 0 and not only_fills
        self._table_bytes = max(TABLE_BYTES, slot_bytes // 16)
        self._gpu = gpu
        self.use_here()
        self.description = f"{torch.cuda.get_device_name(gpu.ordinal)} {gpu.uuid}" + " (MPS)" * gpu.is_under_mps
        self.device = gpu.device
        self._streams = [torch.cuda.ExternalStream(driver.new_stream(gpu, priority=-1), gpu.ordinal) for _ in range(5)]
        self._out, self._down, self._in, self._up, aside_of_in = self._streams
        # With few CTAs each launch takes all that it may: two at once would take twice as many.
        self._pulling = deque([self._in] if self._pull_ctas else [self._in, aside_of_in])
        self._torch_device = torch.device("cuda", gpu.ordinal)
        self._kernels = Kernels()  # shared by all bundles
        self._compiles, self._compiler = not aside, Compiler(gpu)
        self._compiler.call(warm_clear)
        self._bundles: deque[_Bundle] = deque()
        self._make_bundles(moves + pulls)
        self._known = self._bundles[0].work  # to look up kernels, which all bundles share
        self._moves: deque[_GpuMove] = deque()
        self._small = SmallPulls()

    def use_here(self) -> None:
        self._gpu.use()  # torch does nothing if a thread has its device already, as every thread has the first
        torch.cuda.set_device(self._gpu.ordinal)

    def make_room(self, moves: int) -> None:
        self._make_bundles(moves)
        self._kept += moves

    def _make_bundles(self, count: int) -> None:
        """Make `count` more."""
        device = self._torch_device
        totals = torch.zeros(count, dtype=torch.int64).pin_memory()
        sums = totals.to(device)  # not zeros on the GPU: loading torch's own kernels would take 92 MiB of it
        for i in range(count):
            copy, compiles = driver.copy_to_device, self._compiles
            work = Work(device, self._table_bytes, copy=copy, compiles=compiles, kernels=self._kernels)
            self._bundles.append(_Bundle(work, sums[i : i + 1], totals[i : i + 1]))
        torch.cuda.current_stream().synchronize()

    def staging(self, slot_bytes: int, slots: int) -> Staging:
        return Staging.on_gpu(slot_bytes, slots)

    def gather(self, pool: AttachedPool, part: Part, slot: Span, digest_kind: str, host: Span | None = None) -> int:
        def enqueue(bundle: _Bundle) -> None:
            with pool.hold() as regions:
                placed = self._templates.of(PartSide(pool, regions, part), None, slot.size_bytes)
                move(placed, bundle.work, slot, bundle.sums, self._out)
            bundle.fetch(self._out)
            if host is None:
                bundle.end.record(self._out)
                return
            bundle.halfway.record(self._out)
            self._down.wait_event(bundle.halfway)
            driver.copy_to_host(host.address, slot.address, slot.size_bytes, self._down.cuda_stream)
            bundle.end.record(self._down)

        return self._begin(enqueue, pool, None, True)

    def digest(self, pool: AttachedPool, part: Part) -> int:
        def enqueue(bundle: _Bundle) -> None:
            with pool.hold() as regions:
                placed = self._templates.of(PartSide(pool, regions, part), None, part.chunk.size_bytes)
                move(placed, bundle.work, None, bundle.sums, self._out)
            bundle.fetch(self._out)
            bundle.end.record(self._out)

        return self._begin(enqueue, pool, None, True)

    def scatter(
        self, pool: AttachedPool, part: Part, slot: Span, digest_kind: str, expected: int, host: Span | None = None
    ) -> int:
        def enqueue(bundle: _Bundle) -> None:
            with pool.hold() as regions:
                placed = self._templates.of(None, PartSide(pool, regions, part), slot.size_bytes)
                if host is not None:
                    warm(placed, bundle.work, slot, True)  # raises NotCompiled before anything is enqueued
                    driver.copy_to_device(slot.address, host.address, slot.size_bytes, self._up.cuda_stream)
                    bundle.halfway.record(self._up)
                    self._in.wait_event(bundle.halfway)
                move(placed, bundle.work, slot, bundle.sums, self._in)
            bundle.fetch(self._in)
            bundle.end.record(self._in)

        return self._begin(enqueue, pool, expected, True)

    def pull(
        self,
        sender: AttachedPool,
        theirs: Part,
        pool: AttachedPool,
        ours: Part,
        has_digest: bool = False,
        others_follow: bool = False,
    ) -> int:
        with sender.hold() as sender_regions, pool.hold() as regions:
            sides = PartSide(sender, sender_regions, theirs), PartSide(pool, regions, ours)
            pull = self._templates.of(*sides, ours.chunk.size_bytes)
            is_shared = (others_follow or len(self._small) > 0) and self._has_pulls and not has_digest
            is_small = is_shared and ours.chunk.size_bytes <= SMALL_PULL_BYTES
            most = chunks_at_once(pull.prepared, self._known) if is_small else 0
            if not most:
                return self._pull(sender, pool, pull, has_digest)
        self._count += 1
        self._small.add(SmallPull((self._count,), sender, pool, pull, most))
        return self._count

    def _pull(
        self,
        sender: AttachedPool,
        pool: AttachedPool,
        pull: Placed,
        has_digest: bool,
        tickets: Sequence[int] = (),
    ) -> int:
        def enqueue(bundle: _Bundle) -> None:
            stream = self._pulling[0]
            self._pulling.rotate()
            move(pull, bundle.work, None, bundle.sums if has_digest else None, stream, self._pull_ctas)
            if has_digest:
                bundle.fetch(stream)
            bundle.end.record(stream)

        return self._begin(enqueue, pool, None, has_digest, sender, tickets)

    def _pull_small(self) -> list[Moved]:
        """Launch small pulls, as many together as can be. Returns those that could not be launched."""
        failed: list[Moved] = []
        while self._small and len(self._bundles) > self._kept:
            small = self._small.take()
            try:
                with small.sender.hold(), small.receiver.hold():
                    self._pull(small.sender, small.receiver, small.pull, False, small.tickets)
            except Exception as error:
                log.exception("small pulls could not be launched: pulls=%d", len(small.tickets))
                code = error.code if isinstance(error, KVBridgeError) else "pull_failed"
                failure = code, f"{type(error).__name__}: {error}"
                failed += [Moved(ticket, failure=failure) for ticket in small.tickets]
        return failed

    def warm(self, pool: AttachedPool, part: Part, slot: Span | None) -> None:
        size_bytes = part.chunk.size_bytes
        with pool.hold() as regions:
            side = PartSide(pool, regions, part)
            source, target = (side, None) if part.is_sender else (None, side)
            placed = self._templates.of(source, target, size_bytes)
            if slot is not None:
                self._compile(placed, Span(slot.address, size_bytes), True)
            if part.is_sender and self._has_pulls:  # receivers may ask for digests of what they read
                self._compile(placed, None, True)

    def warm_pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool) -> None:
        with sender.hold() as sender_regions, nullcontext(sender_regions) if sender is pool else pool.hold() as regions:
            sides = PartSide(sender, sender_regions, theirs), PartSide(pool, regions, ours)
            self._compile(self._templates.of(*sides, ours.chunk.size_bytes), None, has_digest)

    def await_pull(
        self, sender: AttachedPool, plan: Plan, pool: AttachedPool, tables: Mapping[int, BlockTable]
    ) -> None:
        stand_ins = any_tables(plan, sender.pool)
        with sender.hold() as sender_regions, pool.hold() as regions:
            for chunk in map(plan.chunk, range(plan.chunks)):
                source = PartSide(sender, sender_regions, Part(plan, chunk, stand_ins, True))
                target = PartSide(pool, regions, Part(plan, chunk, tables, False))
                pull = self._templates.await_source(source, target, chunk.size_bytes)
                self._compile(pull, None, False)
                pull.list_target()

    def _compile(self, placed: Placed, slot: Span | None, has_digest: bool) -> None:
        """Begin to compile the kernels that are missing. Without a free bundle, do nothing."""
        if not self._bundles:
            return
        work = self._bundles[0].work
        try:
            warm(placed, work, slot, has_digest)
        except NotCompiled as missing:
            self._compiler.begin(missing.launches, work, _try_to_prepare)

    @property
    def compiling(self) -> int:
        return self._compiler.under_way

    def copy(self, source: Span, target: Span) -> int:
        def enqueue(bundle: _Bundle) -> None:
            size_bytes = min(source.size_bytes, target.size_bytes)
            driver.copy_on_device(target.address, source.address, size_bytes, self._out.cuda_stream)
            bundle.end.record(self._out)

        return self._begin(enqueue, None, None, False)

    def fill(self, span: Span, content: bytes) -> None:
        held = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        driver.copy_to_device(span.address, held.data_ptr(), min(span.size_bytes, len(content)), self._up.cuda_stream)
        self._up.synchronize()

    def read(self, span: Span) -> bytes:
        held = torch.empty(span.size_bytes, dtype=torch.uint8)
        driver.copy_to_host(held.data_ptr(), span.address, span.size_bytes, self._down.cuda_stream)
        self._down.synchronize()
        return held.numpy().tobytes()

    @property
    def has_room(self) -> bool:
        return len(self._bundles) > self._kept and self._small.has_room

    def poll(self) -> list[Moved]:
        over: list[Moved] = []
        for _ in range(len(self._moves)):
            move = self._moves.popleft()
            if not move.bundle.end.query():
                self._moves.append(move)
                continue
            digest = move.bundle.digest() if move.has_digest else 0
            over += [compared(ticket, digest, move.expected) for ticket in move.tickets]
            self._bundles.append(move.bundle)
        return over + self._pull_small()

    def is_using(self, pool: AttachedPool) -> bool:
        return self._small.is_using(pool) or any(pool in (move.pool, move.sender) for move in self._moves)

    def close(self) -> None:
        self._compiler.close()
        for stream in self._streams:
            stream.synchronize()
        self._moves.clear()
        self._small.clear()

    def _begin(
        self,
        enqueue: Callable[[_Bundle], None],
        pool: AttachedPool | None,
        expected: int | None,
        has_digest: bool,
        sender: AttachedPool | None = None,
        tickets: Sequence[int] = (),
    ) -> int:
        """Begin a move with the next ticket, or with those that it got before."""
        if not self._bundles:
            raise EngineError("too_many_moves", f"moves: {len(self._moves)} are under way")
        bundle = self._bundles.popleft()
        try:
            enqueue(bundle)
        except NotCompiled as missing:
            self._bundles.append(bundle)
            raise self._compiler.begin(missing.launches, bundle.work) from None
        except BaseException:
            # Part of the move may be on a stream, and the memory it uses may be reused once this returns.
            try:
                for stream in self._streams:
                    stream.synchronize()
                bundle.before = int(bundle.sums)
            except RuntimeError as error:
                raise DeviceLost(str(error)) from error
            self._bundles.append(bundle)
            raise
        if not tickets:
            self._count += 1
            tickets = (self._count,)
        self._moves.append(_GpuMove(tickets, pool, bundle, expected, has_digest, sender))
        return tickets[0]


class Compiler:
    """The compiler for one GPU. Only the compilation itself runs on its own thread: other moves do not wait.

    Triton keeps what it compiles in a cache that outlives the process (TRITON_CACHE_DIR).
    """

    def __init__(self, gpu: driver.Gpu) -> None:
        self._thread = ThreadPoolExecutor(1, "kvbridge-compiler", lambda: _use(gpu))
        self._begun: dict[Kernel, Future[None]] = {}

    def begin(
        self, launches: Sequence[Launch], work: Work, compiles: Callable[[Launch, Work], None] = prepare
    ) -> Compiling:
        """Compile what these launches need, unless that is under way. Raises the error of an earlier attempt."""
        under_way = []
        for launch in launches:
            begun = self._begun.get(launch.kernel)
            if begun is not None and begun.done():
                del self._begun[launch.kernel]
                if (error := begun.exception()) is not None:
                    raise error
                continue  # compiled after the caller found it missing
            if begun is None:
                begun = self._begun[launch.kernel] = self._thread.submit(compiles, launch, work)
            under_way.append(begun)
        return Compiling(lambda: all(each.done() for each in under_way))

    @property
    def under_way(self) -> int:
        return sum(not begun.done() for begun in list(self._begun.values()))

    def call(self, compiles: Callable[[], None]) -> None:
        """Call `compiles` on the thread, without waiting. What it raises is lost."""
        self._thread.submit(compiles)

    def close(self) -> None:
        """Wait for the compilation under way, and begin no other. Idempotent."""
        self._thread.shutdown(cancel_futures=True)


def _try_to_prepare(launch: Launch, work: Work) -> None:
    """Before anybody needs it. If it fails, whoever needs it tries again, and has an error of its own."""
    try:
        prepare(launch, work)
    except Exception:
        log.warning("a kernel could not be compiled in advance", exc_info=True)


def _use(gpu: driver.Gpu) -> None:
    """Use a stream of the thread's own: the launch for no tiles must not wait for another stream."""
    torch.cuda.set_device(gpu.ordinal)
    torch.cuda.set_stream(torch.cuda.ExternalStream(driver.new_stream(gpu), gpu.ordinal))
