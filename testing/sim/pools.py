"""Small pools, and which of their cells hold which row of which token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvbridge_proto.pool import Engine, Group, Layer, Pool, Region, Step
from msgspec.structs import replace

from kvbridge.loopback.pools import PARTS, Shape, describe

from .matter import CELL_BYTES, NOTHING, SimBlocks, spelled, written

HEADS = 2
WIDTH = CELL_BYTES // 2
LAYERS = 1
STATE_TOKENS = 64  # of a block, which holds one state: more than any prompt has
STATE_ROW = 200  # number of the first row of a state


@lru_cache(maxsize=4096)
def make_pool(shape: tuple[int, int, int, int, bool], identity: str, rank: int) -> Pool:
    """The pool of one rank of an engine of `shape` (ranks, block_tokens, blocks, layers of a draft model, with states).

    The ranks split the heads.
    """
    ranks, block_tokens, blocks, drafts, has_states = shape
    made = Shape(
        name=identity,
        axes="LPBTHE",
        block_tokens=block_tokens,
        blocks=blocks,
        tp_size=ranks,
        layers=LAYERS + drafts,
        kv_heads=HEADS,
        width=WIDTH,
    )
    pool = describe(made, rank)
    model = replace(pool.model, name="sim", depth=LAYERS, drafts=tuple(range(LAYERS, LAYERS + drafts)))
    pool = replace(pool, engine=Engine(kind="sim", version="1", id=identity), model=model)
    return _with_states(pool) if has_states else pool


def _with_states(pool: Pool) -> Pool:
    """And a layer with a recurrent state behind the others, of one row for each head."""
    (region,), (like, *_) = pool.regions, pool.planes
    number, blocks = len(pool.model.layers), pool.groups[0].blocks
    plane = replace(
        like,
        layer=number,
        part="state",
        group=1,
        offset=region.size_bytes,
        block_stride=like.heads * CELL_BYTES,
        token_axis=(Step(1, 0),),
        head_stride=CELL_BYTES,
    )
    layer = Layer(kind="state", kv_heads=HEADS, key_width=WIDTH, value_width=1)
    return replace(
        pool,
        model=replace(pool.model, layers=(*pool.model.layers, layer), depth=number + 1),
        groups=(*pool.groups, Group(kind="state", block_tokens=STATE_TOKENS, blocks=blocks)),
        regions=(Region(region.size_bytes + blocks * plane.block_stride),),
        planes=(*pool.planes, plane),
    )


@dataclass(frozen=True, slots=True)
class SimRows:
    """The rows of a pool, each as (first cell, cells per block, cells per token, number of the row).

    `states` are those of a state. A block has one, of all tokens before it.
    """

    rows: tuple[tuple[int, int, int, int], ...]
    states: tuple[tuple[int, int, int], ...] = ()

    def _cells(self, ids: Sequence[int], block_tokens: int, tokens: range) -> Iterator[tuple[int, int, int]]:
        """Each cell of these tokens, with its token and row."""
        for first, block_cells, token_cells, row in self.rows:
            for token in tokens:
                at = first + ids[token // block_tokens] * block_cells + token % block_tokens * token_cells
                yield at, token, row

    def state(self, block: int, prompt: int, tokens: int) -> Iterator[tuple[int, int]]:
        """Each cell of the state in this block after so many tokens, and what is written there."""
        for first, block_cells, row in self.states:
            yield first + block * block_cells, written(prompt, tokens - 1, row)

    def compute(self, blocks: SimBlocks, ids: Sequence[int], block_tokens: int, prompt: int, tokens: range) -> None:
        for at, token, row in self._cells(ids, block_tokens, tokens):
            blocks.cells[at] = written(prompt, token, row)

    def expect(self, blocks: SimBlocks, ids: Sequence[int], block_tokens: int, prompt: int, tokens: range) -> None:
        for at, token, row in self._cells(ids, block_tokens, tokens):
            is_draft = row >= LAYERS * len(PARTS) * HEADS  # no sender has these
            blocks.expected[at] = NOTHING if is_draft else written(prompt, token, row)

    def check(self, blocks: SimBlocks, ids: Sequence[int], request: str) -> None:
        """Check that every wanted row is there, when the engine was told so."""
        for at in self._all(ids):
            expected = blocks.expected.get(at)
            if expected is not None and blocks.cells[at] != expected:
                blocks.foul(f"{request} is done, but has {spelled(blocks.cells[at])} instead of {spelled(expected)}")
                return

    def copy(self, blocks: SimBlocks, ids: Sequence[int], to: Sequence[int]) -> None:
        """Copy the rows of these blocks into those."""
        for source, target in zip(self._all(ids), self._all(to), strict=True):
            blocks.cells[target] = blocks.cells[source]

    def forget(self, blocks: SimBlocks, ids: Sequence[int]) -> None:
        for at in self._all(ids):
            blocks.expected.pop(at, None)

    def waste(self, blocks: SimBlocks, ids: Sequence[int], value: int) -> None:
        """Overwrite the blocks with something else."""
        for at in self._all(ids):
            blocks.cells[at] = value

    def _all(self, ids: Sequence[int]) -> Iterator[int]:
        for first, block_cells, token_cells, _ in self.rows:
            for block in ids:
                yield from range(first + block * block_cells, first + (block + 1) * block_cells, token_cells)
        for first, block_cells, _ in self.states:
            yield from (first + block * block_cells for block in ids)


@lru_cache(maxsize=4096)
def rows_of(pool: Pool) -> SimRows:
    rows, states = [], []
    for plane in pool.planes:
        (step,) = plane.token_axis
        for head in range(plane.heads):
            if plane.part == "state":
                first = (plane.offset + head * plane.head_stride) // CELL_BYTES
                states.append((first, plane.block_stride // CELL_BYTES, STATE_ROW + plane.first_head + head))
                continue
            number = (plane.layer * len(PARTS) + PARTS.index(plane.part)) * HEADS + plane.first_head + head
            first = (plane.offset + head * plane.head_stride) // CELL_BYTES
            rows.append((first, plane.block_stride // CELL_BYTES, step.stride // CELL_BYTES, number))
    return SimRows(tuple(rows), tuple(states))
