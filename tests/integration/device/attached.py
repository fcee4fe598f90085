"""Attaches an oracle's pool as an engine would, with each region in shared memory of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from kvbridge_proto.pool import Handle

from kvbridge.device.handles import export
from kvbridge.device.memory import AttachedPool
from testing.oracle import Held


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's own view of its memory: what a data plane writes on the other side shows up in `held`."""

    held: Held
    storages: tuple[torch.UntypedStorage, ...]
    handles: tuple[Handle, ...]
    fds: tuple[int, ...]


@contextmanager
def engine_of(held: Held) -> Iterator[Engine]:
    """The same pool and bytes, in memory that can be mapped by others."""
    tensors = [torch.from_numpy(region.copy()).clone() for region in held.memory]
    exported = [export(tensor.untyped_storage(), i, i) for i, tensor in enumerate(tensors)]
    handles, fds = tuple(handle for handle, _ in exported), tuple(fd for _, fd in exported)
    memory = tuple(np.asarray(tensor.numpy()) for tensor in tensors)
    try:
        yield Engine(Held(held.pool, memory), tuple(t.untyped_storage() for t in tensors), handles, fds)
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def attached(held: Held) -> Iterator[tuple[Held, AttachedPool]]:
    """The engine's view and the agent's view of one pool."""
    with engine_of(held) as engine, closing(AttachedPool.open(held.pool, engine.handles, engine.fds)) as pool:
        yield engine.held, pool
