"""Ranks of an engine's own pools whose rows have scales apart, and real agents that carry a prompt between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvbridge_proto.common import Blocks

from kvbridge.adapters.engine.memory import Memory
from testing.agents import OracleEngine, agent
from tests.integration.adapters.small import held

TOKENS = 300


@dataclass
class Part:
    """Bytes of a layer's part. `at` says where slots lie: `bytes[at(slots)]` is [slots, heads, bytes of a row]."""

    bytes: torch.Tensor
    at: Callable[[torch.Tensor], tuple[Any, ...]]
    row: int


Parts = dict[tuple[int, str], Part]  # by layer and name
Truth = dict[tuple[int, str], torch.Tensor]


def truth(parts: Parts, heads: int) -> Truth:
    """Rows and scales of all heads that no two tokens, parts or layers share."""
    generator = torch.Generator().manual_seed(TOKENS)
    return {
        key: torch.randint(0, 256, (TOKENS, heads, each.row), dtype=torch.uint8, generator=generator)
        for key, each in parts.items()
    }


def slots_of(table: Sequence[int], page: int, first: int, end: int) -> torch.Tensor:
    token = torch.arange(first, end)
    return torch.tensor(table)[token // page] * page + token % page


def table_of(page: int, slots: int, seed: int) -> list[int]:
    """Pages of a prompt in any order, without page 0, which is nobody's."""
    order = torch.randperm(slots // page - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return order[: -(-TOKENS // page)].tolist()


@dataclass
class Rank:
    """A pool with its description; what it holds at first is anything. Of a layer, tokens from `first` on are kept."""

    memory: Memory
    parts: Parts
    page: int
    first: dict[int, int] = field(default_factory=dict)
    heads: slice = field(init=False)

    def __post_init__(self) -> None:
        for storage in self.memory.storages:
            torch.empty(0, dtype=torch.uint8).set_(storage).random_(256)
        plane = self.memory.pool.planes[0]
        self.heads = slice(plane.first_head, plane.first_head + plane.heads)

    def write(self, expected: Truth, table: list[int]) -> None:
        for key, each in self.parts.items():
            first = self.first.get(key[0], 0)
            each.bytes[each.at(slots_of(table, self.page, first, TOKENS))] = expected[key][first:, self.heads]

    def assert_came(self, found: Sequence[Any], expected: Truth, table: list[int]) -> None:
        """All bytes that were `found` are as before but the rows. What follows a page's last token may be anything."""
        whole = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in self.memory.storages]
        came = [torch.from_numpy(region) for region in found]
        before = [each.clone() for each in whole]
        _load(whole, came)
        tail = slots_of(table, self.page, TOKENS, -(-TOKENS // self.page) * self.page)
        rest = {key: each.bytes[each.at(tail)].clone() for key, each in self.parts.items()}
        _load(whole, before)
        self.write(expected, table)
        for key, each in self.parts.items():
            each.bytes[each.at(tail)] = rest[key]
        wrong = [number for number, pair in enumerate(zip(whole, came, strict=True)) if not torch.equal(*pair)]
        assert not wrong, [plane.name for plane in self.memory.pool.planes if plane.region in wrong]


def _load(whole: Sequence[torch.Tensor], regions: Sequence[torch.Tensor]) -> None:
    for each, region in zip(whole, regions, strict=True):
        each.copy_(region)


def carry(
    folder: Path,
    senders: list[Rank],
    given: list[int],
    receivers: list[Rank],
    taken: list[int],
    heads: int,
    window_group: int | None = None,
) -> None:
    """Through an agent beside each rank. A window's group has the same tables, from the first kept token's page on."""
    expected = truth(senders[0].parts, heads)
    for rank in senders:
        rank.write(expected, given)

    def blocks(rank: Rank, table: list[int]) -> dict[str, Any]:
        if window_group is None:
            return {}
        first = max(rank.first.values()) // rank.page
        return {"blocks": (Blocks(0, 0, tuple(table)), Blocks(window_group, first, tuple(table[first:])))}

    with ExitStack() as stack:
        sides: list[list[OracleEngine]] = []
        for name, side in (("p", senders), ("d", receivers)):
            agents = [stack.enter_context(agent(folder, f"{name}{number}")) for number in range(len(side))]
            engines = [OracleEngine(one, held(rank.memory)) for one, rank in zip(agents, side, strict=True)]
            for engine in engines:
                stack.enter_context(closing(engine)).attach()
                engine.directory(*agents)
            sides.append(engines)
        for engine, rank in zip(sides[0], senders, strict=True):
            engine.offer("r", given, TOKENS, **blocks(rank, given))
        for engine, rank in zip(sides[1], receivers, strict=True):
            engine.want("r", sides[0][0].agent.address, taken, range(TOKENS), **blocks(rank, taken))
        for engine, rank in zip(sides[1], receivers, strict=True):
            engine.done("r")
            rank.assert_came(engine.held.memory, expected, taken)
