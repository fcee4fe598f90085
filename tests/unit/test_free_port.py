"""Ports that tests and the demo give to servers."""

from __future__ import annotations

import random

import pytest

from demo.processes import free_port


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server listens on the first only later, and another would be told the same."""
    ports = iter([first := free_port(), first + 1, first + 1, *range(first + 2, first + 100)])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(ports))
    assert len({first, free_port(), free_port()}) == 3
