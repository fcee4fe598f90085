"""Writes zeros to rows of our engine's blocks: those of layers that no sender has (geometry/unfilled.py).

A fill is a read from memory of our own that holds nothing but zeros. So it goes through the same kernels as a pull, and
every form of rows that can be read can be filled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from kvbridge_proto.pool import Pool

from ..device.copier import Moved
from ..device.memory import AttachedPool
from ..exchange.orders import Failure, Fill, Filled
from ..geometry.plan import Part
from .attached import AttachedMemory, Event, Job, Wait, WaitCopier, WaitMove, begun, failure_of, started
from .orders import OrderedReceive, ReceiveOrders
from .resources import Resources


class Fills:
    """The jobs, and the memory they read. For the data plane's thread."""

    def __init__(
        self, resources: Resources, receive_orders: ReceiveOrders, wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._resources = resources
        self._receive_orders = receive_orders
        self._wait_s = wait_s
        self._clock = clock
        self._zeros: list[AttachedPool] = []

    def fill(self, fill: Fill, attached: AttachedMemory) -> Job:
        """Write the zeros, once our engine has finished with the blocks."""
        failure: Failure = None
        ordered = self._receive_orders.begin_read(fill.transfer)
        try:
            for index in range(fill.plan.chunks):
                begin = lambda index=index: self._begun(fill, attached, ordered, index)  # noqa: E731
                ended = yield WaitMove((yield from started(begin, attached, self._wait_s, self._clock)))
                assert isinstance(ended, Moved)
                if failure := ended.failure:
                    break
        except Exception as error:  # only this want fails
            failure = failure_of("scatter_failed", error, fill)
        self._receive_orders.report(Filled(fill.transfer, failure))
        self._receive_orders.end_move(ordered)

    def _begun(
        self, fill: Fill, attached: AttachedMemory, ordered: OrderedReceive, index: int
    ) -> Generator[Wait, Event, int]:
        """Begin to write a chunk as soon as there is room. Returns its ticket. EngineError if the want was stopped."""
        copier, ends = self._resources.copier, self._clock() + self._wait_s
        yield from begun(attached, fill.fence, ends, ordered)
        if not copier.has_room:
            yield WaitCopier(attached, copier, ends)
        chunk = fill.plan.chunk(index)
        zeros, ours = Part(fill.plan, chunk, fill.zero_tables, True), Part(fill.plan, chunk, fill.tables, False)
        return copier.pull(self._memory(fill.zeros), zeros, attached.memory, ours)

    def _memory(self, pool: Pool) -> AttachedPool:
        """Memory of this pool, all zeros. Older memory is given up once nothing reads it."""
        for each in self._zeros:
            if each.pool is pool:
                return each
        copier = self._resources.copier
        for old in [each for each in self._zeros if not copier.is_using(each)]:
            copier.forget(old)
            old.close()
            self._zeros.remove(old)
        made = copier.zeros(pool)
        self._zeros.append(made)
        return made

    def close(self) -> None:
        """The copier must be closed, so that nothing is read."""
        for each in self._zeros:
            each.close()
