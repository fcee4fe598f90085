"""SGLang servers whose role on the list changes, or is not the one that they have."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import web

from kvbridge.proxy.fleet import Role, read_engine
from tests.integration.proxy.standins import World, world

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hi", "max_tokens": 3}
pytestmark = pytest.mark.timeout(120)


def listed(w: World, *roles: Role) -> None:
    """The list is read again: a role for each engine."""
    ports = [each.url.rpartition(":")[2] for each in w.engines]
    lines = zip(roles, w.engines, ports, strict=True)
    w.fleet.replace(
        [
            read_engine(role, f"sglang={each.url}" + (f",bootstrap={port}" if role is Role.PREFILL else ""))
            for role, each, port in lines
        ]
    )


async def checked(w: World, number: int = 3) -> None:
    """All have been looked at so often."""
    before = [each.checks for each in w.engines]
    await w.until(lambda: all(each.checks > seen + number for each, seen in zip(w.engines, before, strict=True)))


@pytest.mark.parametrize("was", list(Role))
async def test_a_server_changes_its_role_when_its_line_does_and_its_requests_are_over(was: Role) -> None:
    ends = asyncio.Event()

    async def hold(*_: Any) -> web.Response | None:
        await ends.wait()
        return None

    lines = "sglang,sglang" if was is Role.PREFILL else "sglang", "sglang,sglang" if was is Role.DECODE else "sglang"
    async with world(*lines) as w:
        changing = w.engines[1]
        changing.act, others = hold, [each for each in w.engines if each is not changing]
        asked = [asyncio.create_task(w.ask(COMPLETIONS, BODY)) for _ in range(2)]
        await w.until(lambda: len(changing.got) == 1)
        changing.is_busy = True
        listed(w, *(was.other if each is changing else Role(each.role) for each in w.engines))
        await checked(w)
        assert not changing.changes, "it has a request in its old role"
        ends.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]
        await w.until(lambda: len(changing.changes) > 2)  # it is asked until it has nothing to do
        assert changing.url not in [each.url for each in w.fleet.healthy(was.other)]
        changing.is_busy = False
        await w.until(lambda: changing.url in [each.url for each in w.fleet.healthy(was.other)])
        assert changing.mode == was.other
        changing.got.clear()
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, BODY))[0] == 200
        assert len(changing.got) == 2 and not any(each.changes for each in others)
        number = len(changing.changes)
        await checked(w)
        assert len(changing.changes) == number, "it is asked once"


async def test_a_server_that_somebody_else_has_changed_gets_no_requests_until_the_list_says_so() -> None:
    async with world("sglang", "sglang,sglang") as w:
        first, changed = w.all("decode")
        changed.mode = "prefill"
        await w.until(lambda: [each.url for each in w.fleet.healthy(Role.DECODE)] == [first.url])
        for _ in range(2):
            assert (await w.ask(COMPLETIONS, BODY))[0] == 200
        assert not changed.got
        listed(w, Role.PREFILL, Role.DECODE, Role.PREFILL)
        await w.until(lambda: len(w.fleet.healthy(Role.PREFILL)) == 2)
        assert not changed.changes, "there is nothing to change"


async def test_a_server_that_does_not_say_its_role_is_whoever_changed_its_line_answers_for() -> None:
    async with world("sglang", "sglang,sglang") as w:
        changed = w.all("decode")[1]
        changed.mode, changed.keys = "decode", ("a", "a")
        listed(w, Role.PREFILL, Role.DECODE, Role.PREFILL)
        await w.until(lambda: len(w.fleet.healthy(Role.PREFILL)) == 2)
        assert not changed.changes


@pytest.mark.parametrize("wanted", [("", "b"), ("b", "b"), ("a", "b")], ids=["admin's", "one", "both"])
async def test_a_server_with_keys_changes_its_role_for_who_has_them(
    wanted: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = sorted({*wanted} - {""})
    for has, said in ((keys, "is a prefill server now"), ([keys[0], "c"], "is not in --sglang-keys")):
        async with world("sglang", "sglang,sglang", keys=has) as w:
            changing = w.all("decode")[1]
            changing.keys = wanted
            listed(w, Role.PREFILL, Role.DECODE, Role.PREFILL)
            await w.until(lambda said=said: said in caplog.text)
            assert changing.changes == (["prefill"] if has is keys else [])
