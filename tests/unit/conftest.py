"""Tests of the exchange have the same few pools: what is known of two of them is kept. No example has to be quick."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from testing.sim.memo import remembered

# How long an example takes tells how busy the machine is. In CI, Hypothesis does so by itself.
settings.register_profile("untimed", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def kept() -> Iterator[None]:
    with remembered():
        yield
