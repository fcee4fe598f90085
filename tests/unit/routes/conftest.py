"""A sender and a receiver, in an order of events that no test has chosen."""

from tests.unit.exchange.conftest import world  # noqa: F401
