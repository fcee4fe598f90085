"""Tests that are coroutines are run."""

from tests.support.loops import pytest_pyfunc_call  # noqa: F401
