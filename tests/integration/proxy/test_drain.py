"""`kvbridge drain` as a process, at a real control socket of a real proxy before stand-in engines."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, UnixConnector

from kvbridge.commands.drain import undo
from kvbridge.errors import OperatorError
from kvbridge.proxy.control import controlled
from kvbridge.proxy.fleet import Role, read_engine
from tests.integration.proxy.standins import StandIn, World, named
from tests.integration.proxy.test_moves import BODIES, COMPLETIONS, WHOLE, answer_of, counting, started, text_of

pytestmark = pytest.mark.timeout(180)
COMMAND = [sys.executable, "-m", "kvbridge.cli", "drain"]


class Drain:
    """The command's process, and the lines that it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.lines = process, list[str]()

    async def shows(self, text: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while text not in (line := (await self.process.stdout.readline()).decode()):
                assert line, (self.lines, await self.process.stderr.read())
                self.lines.append(line)

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and all that it said."""
        out, errors = await asyncio.wait_for(self.process.communicate(), 60)
        return self.process.returncode, "".join(self.lines) + (out + errors).decode()


async def drain(engine: StandIn | str, control: Path, *more: str) -> Drain:
    name = engine if isinstance(engine, str) else named(engine)
    pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return Drain(await asyncio.create_subprocess_exec(*COMMAND, name, "--control", str(control), *more, **pipes))


def outstanding(w: World, engine: StandIn) -> int:
    return sum(each.outstanding for each in w.fleet.named(named(engine)))


async def test_says_what_moved_and_what_stays_until_nothing_is_left(tmp_path: Path) -> None:
    async with counting() as (w, (first, second)), controlled(w.fleet, tmp_path / "c"):
        task = await started(w, first)
        second.engine.is_healthy = False
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 1)
        stays = asyncio.create_task(w.ask(COMPLETIONS, BODIES[COMPLETIONS] | {"seed": 7}))
        await w.until(lambda: len(first.engine.got) == 2)
        second.engine.is_healthy = True
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 2)
        command = await drain(first.engine, tmp_path / "c")
        await command.shows("decode: 2 under way (1 can move, 1 seed), 0 moved")
        second.allow(100)
        first.allow(11)
        await command.shows("decode: 1 under way (1 seed), 1 moved")
        assert answer_of((await task)[1]) == WHOLE
        got = len(second.engine.got)
        assert (await w.ask(COMPLETIONS, BODIES[COMPLETIONS]))[0] == 200 and len(second.engine.got) == got + 1
        first.allow(100)
        code, said = await command.ended()
        assert (code, answer_of((await stays)[1])) == (0, WHOLE)
        assert said.endswith(f"{named(first.engine)} has nothing left: it can be stopped\n") and second.engine.got


async def test_an_engine_that_is_taken_back_gets_requests(tmp_path: Path) -> None:
    async with counting() as (w, (first, second)), controlled(w.fleet, tmp_path / "c"):
        task = await started(w, first, seed=7)
        command = await drain(first.engine, tmp_path / "c")
        await command.shows("1 seed")
        assert (await (await drain(first.engine, tmp_path / "c", "--undo")).ended())[0] == 0
        code, said = await command.ended()
        assert code == 1 and "kvbridge drain: taken_back: " in said
        first.allow(100)
        assert answer_of((await task)[1]) == WHOLE
        second.allow(100)
        for _ in range(2):
            assert (await w.ask(COMPLETIONS, BODIES[COMPLETIONS]))[0] == 200
        assert len(first.engine.got) == 2


async def test_what_is_not_gone_in_time_is_named(tmp_path: Path) -> None:
    async with counting() as (w, (first, _)), controlled(w.fleet, tmp_path / "c"):
        task = await started(w, first, seed=7)
        code, said = await (await drain(first.engine, tmp_path / "c", "--timeout-s", "0")).ended()
        assert code == 1 and "not_drained: after 0 s" in said and "1 under way (1 seed)" in said
        first.allow(100)
        assert answer_of((await task)[1]) == WHOLE


async def test_a_prefill_engine_drains_until_its_prompts_are_fetched(tmp_path: Path) -> None:
    async with counting() as (w, (first, _)), controlled(w.fleet, tmp_path / "c"):
        code, said = await (await drain(w.prefill, tmp_path / "c")).ended()
        assert code == 1 and "last_engine: no other prefill engine is healthy" in said
        task = asyncio.create_task(w.ask(COMPLETIONS, BODIES[COMPLETIONS]))
        await w.until(lambda: bool(first.engine.got))  # has not begun to answer
        other = [read_engine(Role.PREFILL, f"vllm={w.all('decode')[1].url}")]
        w.fleet.replace([*w.fleet.listed(), *other])
        await w.until(lambda: other[0].is_healthy)
        command = await drain(w.prefill, tmp_path / "c")
        await command.shows("prefill: 1 under way\n")
        first.allow(100)
        assert (await command.ended())[0] == 0 and answer_of((await task)[1]) == WHOLE


async def test_an_engine_that_is_off_the_list_can_be_watched_and_not_taken_back(tmp_path: Path) -> None:
    async with counting() as (w, (first, second)), controlled(w.fleet, tmp_path / "c"):
        task = await started(w, first, seed=7)
        w.fleet.replace([each for each in w.fleet.listed() if each.name != named(first.engine)])
        command = await drain(first.engine, tmp_path / "c")
        await command.shows("1 seed")
        code, said = await (await drain(first.engine, tmp_path / "c", "--undo")).ended()
        assert code == 1 and "kvbridge drain: no_engine: " in said and named(second.engine) in said
        first.allow(100)
        assert (await command.ended())[0] == 0 and answer_of((await task)[1]) == WHOLE


async def test_an_engine_drains_on_when_the_list_is_read_again(tmp_path: Path) -> None:
    async with counting() as (w, (first, second)), controlled(w.fleet, tmp_path / "c"):
        assert (await (await drain(first.engine, tmp_path / "c")).ended())[0] == 0
        w.fleet.replace([read_engine(each.role, each.name) for each in w.fleet.listed()])
        second.allow(100)
        for _ in range(3):
            assert (await w.ask(COMPLETIONS, BODIES[COMPLETIONS]))[0] == 200
        assert not first.engine.got


async def test_refusals(tmp_path: Path) -> None:
    async with counting(1) as (w, (first,)), controlled(w.fleet, tmp_path / "c"):
        for engine, control, code in (
            (first.engine, "c", "last_engine: no other decode engine is healthy"),
            ("vllm=http://h:1", "c", "no_engine: the proxy has no engine vllm=http://h:1; it has vllm=http"),
            (first.engine, "nobody", "no_proxy: no proxy answers at "),
        ):
            status, said = await (await drain(engine, tmp_path / control)).ended()
            assert status == 1 and f"kvbridge drain: {code}" in said
        assert w.fleet.healthy(Role.DECODE)


async def test_what_is_no_request_is_refused_by_name(tmp_path: Path) -> None:
    client = ClientSession("http://proxy", connector=UnixConnector(str(tmp_path / "c")))
    async with counting() as (w, _), controlled(w.fleet, tmp_path / "c"), client:
        for body in (b"x", b"[]"):
            async with client.post("/drain", data=body) as answer:
                assert (answer.status, (await answer.json())["code"]) == (400, "bad_request")
        async with client.get("/drain", params={"engine": "vllm=http://h:1"}) as answer:
            assert (answer.status, (await answer.json())["code"]) == (404, "no_engine")


async def test_another_users_socket_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.commands.drain.credentials_of", lambda _: (1, 1234, 1234))
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    async with counting() as (w, (first, _)), controlled(w.fleet, tmp_path / "c"):
        with pytest.raises(OperatorError, match="user 1234 listens there"):
            await asyncio.to_thread(undo, named(first.engine), tmp_path / "c")


async def test_the_socket_is_the_users_own_and_no_other_proxys_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with socket.socket(socket.AF_UNIX) as before:
        before.bind(str(path))  # of a proxy that was killed
    async with counting() as (w, _):
        async with controlled(w.fleet, path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(OperatorError, match="is another process's"):
                async with controlled(w.fleet, path):
                    pass
            assert path.exists()
        assert not path.exists()
        path.write_text("mine")
        with pytest.raises(OperatorError, match="or no socket"):
            async with controlled(w.fleet, path):
                pass
        assert path.read_text() == "mine"
        with pytest.raises(OperatorError, match="No such file"):
            async with controlled(w.fleet, tmp_path / "none" / "c"):
                pass


async def test_an_engine_that_becomes_a_prefill_engine_gives_its_answers_up_and_prefills() -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        prefill, became = f"vllm={w.prefill.url}", f"vllm={first.engine.url}"
        engines = [read_engine(Role.PREFILL, prefill), read_engine(Role.PREFILL, became)]
        w.fleet.replace([*engines, read_engine(Role.DECODE, f"vllm={second.engine.url}")])
        await w.until(lambda: len(w.fleet.healthy(Role.PREFILL)) == 2)
        second.allow(100)
        first.allow(11)
        assert answer_of((await task)[1]) == WHOLE
        asked = len(first.engine.got)
        for _ in range(2):
            status, events = await w.ask(COMPLETIONS, BODIES[COMPLETIONS])
            assert status == 200 and answer_of(events) == WHOLE
        prefilled = [body for _, body, _ in first.engine.got[asked:]]
        assert prefilled and all(each["kv_transfer_params"]["do_remote_decode"] for each in prefilled)


async def test_where_moves_are_off_an_answer_ends_where_it_began(tmp_path: Path) -> None:
    async with counting(moves=False) as (w, (first, second)), controlled(w.fleet, tmp_path / "c"):
        task = await started(w, first)
        command = await drain(first.engine, tmp_path / "c")
        await command.shows("decode: 1 under way (1 moves are off), 0 moved")
        first.allow(100)
        assert (await command.ended())[0] == 0 and answer_of((await task)[1]) == WHOLE and not second.engine.got
        assert "return_token_ids" not in first.engine.got[0][1]


async def test_if_the_engine_that_went_on_dies_the_client_has_a_right_beginning_and_an_error() -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        second.allow(20)
        assert w.fleet.drain(named(first.engine), True)
        first.allow(11)
        await w.until(lambda: second.engine.got and not outstanding(w, first.engine))
        await second.engine.stop()
        _, events = await task
        assert json.loads(events[-1])["error"]["code"] == "ended_early"
        said = text_of([json.loads(each) for each in events[:-1]])
        assert WHOLE.startswith(said) and len(said) > len(" ".join(map(str, range(11))))
