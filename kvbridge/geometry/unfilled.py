"""Unfilled layers: a draft model's layers that only the receiver has. Their rows of the prompt become zeros. Pure.

A page holds what an earlier request left there, perhaps NaN, and the draft model would attend to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from kvbridge_proto.pool import Pool, Region

from .check import extent
from .plan import Plan, Planner
from .shard import common
from .tokens import BlockTable

CHUNK_BYTES = 16 << 20


class Filling:
    """How these layers of a receiver are filled: as if a sender had them, in a pool whose only block is zeros."""

    def __init__(self, receiver: Pool, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        planes = tuple(plane for plane in receiver.planes if plane.layer in layers)
        filled = msgspec.structs.replace(receiver, planes=planes)
        self.zeros = _zeros(filled)
        self._planner = Planner(self.zeros, filled)
        self._takes = common(self.zeros, filled)

    def plan(self, first_token: int, end_token: int) -> Plan:
        """What to write for these tokens. Raises KVBridgeError."""
        return self._planner.plan(self._takes, first_token, end_token, CHUNK_BYTES)

    def tables(self, tables: Mapping[int, BlockTable]) -> dict[int, BlockTable]:
        """Where the zeros for the blocks of these tables are: always in block 0."""
        return {
            index: replace(table, group=self.zeros.groups[index], ids=np.zeros_like(table.ids))
            for index, table in tables.items()
        }


def _zeros(filled: Pool) -> Pool:
    """A pool of one block, with planes like these. All begin at byte 0: every byte of its region is zero."""
    groups = tuple(msgspec.structs.replace(group, blocks=1) for group in filled.groups)
    planes = tuple(msgspec.structs.replace(plane, region=0, offset=0, block_stride=0) for plane in filled.planes)
    size_bytes = max(extent(plane, groups[plane.group]) for plane in planes)
    return msgspec.structs.replace(filled, groups=groups, regions=(Region(size_bytes),), planes=planes)
