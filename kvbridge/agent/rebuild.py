"""When doubt has eaten the staging: other slots behind another fabric, beside the same engine.

A receive slot is quarantined until there is proof that nothing can be written there any more, a send slot until
the late write out of it ends. Where that does not come (the peer stands still, or went and never came back), the slots
are not freed: they are left behind, receive slots for good with their addresses, and others take their place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvbridge_proto.status import SlotCounts

from ..dataplane.data_plane import DataPlane
from ..dataplane.resources import StagingEndpoints
from ..dataplane.slots import LocalSlots
from ..errors import KVBridgeError
from ..exchange.slots import SlotPool
from .engines import Engines
from .metrics import Metrics

log = logging.getLogger("kvbridge.agent")

LOOK_S = 0.5
PAUSE_S = 2.0  # no request begins while those under way end; those that have not by then fail, as `rebuilt`
PAUSED_LOOK_S = 0.01
AGAIN_S = 10.0  # after a rebuild that failed: it takes the data plane some time


class Patience:
    """How long half the slots of one kind have been in quarantine. Pure; the caller brings the clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def is_over(self, counts: SlotCounts, now: float) -> bool:
        """Whether it has been too long. Wants to be asked now and then."""
        slots = counts.free + counts.lent + counts.landed + counts.quarantined
        if not counts.quarantined or 2 * counts.quarantined < slots:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._seconds


class Rebuilder:
    """Watches the slots of one agent."""

    def __init__(
        self,
        receive_slots: SlotPool,
        send_slots: LocalSlots,
        engines: Engines,
        data_plane: DataPlane,
        metrics: Metrics,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots: dict[str, SlotPool | LocalSlots] = {"receive": receive_slots, "send": send_slots}
        self._engines = engines
        self._data_plane = data_plane
        self._metrics = metrics
        self._seconds = seconds
        self._patience = self._patient()
        self._clock = clock
        self.refused = ""  # why others cannot be had although it is time for them: a code
        self._again_at = float("-inf")
        self._endpoints: StagingEndpoints | None = (
            None  # made, and not worked with yet: what is under way comes to its end
        )
        self._pause_ends = 0.0

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.look_in_s)
            await self.look()

    @property
    def is_pausing(self) -> bool:
        return self._endpoints is not None

    @property
    def look_in_s(self) -> float:
        """When to look next."""
        return PAUSED_LOOK_S if self.is_pausing else LOOK_S

    async def look(self) -> None:
        """Rebuild if it is time to."""
        if self._endpoints is None:
            self._endpoints = await self._prepared()
            self._pause_ends = self._clock() + PAUSE_S
        if self._endpoints is None:
            return
        if not (reasons := self._reasons()):
            self.close()
            self._engines.resume()
            return
        if not self._engines.pause() and self._clock() < self._pause_ends:
            return
        endpoints, self._endpoints = self._endpoints, None
        reason = f"rebuild_s: {' and '.join(reasons)} were quarantined for {self._seconds:g} s"
        self._engines.rebuild(endpoints, reason)
        self._patience = self._patient()  # the data plane's slots are as they were until its thread has heard of it
        self._metrics.rebuilt()
        log.warning("made the slots anew: %s", reason)

    def _patient(self) -> dict[str, Patience]:
        return {kind: Patience(self._seconds) for kind in self._slots}

    def _reasons(self) -> list[str]:
        """Of which slots so many have been in quarantine for so long that others are needed."""
        counts, now = {kind: slots.counts() for kind, slots in self._slots.items()}, self._clock()
        over = [kind for kind, patience in self._patience.items() if patience.is_over(counts[kind], now)]
        return [f"{counts[kind].quarantined} of {len(self._slots[kind])} {kind} slots" for kind in over]

    def close(self) -> None:
        """Nothing is made anew: what proof was missing has come, or the agent ends."""
        if self._endpoints is not None:
            self._data_plane.discard(self._endpoints)
            self._endpoints = None

    async def _prepared(self) -> StagingEndpoints | None:
        """Other endpoints, if it is time for them and they can be had."""
        now = self._clock()
        if not self._reasons():
            self.refused = ""
            return None
        if now < self._again_at:
            return None
        try:
            endpoints = await self._data_plane.prepare_endpoints()
        except (KVBridgeError, OSError, RuntimeError, MemoryError) as error:  # no memory, most likely: as it was
            self._again_at = now + AGAIN_S
            code = error.code if isinstance(error, KVBridgeError) else type(error).__name__
            if code != self.refused:  # said once; tried as long as it is needed
                self.refused = code
                log.error("the slots cannot be made anew: code=%s %s", code, error)
            return None
        self.refused = ""
        return endpoints
