"""Tests of the exchange have the same few pools: what is known of two of them is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sim.memo import remembered


@pytest.fixture(scope="session", autouse=True)
def kept() -> Iterator[None]:
    with remembered():
        yield
