"""Replaces staging once quarantine holds too much of it, for the same engine.

A receive slot is quarantined until there is proof that nothing can be written to it any more, a send slot until the
late write out of it ends. If that never comes (the peer is frozen, or is gone for good), the slots are not freed. They
are left behind, and new ones take their place. The addresses of old receive slots are never used again.

New receive slots are behind a new fabric: sessions end, so this waits for `rebuild_s`. Nobody is told of send slots,
so new ones are made at once: after an outage the writes out of the old ones may take as long again to end.

A pod that is replaced leaves no proof: its successor has another lock. So a few receive slots are freed as well, later
and only if this costs no request. Whoever is on another machine, or in another pod of this one, writes through our
fabric's connections and keys only. With another fabric in its place the same slots can be used again, on a GPU too. An
agent that shares a PID namespace with us (for host memory: or an IPC namespace) may write our memory by itself. Mostly
the end of its process is seen (transport/processes.py). Else slots of such are replaced if they are in host memory,
which a rebuild gives back.
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
from ..routes.slots.receive_slots import ReceiveSlots
from .engines import Engines
from .metrics import Metrics

log = logging.getLogger("kvbridge.agent")

REBUILD_LOOK_S = 0.5
PAUSE_S = 2.0  # no request begins while those under way end; the ones left after this fail with `rebuilt`
LOOK_PAUSED_S = 0.01
REBUILD_AGAIN_S = 10.0  # after a failed attempt: each costs the data plane some time
FAILURES = (KVBridgeError, OSError, RuntimeError, MemoryError)  # no memory, most likely
FEW_TIMES = 10.0  # `rebuild_s`, until fewer than half of the slots are worth the sessions that a rebuild ends


def is_half_quarantined(counts: SlotCounts) -> bool:
    slots = counts.free + counts.lent + counts.landed + counts.quarantined
    return counts.quarantined > 0 and counts.quarantined * 2 >= slots


class QuarantineTimer:
    """How long at least half of the slots have been quarantined. Pure: the caller passes the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None

    def is_over(self, counts: SlotCounts, now: float) -> bool:
        """Whether that is too long. To be called regularly: the time counts from the first call that sees it."""
        if not is_half_quarantined(counts):
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
        quarantined_far: Callable[[], Set[tuple[int, int]]],
        send_slots: SendSlots,
        engines: Engines,
        data_plane: DataPlane,
        metrics: Metrics,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive_slots = receive_slots
        self._quarantined_far = quarantined_far
        self._send_slots = send_slots
        self._engines = engines
        self._data_plane = data_plane
        self._metrics = metrics
        self._seconds = seconds
        self._timer = QuarantineTimer(seconds)
        self._few, self._far = self._new_few(), self._new_few()
        self._is_pressing = False  # half are quarantined for too long
        self._clock = clock
        self._refused = self._send_refused = self._fabric_refused = ""
        self._again_at = self._send_again_at = self._fabric_again_at = float("-inf")
        self._fabric_pause_ends: float | None = None  # while wants are paused for another fabric
        self._endpoints: StagingEndpoints | None = None  # made, but not used until what is under way has ended
        self._pause_ends = 0.0

    async def watch(self) -> None:
        """Check regularly, until cancelled."""
        while True:
            await asyncio.sleep(self.check_in_s)
            await self.check()

    @property
    def refused(self) -> str:
        """The code why slots that are due cannot be made, "" if there is no such reason."""
        return self._refused or self._send_refused or self._fabric_refused

    @property
    def is_pausing(self) -> bool:
        return self._endpoints is not None or self._fabric_pause_ends is not None

    @property
    def check_in_s(self) -> float:
        """Seconds until the next check."""
        return LOOK_PAUSED_S if self.is_pausing else REBUILD_LOOK_S

    async def check(self) -> None:
        """Replace slots if it is time to."""
        await self._check_send_slots()
        await self._check_fabric()
        if self._fabric_pause_ends is not None:
            return
        if self._endpoints is None:
            self._endpoints = await self._prepared()
            self._pause_ends = self._clock() + PAUSE_S
        if self._endpoints is None:
            return
        if not (reason := self._reason()):
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
        self._engines.rebuild(endpoints, reason)
        self._few, self._far = self._new_few(), self._new_few()
        self._metrics.rebuilt("slots")
        log.warning("replaced the slots: %s", reason)

    async def _check_send_slots(self) -> None:
        """Replace the send slots once half of them are read by late writes."""
        counts = self._send_slots.counts()
        if not is_half_quarantined(counts):
            self._send_refused = ""
        elif self._clock() >= self._send_again_at:
            try:
                await self._data_plane.replace_send_slots()
            except FAILURES as error:
                self._send_again_at = self._clock() + REBUILD_AGAIN_S
                self._send_refused = _refusal(error, self._send_refused)
            else:
                self._metrics.rebuilt("send_slots")
                log.warning(
                    "replaced the send slots: late writes go on out of %d of %d",
                    counts.quarantined,
                    len(self._send_slots),
                )

    async def _check_fabric(self) -> None:
        """Replace the fabric, and no slots, once slots that only it may write by have been stuck for long."""
        now, far = self._clock(), self._quarantined_far()
        if self._fabric_pause_ends is None:
            if not self._far.is_over(far, now):
                self._fabric_refused = ""
                return
            if self._endpoints is not None or now < self._fabric_again_at:
                return
            self._fabric_pause_ends = now + PAUSE_S
        if far and not self._engines.pause_wants() and now < self._fabric_pause_ends:
            return
        self._fabric_pause_ends = None
        if not far or not self._engines.pause_wants():  # proof has come, or requests would fail for a few slots
            self._far = self._new_few()
            self._engines.resume()
            return
        try:
            await self._data_plane.renew_fabrics()
        except FAILURES as error:
            self._fabric_again_at = now + REBUILD_AGAIN_S
            self._fabric_refused = _refusal(error, self._fabric_refused)
            self._engines.resume()
            return
        self._far, self._fabric_refused = self._new_few(), ""
        slots = f"{len(far)} of {len(self._receive_slots)} receive slots"
        reason = f"{slots} in quarantine for senders of other machines or pods"
        self._engines.renew_fabric(self._data_plane.site, reason)
        self._metrics.rebuilt("fabric")
        log.warning("replaced the fabric: %s", reason)

    def _new_few(self) -> LongestQuarantine:
        return LongestQuarantine(FEW_TIMES * self._seconds)

    def _reason(self) -> str:
        """Why the receive slots have to be replaced, "" if not. Updates `_is_pressing`."""
        counts, now = self._receive_slots.counts(), self._clock()
        self._is_pressing = self._timer.is_over(counts, now)
        is_stuck = self._few.is_over(self._receive_slots.quarantined() - self._quarantined_far(), now)
        if self._is_pressing:
            seconds = self._timer.seconds
        elif is_stuck and self._data_plane.site.fabric.memory == "dram":
            seconds = self._few.seconds
        else:
            return ""
        slots = len(self._receive_slots)
        return f"rebuild_s: {counts.quarantined} of {slots} receive slots in quarantine for {seconds:g} s"

    def close(self) -> None:
        """Discard the new slots: the missing proof has come, or the agent ends."""
        if self._endpoints is not None:
            self._data_plane.discard(self._endpoints)
            self._endpoints = None

    async def _prepared(self) -> StagingEndpoints | None:
        """New endpoints, if they are due and can be made."""
        now = self._clock()
        if not self._reason():
            self._refused = ""
            return None
        if now < self._again_at:
            return None
        try:
            endpoints = await self._data_plane.prepare_endpoints()
        except FAILURES as error:
            self._again_at = now + REBUILD_AGAIN_S
            self._refused = _refusal(error, self._refused)
            return None
        self._refused = ""
        return endpoints


def _refusal(error: Exception, before: str) -> str:
    """The code why slots cannot be replaced. It is logged once, though it is tried again."""
    code = error.code if isinstance(error, KVBridgeError) else type(error).__name__
    if code != before:
        log.error("the slots cannot be replaced: code=%s %s", code, error)
    return code
