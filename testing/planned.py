"""What `kvbridge plan --model` says of a pool beforehand, and what a real one is: the parts that must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbridge_proto.pool import Pool

from kvbridge.local_agents import ask_pool
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse


def told(pool: Pool) -> tuple[Any, ...]:
    """What decides whether a pair is carried: layers, heads, rows, and which tokens are kept in which blocks.

    Beside states only the engine knows the blocks, and they decide nothing.
    """
    has_states = any(group.kind == "state" for group in pool.groups)
    planes = {
        (plane.layer, plane.part): (
            *(plane.first_head, plane.heads, plane.total_heads, plane.codec.name, plane.codec.width, plane.row_tokens),
            *(plane.codec.row_bytes, pool.groups[plane.group].kind, pool.groups[plane.group].window),
            *(not has_states and pool.groups[plane.group].block_tokens, pool.groups[plane.group].begins_inside),
            pool.groups[plane.group].never_cached,
        )
        for plane in pool.planes
    }
    model = pool.model
    return (model.layers, model.depth, model.drafts, model.draft), pool.shard, planes


def assert_known_beforehand(model: Path, command: str, sockets: list[str]) -> None:
    """The pools that the agents at `sockets` have, rank by rank, are those described for this model and command."""
    planned = pools_of(read(json.loads((model / "config.json").read_text())), parse(command), "m", "e")
    assert [told(pool) for pool in planned] == [told(ask_pool(socket).pool) for socket in sockets]
