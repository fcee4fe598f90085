"""Tests that are coroutines: `async def test_...` runs in an event loop, and enters its arguments that can be entered.

tests/conftest.py imports `pytest_pyfunc_call`. Where a test has an argument `loop`, that is what runs it.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

MOST_S = 240  # less than the limit of a test: on a busy machine a first fork took a minute


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run: Any = pyfuncitem.funcargs.get("loop", asyncio.run)
    run(_told(pyfuncitem.obj, arguments))
    return True


async def _told(test: Any, arguments: dict[str, Any]) -> None:
    async with asyncio.timeout(MOST_S), AsyncExitStack() as stack:
        for name, given in arguments.items():
            if isinstance(given, AbstractAsyncContextManager):
                arguments[name] = await stack.enter_async_context(given)
        await test(**arguments)
