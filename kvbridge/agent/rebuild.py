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
import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass, field

from kvbridge_proto.status import SlotCounts

from ..dataplane.data_plane import DataPlane
from ..dataplane.orders import SendSlots
from ..dataplane.resources import StagingEndpoints
from ..errors import KVBridgeError
from ..routes.slots.receive_slots import ReceiveSlots
from .engines import Engines
from .metrics import Metrics

log = logging.getLogger("kvbridge.agent")

REBUILD_LOOK_S = 0.5
PAUSE_S = 2.0  # no request begins while those under way end; the ones left after this fail with `rebuilt`
LOOK_PAUSED_S = 0.01
REBUILD_AGAIN_S = 10.0  # after a failed attempt: each costs the data plane some time
REBUILD_FAILURES = (KVBridgeError, OSError, RuntimeError, MemoryError)  # no memory, most likely
FEW_TIMES = 10.0  # `rebuild_s`, until fewer than half of the slots are worth the sessions that a rebuild ends


def is_half_quarantined(counts: SlotCounts) -> bool:
    slots = counts.free + counts.lent + counts.landed + counts.quarantined
    return counts.quarantined > 0 and counts.quarantined * 2 >= slots


class Lasting:
    """Whether something that was found has lasted for so many seconds, however many others come and go. Pure."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since = 0.0
        self._still: Set[Hashable] = frozenset()

    def is_over(self, found: Set[Hashable], now: float) -> bool:
        """Whether that is too long. To be called regularly, with what is found: the time counts from the first call."""
        self._still &= found
        if not self._still:
            self._still, self._since = found, now
        return bool(self._still) and now - self._since >= self.seconds


@dataclass(slots=True)
class Attempts:
    """Attempts to replace something: when the next is due, and the code why the last one failed, "" if it did not."""

    what: str  # in the log
    clock: Callable[[], float]
    again_at: float = float("-inf")
    refused: str = ""

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Make an attempt. A failure is logged once for each code, though it is tried again."""
        try:
            yield
        except REBUILD_FAILURES as error:
            code = error.code if isinstance(error, KVBridgeError) else type(error).__name__
            if code != self.refused:
                log.error("the %s cannot be replaced: code=%s %s", self.what, code, error)
            self.again_at, self.refused = self.clock() + REBUILD_AGAIN_S, code
        else:
            self.refused = ""


@dataclass(eq=False, repr=False)
class Rebuilder:
    """Watches the slots of one agent, and replaces them."""

    _receive_slots: ReceiveSlots
    _quarantined_far: Callable[[], Set[tuple[int, int]]]
    _send_slots: SendSlots
    _engines: Engines
    _data_plane: DataPlane
    _metrics: Metrics
    _seconds: float
    _clock: Callable[[], float] = time.monotonic
    _is_pressing: bool = field(default=False, init=False)  # half are quarantined for too long
    _fabric_pause_ends: float | None = field(default=None, init=False)  # while wants are paused for another fabric
    # Made, but not used until what is under way has ended.
    _endpoints: StagingEndpoints | None = field(default=None, init=False)
    _pause_ends: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._half = Lasting(self._seconds)
        self._few, self._far = self._new_few(), self._new_few()
        self._receiving = Attempts("receive slots", self._clock)
        self._sending = Attempts("send slots", self._clock)
        self._fabric = Attempts("fabric", self._clock)

    async def watch(self) -> None:
        """Check regularly, until cancelled."""
        while True:
            await asyncio.sleep(self.check_in_s)
            await self.check()

    @property
    def refused(self) -> str:
        """The code why slots that are due cannot be made, "" if there is no such reason."""
        return self._receiving.refused or self._sending.refused or self._fabric.refused

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
        counts, attempts = self._send_slots.counts(), self._sending
        if not is_half_quarantined(counts):
            attempts.refused = ""
        elif self._clock() >= attempts.again_at:
            with attempts.one():
                await self._data_plane.replace_send_slots()
            if not attempts.refused:
                self._metrics.rebuilt("send_slots")
                slots = counts.quarantined, len(self._send_slots)
                log.warning("replaced the send slots: late writes go on out of %d of %d", *slots)

    async def _check_fabric(self) -> None:
        """Replace the fabric, and no slots, once slots that only it may write by have been stuck for long."""
        now, far = self._clock(), self._quarantined_far()
        if self._fabric_pause_ends is None:
            if not self._far.is_over(far, now):
                self._fabric.refused = ""
                return
            if self._endpoints is not None or now < self._fabric.again_at:
                return
            self._fabric_pause_ends = now + PAUSE_S
        if far and not self._engines.pause_wants() and now < self._fabric_pause_ends:
            return
        self._fabric_pause_ends = None
        if not far or not self._engines.pause_wants():  # proof has come, or requests would fail for a few slots
            self._far = self._new_few()
            self._engines.resume()
            return
        with self._fabric.one():
            await self._data_plane.renew_fabrics()
        if self._fabric.refused:
            self._engines.resume()
            return
        self._far = self._new_few()
        slots = f"{len(far)} of {len(self._receive_slots)} receive slots"
        reason = f"{slots} in quarantine for senders of other machines or pods"
        self._engines.renew_fabric(self._data_plane.site, reason)
        self._metrics.rebuilt("fabric")
        log.warning("replaced the fabric: %s", reason)

    def _new_few(self) -> Lasting:
        return Lasting(FEW_TIMES * self._seconds)

    def _reason(self) -> str:
        """Why the receive slots have to be replaced, "" if not. Updates `_is_pressing`."""
        counts, now = self._receive_slots.counts(), self._clock()
        self._is_pressing = self._half.is_over({"half"} if is_half_quarantined(counts) else set(), now)
        is_stuck = self._few.is_over(self._receive_slots.quarantined() - self._quarantined_far(), now)
        if self._is_pressing:
            seconds = self._half.seconds
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
        if not self._reason():
            self._receiving.refused = ""
        elif self._clock() >= self._receiving.again_at:
            with self._receiving.one():
                return await self._data_plane.prepare_endpoints()
        return None
