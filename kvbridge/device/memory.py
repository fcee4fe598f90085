"""An engine's memory in this process: mapped regions, with every plane checked against them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from kvbridge_kernels.field import Mapped
from kvbridge_kernels.segment import Span
from kvbridge_proto.pool import Handle, Plane, Pool

from ..errors import EngineError
from ..geometry.compat import check_pool, extent
from ..geometry.overlap import overlaps
from .mapping import HostMappings, Mappings, mappings_for, peer_mappings_for


def span_of(region: torch.Tensor | Mapped) -> Span:
    """The region's address in this process, or on our GPU, and its size."""
    if isinstance(region, Mapped):
        return Span(region.address, region.size_bytes)
    return Span(region.data_ptr(), region.nbytes)


class AttachedPool:
    """The pool of one engine rank, mapped. Used by one thread at a time; `close` may come from another."""

    def __init__(self, pool: Pool, mappings: Mappings, memories: Sequence[torch.Tensor | Mapped]) -> None:
        self.pool = pool
        self._mappings = mappings
        self._memories: Sequence[torch.Tensor | Mapped] | None = memories
        self._in_use = threading.Lock()

    @classmethod
    def open(cls, pool: Pool, handles: Sequence[Handle], fds: Sequence[int], device: str = "cpu") -> Self:
        """Map every region of `pool`, on the agent's `device`. The fds stay the caller's, to close in any case.

        EngineError for an invalid pool, handle or fd, OperatorError for memory not served on this device.
        """
        return cls._open(pool, handles, fds, lambda: mappings_for(device))

    @classmethod
    def open_peer(cls, pool: Pool, handles: Sequence[Handle], fds: Sequence[int], device: str = "cpu") -> Self:
        """Map a peer's pool, which our `device` will read, whichever GPU holds it.

        Raises as `open`; OperatorError `no_peer_access` if our GPU cannot reach that one.
        """
        return cls._open(pool, handles, fds, lambda: peer_mappings_for(device))

    @classmethod
    def _open(cls, pool: Pool, handles: Sequence[Handle], fds: Sequence[int], made: Callable[[], Mappings]) -> Self:
        _check_planes(pool)
        by_region = _by_region(pool, handles)
        mappings = made()
        try:
            sizes = [region.size_bytes for region in pool.regions]
            memories = [mappings.map(handle, size, fds) for handle, size in zip(by_region, sizes, strict=True)]
        except BaseException:
            mappings.close()
            raise
        return cls(pool, mappings, memories)

    @classmethod
    def of_zeros(cls, pool: Pool, device: str) -> Self:
        """Memory of our own for this pool, all zeros. Its planes may overlap: nobody writes them."""
        for plane in pool.planes:
            check_plane(pool, plane)
        zeros = [torch.zeros(region.size_bytes, dtype=torch.uint8) for region in pool.regions]
        # Not zeros on the GPU: torch's own kernels would take 92 MiB of it.
        return cls(pool, HostMappings(), [each.to(device) for each in zeros])

    @property
    def is_open(self) -> bool:
        return self._memories is not None

    @contextmanager
    def hold(self) -> Iterator[Sequence[torch.Tensor | Mapped]]:
        """The regions as uint8 tensors, mapped until the block ends. Keep nothing of them after it.

        torch does not keep the memory alive: once the pool is closed, no tensor may be used and no kernel may run on
        it. A region of a peer's pool on a GPU has only an address, for kernels.
        """
        with self._in_use:
            if self._memories is None:
                raise EngineError("detached", f"engine {self.pool.engine.id}: its memory is unmapped")
            yield self._memories

    def close(self) -> None:
        """Unmap at once. Waits for a `hold` to end, which lasts one chunk at most. Every later use is an EngineError.

        Waits for nothing else: on a GPU, the caller has seen the end of every kernel and copy it enqueued.
        """
        with self._in_use:
            self._memories = None
            self._mappings.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        size_bytes = sum(region.size_bytes for region in self.pool.regions)
        state = "open" if self.is_open else "closed"
        return f"<AttachedPool {self.pool.engine.id} {len(self.pool.planes)} planes {size_bytes} bytes {state}>"


def check_plane(pool: Pool, plane: Plane) -> None:
    """EngineError unless all of `plane`, one of the pool's or coalesced from them, lies inside its region."""
    if plane.region >= len(pool.regions) or plane.group >= len(pool.groups):
        raise EngineError(
            "bad_plane",
            f"{_spell(plane)}: region {plane.region} of {len(pool.regions)}, group {plane.group} of {len(pool.groups)}",
        )
    end, size_bytes = extent(plane, pool.groups[plane.group]), pool.regions[plane.region].size_bytes
    if end > size_bytes:
        raise EngineError(
            "plane_outside_region",
            f"{_spell(plane)}: ends at byte {end}, region {plane.region} has {size_bytes} bytes",
        )


def _spell(plane: Plane) -> str:
    return plane.name or f"layer {plane.layer} {plane.part}"


def _check_planes(pool: Pool) -> None:
    for plane in pool.planes:
        check_plane(pool, plane)
    if reasons := check_pool(pool):
        raise EngineError("bad_pool", *reasons)
    if reasons := overlaps(pool):
        raise EngineError("planes_overlap", *reasons)


def _by_region(pool: Pool, handles: Sequence[Handle]) -> list[Handle]:
    found: dict[int, Handle] = {}
    for handle in handles:
        if handle.region in found:
            raise EngineError("handle_repeated", f"region {handle.region}: 2 handles, must be 1")
        found[handle.region] = handle
    if sorted(found) != list(range(len(pool.regions))):
        raise EngineError(
            "handle_missing", f"handles: for regions {sorted(found)}, the pool has {len(pool.regions)} regions"
        )
    return [found[region] for region in range(len(pool.regions))]
