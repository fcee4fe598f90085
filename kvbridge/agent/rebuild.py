"""Replaces the staging once quarantine holds too much of it: new slots behind a new fabric, for the same engine.

A receive slot is quarantined until there is proof that nothing can be written to it any more, a send slot until the
late write out of it ends. If that never comes (the peer is frozen, or is gone for good), the slots are not freed. They
are left behind, and new ones take their place. The addresses of old receive slots are never used again.

A pod that is replaced leaves no proof: its successor has another lock. So a few receive slots in host memory, whose
memory a rebuild gives back, are replaced as well, later and only if this costs no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Set

from kvbridge_proto.status import SlotCounts

from ..dataplane.data_plane import DataPlane
from ..dataplane.resources import StagingEndpoints
from ..dataplane.slots import SendSlots
from ..errors import KVBridgeError
from ..exchange.slots import ReceiveSlots
from .engines import Engines
from .metrics import Metrics

log = logging.getLogger("kvbridge.agent")

LOOK_S = 0.5
PAUSE_S = 2.0  # no request begins while those under way end; the ones left after this fail with `rebuilt`
LOOK_PAUSED_S = 0.01
AGAIN_S = 10.0  # after a failed attempt: each costs the data plane some time
FEW_TIMES = 10.0  # `rebuild_s`, until fewer than half of the slots are worth the sessions that a rebuild ends


class QuarantineTimer:
    """How long at least half of one kind of slots have been quarantined. Pure: the caller passes the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None

    def is_over(self, counts: SlotCounts, now: float) -> bool:
        """Whether that is too long. To be called regularly: the time counts from the first call that sees it."""
        slots = counts.free + counts.lent + counts.landed + counts.quarantined
        if not counts.quarantined or counts.quarantined * 2 < slots:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.seconds


class LongestQuarantine:
    """For how long some slot has been quarantined without a break, however many come and go. Pure."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since = 0.0
        self._still: Set[tuple[int, int]] = frozenset()

    def is_over(self, quarantined: Set[tuple[int, int]], now: float) -> bool:
        """Whether that is too long. To be called regularly, with the leases of the quarantined slots."""
        self._still &= quarantined
        if not self._still:
            self._still, self._since = quarantined, now
        return bool(self._still) and now - self._since >= self.seconds


class Rebuilder:
    """Watches the slots of one agent, and replaces them."""

    def __init__(
        self,
        receive_slots: ReceiveSlots,
        send_slots: SendSlots,
        engines: Engines,
        data_plane: DataPlane,
        metrics: Metrics,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive_slots = receive_slots
        self._slots: dict[str, ReceiveSlots | SendSlots] = {"receive": receive_slots, "send": send_slots}
        self._engines = engines
        self._data_plane = data_plane
        self._metrics = metrics
        self._seconds = seconds
        self._timers, self._few = self._new_timers(), self._new_few()
        self._is_pressing = False  # half of one kind are quarantined for too long
        self._clock = clock
        self.refused = ""  # the code why slots that are due cannot be made
        self._again_at = float("-inf")
        self._endpoints: StagingEndpoints | None = None  # made, but not used until what is under way has ended
        self._pause_ends = 0.0

    async def watch(self) -> None:
        """Check regularly, until cancelled."""
        while True:
            await asyncio.sleep(self.check_in_s)
            await self.check()

    @property
    def is_pausing(self) -> bool:
        return self._endpoints is not None

    @property
    def check_in_s(self) -> float:
        """Seconds until the next check."""
        return LOOK_PAUSED_S if self.is_pausing else LOOK_S

    async def check(self) -> None:
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
        if not self._engines.pause():
            if self._clock() < self._pause_ends:
                return
            if not self._is_pressing:
                self._few = self._new_few()  # no request shall fail for a few slots
                self.close()
                self._engines.resume()
                return
        endpoints, self._endpoints = self._endpoints, None
        reason = f"rebuild_s: {' and '.join(reasons)}"
        self._engines.rebuild(endpoints, reason)
        self._few = self._new_few()
        self._timers = self._new_timers()  # send slots count as before until the data plane's thread has switched
        self._metrics.rebuilt()
        log.warning("replaced the slots: %s", reason)

    def _new_timers(self) -> dict[str, QuarantineTimer]:
        return {kind: QuarantineTimer(self._seconds) for kind in self._slots}

    def _new_few(self) -> LongestQuarantine:
        return LongestQuarantine(FEW_TIMES * self._seconds)

    def _reasons(self) -> list[str]:
        """For each kind of slots that has to be replaced, how many are quarantined. Updates `_is_pressing`."""
        counts, now = {kind: slots.counts() for kind, slots in self._slots.items()}, self._clock()
        over = {kind: timer.seconds for kind, timer in self._timers.items() if timer.is_over(counts[kind], now)}
        self._is_pressing = bool(over)
        is_stuck = self._few.is_over(self._receive_slots.quarantined(), now)
        if is_stuck and not over and self._data_plane.site.fabric.memory == "dram":
            over = {"receive": self._few.seconds}
        return [
            f"{counts[kind].quarantined} of {len(self._slots[kind])} {kind} slots in quarantine for {seconds:g} s"
            for kind, seconds in over.items()
        ]

    def close(self) -> None:
        """Discard the new slots: the missing proof has come, or the agent ends."""
        if self._endpoints is not None:
            self._data_plane.discard(self._endpoints)
            self._endpoints = None

    async def _prepared(self) -> StagingEndpoints | None:
        """New endpoints, if they are due and can be made."""
        now = self._clock()
        if not self._reasons():
            self.refused = ""
            return None
        if now < self._again_at:
            return None
        try:
            endpoints = await self._data_plane.prepare_endpoints()
        except (KVBridgeError, OSError, RuntimeError, MemoryError) as error:  # no memory, most likely
            self._again_at = now + AGAIN_S
            code = error.code if isinstance(error, KVBridgeError) else type(error).__name__
            if code != self.refused:  # logged once, though tried again
                self.refused = code
                log.error("the slots cannot be replaced: code=%s %s", code, error)
            return None
        self.refused = ""
        return endpoints
