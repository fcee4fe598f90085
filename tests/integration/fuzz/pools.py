"""A peer's pool, with whatever it claims, against one of ours: judged, planned or refused by name, in bounded time."""

from __future__ import annotations

from random import Random

import msgspec
from kvbridge_proto.common import Blocks
from kvbridge_proto.framing import encode
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Count, Pool

from kvbridge.errors import KVBridgeError
from kvbridge.geometry.compat import Incompatible, check_pool, verdict
from kvbridge.geometry.plan import Part, Plan, Planner
from kvbridge.geometry.shard import assign, common
from kvbridge.geometry.tokens import BlockTable, TokenShard
from testing.pools import More, Shape, describe, mla
from tests.integration.fuzz.mutate import Mutator
from tests.integration.fuzz.target import Target
from tests.integration.fuzz.typed import drawer, varied

SLOT_BYTES = (1 << 12, 1 << 16, 4 << 20)
SHAPES = (
    Shape(),
    Shape("hnd", block_tokens=32),
    Shape("cross_layer", layers=3, codec="fp8_e4m3", scales={"k": (0.5,), "v": (0.25,)}),
    Shape("packed", codec="int8", block_tokens=1),
    Shape("cpu_vec", block_tokens=32),
    Shape(codec="fp8_row_scale"),
    Shape(kinds=("full", "sliding"), window=24),
    Shape(kinds=("state", "full")),
    Shape(tp_size=2),
    Shape(layers=4, pp_size=2),
    Shape(cp_size=2, cp_interleave=4),
    mla(),
    mla(codec="fp8_ds_mla"),
    mla(more=(More("index_key", codec="fp8_row_scale", page_tokens=8, layers=(1,)),), block_tokens=32),
    Shape(more=(More("x", heads=8, is_cut=True), More("b"))),
)


class Handshake(msgspec.Struct, frozen=True, array_like=True):
    """One of our pools, theirs, and what is then asked for."""

    ours: Count
    is_sender: bool
    slot: Count
    first_token: Count
    end_token: Count
    takes: tuple[Take, ...]
    theirs: Pool


class Pools(Target):
    """Nothing but named errors; chunks fit slots; what is read or written of ours lies in our blocks."""

    name, kind = "pools", Handshake

    def __init__(self) -> None:
        self._ours = [describe(shape) for shape in SHAPES]
        self._takes, self._pool = drawer(tuple[Take, ...]), drawer(Pool)
        self._mutator = Mutator([encode(self._handshake(Random(seed), pool)) for seed, pool in enumerate(self._ours)])

    def _handshake(self, random: Random, theirs: Pool) -> Handshake:
        first = random.choice((0, 0, 1, 16, 33, 1 << 20, 1 << 39))
        end = first + random.choice((0, 1, 16, 100, 100, 1 << 20, 1 << 39))
        takes = self._takes(random) if random.random() < 0.3 else ()
        ours = random.randrange(len(self._ours)) if random.random() < 0.3 else self._index(theirs)
        return Handshake(ours, random.random() < 0.5, random.randrange(3), first, end, takes, theirs)

    def _index(self, pool: Pool) -> int:
        return next((i for i, each in enumerate(self._ours) if each.model == pool.model), 0)

    def frame(self, random: Random) -> bytes:
        choice = random.random()
        if choice < 0.1:
            return self._mutator.frame(random)
        theirs = self._pool(random) if choice < 0.15 else random.choice(self._ours)
        return encode(self._handshake(random, varied(random, theirs, random.choice((0, 1, 1, 2, 3, 5)))))

    def judge(self, said: Handshake) -> None:
        ours = self._ours[said.ours % len(self._ours)]
        sender, receiver = (ours, said.theirs) if said.is_sender else (said.theirs, ours)
        found = verdict(sender, receiver)
        if isinstance(found, Incompatible):
            assert found.reasons and all(0 < len(reason) <= 1024 for reason in found.reasons)
            return
        assert not check_pool(said.theirs)
        slot_bytes = SLOT_BYTES[said.slot % len(SLOT_BYTES)]
        planner = Planner(sender, receiver)
        for part in planner.samples(slot_bytes, said.is_sender):
            _check_places(part, ours)
        try:
            assign([sender], receiver)
        except KVBridgeError as error:
            assert error.code in ("rows_not_held", "sender_ranks_mismatch")
        try:
            takes = said.takes or common(sender, receiver)
            plan = planner.plan(takes, said.first_token, said.end_token, slot_bytes)
        except KVBridgeError as error:
            assert error.code in ("bad_tokens", "bad_take", "slot_too_small"), error.code
            return
        assert Planner(sender, receiver).plan(takes, said.first_token, said.end_token, slot_bytes).digest == plan.digest
        _check_chunks(plan, slot_bytes)
        _check_parts(plan, ours, said.is_sender)


def _check_chunks(plan: Plan, slot_bytes: int) -> None:
    for index in {0, 1, plan.chunks // 2, plan.chunks - 1}:
        if 0 <= index < plan.chunks:
            chunk = plan.chunk(index)
            assert 0 < chunk.size_bytes <= slot_bytes and chunk.needs_tokens <= plan.end_token, chunk
    if plan.chunks <= 64:
        assert plan.total_bytes == sum(plan.chunk(index).size_bytes for index in range(plan.chunks))


def _check_parts(plan: Plan, ours: Pool, is_sender: bool) -> None:
    """Where our blocks are enough for the tokens, nothing outside them is named."""
    token_shard = TokenShard.of(ours.shard)
    entries = [-(-token_shard.count(plan.end_token) // group.block_tokens) for group in ours.groups]
    if max(entries) > 1000:
        return
    tables = {
        index: BlockTable.of(
            group, Blocks(index, 0, tuple(i % group.blocks for i in range(count))), token_shard=token_shard
        )
        for index, (group, count) in enumerate(zip(ours.groups, entries, strict=True))
    }
    for index in range(min(plan.chunks, 8)):
        _check_places(Part(plan, plan.chunk(index), tables, is_sender), ours)


def _check_places(part: Part, ours: Pool) -> None:
    for move in part.moves():
        plane, group = move.plane, ours.groups[move.plane.group]
        units = 1
        for step in plane.token_axis:
            units *= step.count
        assert move.first_head >= 0 and move.first_head + move.heads <= plane.heads
        if len(move.places):
            assert move.places.min() >= 0 and move.places.max() < group.blocks * units, move
        assert move.slot_offset + move.size_bytes <= part.chunk.size_bytes
