"""Benches are started as for the agents' tests."""

from tests.integration.agent.conftest import bench_of, stack, world  # noqa: F401
