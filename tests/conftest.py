"""Runs coroutines, gives PyTorch one thread per process, and shows the logs of real engines whose test fails.

In CI a skip that is not in MAY_SKIP is a failure.
"""

import gc
import os
import re
from collections.abc import Generator
from typing import Any

import pytest

from testing.loops import pytest_pyfunc_call  # noqa: F401

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests and their agents share the processors; before torch

gc.disable()  # until all tests are found: nothing of what this makes is garbage

# What a test that skips may say in CI (where the variable CI is set, as .ci/run sets it), and why that is well.
MAY_SKIP = {
    r"could not import '(vllm|sglang)\b|SGLang is not in this environment": "another environment's tests, run by that",
    r"this build of vLLM has no |FP8 KV cache on CPU requires |DeepSeek V4 on a CPU needs ": "no such instructions",
    r"vLLM 0\.26 asks no connector": "the stand-in for an older vLLM, which has nothing to test here",
    r"(multi_)?gpu: needs ": "hardware",
    r"no Python 3\.1[23] here": "the oldest that is supported is there; the others may be",
    r"this host has no \[?::1": "a kernel without IPv6",
    r"no (control groups|namespaces|network namespace) ": "no such rights",
    r"no history of commits here": "a shallow clone, or a tree without git",
    r"agents of the default socket run here": "what else runs on this machine",
}


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # collections skip the tests' and torch's hundred thousands of objects


def refused(report: Any) -> Any:
    """The report of a test or a module; in CI it is one of a failure if it was skipped for want of something."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        path, line, reason = report.longrepr
        if not any(re.match(said, reason.removeprefix("Skipped: ")) for said in MAY_SKIP):
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: skipped, which tests may not in CI (tests/conftest.py): {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = refused((yield))
    if report.failed:
        found = [getattr(fixture, "logs", None) for fixture in getattr(item, "funcargs", {}).values()]
        for logs in filter(callable, found):  # of engines that a module keeps, see testing/kept.py
            report.sections += logs()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return refused((yield))
