"""Tests that are coroutines are run; benches are started as for the agents' tests."""

from tests.integration.agent.conftest import bench_of, stack, world  # noqa: F401
from tests.support.loops import pytest_pyfunc_call  # noqa: F401
