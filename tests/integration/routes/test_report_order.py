"""Reports of the loop's turn and of the thread's come in the order of events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.dataplane import data_plane as data_plane_module
from kvbridge.device.copier import Moved
from kvbridge.exchange.orders import Pull, ReceivingReport, StageReached, StopReceiving
from kvbridge.routes.pull.halves import ReadLease
from tests.integration.routes.test_read_on_loop import WHOSE, Ears, Threads, read, serving, until


class All(Ears):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def on_receive_orders(self, reports: Sequence[ReceivingReport]) -> None:
        self.heard += [type(each).__name__ for each in reports if not isinstance(each, StageReached)]


class OneByOne(Threads):
    """Ends as many moves as `may_end_count` says."""

    most = 0

    def poll(self) -> list[Moved]:
        self._kept = [*getattr(self, "_kept", []), *super().poll()]
        out, self._kept = self._kept[: self.most], self._kept[self.most :]
        self.most -= len(out)
        return out


@pytest.fixture(autouse=True)
def _sound_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane_module, "IDLE_S", 300.0)


async def test_a_digest_is_told_before_the_end_that_the_thread_saw() -> None:
    copier, ears = OneByOne(), All()
    async with serving(copier, ears) as data_plane:
        copier.most = 1  # the first chunk is over at the loop's first look, the second is seen by the thread
        lease = ReadLease(time.monotonic())
        lease.answered(0)
        plan: Any = SimpleNamespace(total_bytes=1024, chunk=lambda index: index, bytes_of=lambda *_: 1024)
        attached: Any = SimpleNamespace(
            memory=object(), liveness=SimpleNamespace(has_left=False), has_reached=lambda count: True
        )
        data_plane.give(Pull("t", "r", WHOSE, plan, {}, {}, 0, 2, lease, 0, frozenset({0})), attached)
        copier.most = 1
        data_plane._put(lambda: None)  # any other order wakes the thread, which sees the end of the second
        time.sleep(0.3)  # noqa: ASYNC251 - the loop is busy with another message
        await until(lambda: "Pulled" in ears.heard and "Summed" in ears.heard)
        assert ears.heard == ["Summed", "Pulled"]


async def test_a_read_is_told_before_its_transfer_is_quiet() -> None:
    copier, ears = Threads(), All()
    async with serving(copier, ears) as data_plane:
        read(data_plane)  # begun and over in the loop's turn
        # Its engine abandons the want before the loop hears of the end.
        data_plane.give(StopReceiving("t", "abandoned", "not needed"), None)
        time.sleep(0.3)  # noqa: ASYNC251
        await until(lambda: len(ears.heard) == 2)
        assert ears.heard == ["Pulled", "Quiet"]
