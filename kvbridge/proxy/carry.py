"""Carries one ask through a pair of engines: picks them, sends both legs, retries, and cancels what is left over."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from ..errors import EngineError
from ..oneline import plain
from .bodies import GENERATE, Body, ClientError, PromptAsk, encode, parse
from .events import DONE, FAILED, FINISH, Events
from .fleet import Backend, Fleet, LegFailed, Role, Waits, bounded
from .generate import Answering, is_finished
from .legs import (
    Kind,
    Leg,
    PrefilledLeg,
    read_prefilled,
    sglang_decode_after,
    sglang_decode_beside,
    sglang_prefill,
    vllm_decode_after,
    vllm_decode_beside,
    vllm_prefill,
)
from .metrics import ProxyMetrics

T = TypeVar("T")

ATTEMPTS = 3
ANSWER_BYTES = 64 << 20
SAID_BYTES = 2000  # of an engine's error text, for the client
BLAME_S = 1.0  # after a decode leg failed, for a failure of its prefill leg to show
SETTLE_S = 5.0  # for a prefill leg to end by itself after the answer is complete
ELSEWHERE = (408, 425, 429)  # not the client's fault: another engine may take the request


class Refusal(Exception):
    """An engine refused the client's request. Others would too, so its answer goes to the client as it is."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"refused with {status}")
        self.status, self.body, self.content_type = status, body, content_type


@dataclass(frozen=True, slots=True)
class Whole:
    """A decode engine's answer."""

    answer: Body


@dataclass(frozen=True, slots=True)
class Streamed:
    """A decode engine's streamed answer: the data of its first event, and of those that follow."""

    first: bytes
    rest: AsyncGenerator[bytes, None]


Opened = Whole | Streamed
Failure = LegFailed | ClientError | Refusal
FAILURES = (LegFailed, ClientError, Refusal)


class Carrier:
    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, waits: Waits, metrics: ProxyMetrics) -> None:
        self._fleet, self._http, self._waits, self._metrics = fleet, http, waits, metrics

    @asynccontextmanager
    async def carried(self, ask: PromptAsk, headers: Mapping[str, str]) -> AsyncIterator[Opened]:
        """Yields the decode engine's answer as soon as it begins. Cancels what is still under way on exit.

        Raises ClientError, Refusal, NoEngine, LegFailed.
        """
        failed: list[Backend] = []
        async with AsyncExitStack() as stack:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    opened = await self._attempt(stack, ask, headers, failed)
                    break
                except LegFailed as failure:
                    self._fleet.failed(failure)
                    failed.append(failure.engine)
                    is_other = bool(self._fleet.well(failure.engine.role, failed))
                    if not (failure.is_retryable and is_other and attempt < ATTEMPTS):
                        raise
                    self._metrics.retries.inc()
            try:
                yield opened
            except LegFailed as failure:
                self._fleet.failed(failure)
                raise

    async def _attempt(
        self, outer: AsyncExitStack, ask: PromptAsk, headers: Mapping[str, str], failed: list[Backend]
    ) -> Opened:
        """Try one pair, under a new room. On success `outer` takes what is held; on failure it is released."""
        async with AsyncExitStack() as stack:
            prefill = stack.enter_context(self._fleet.lend(Role.PREFILL, failed))
            decode = stack.enter_context(self._fleet.lend(Role.DECODE, failed))
            self._metrics.pairs.labels(prefill.kind, decode.kind).inc()
            room = secrets.randbelow((1 << 63) - 1) + 1
            began = time.monotonic()
            if prefill.kind is Kind.VLLM:
                leg = await self._prefill_first(prefill, decode, ask, headers, room)
                self._metrics.prefill_s.observe(time.monotonic() - began)
                opened = await self._open(stack, decode, leg, ask, headers)
            else:
                opened = await self._both(stack, prefill, decode, ask, headers, room)
            self._metrics.first_s.observe(time.monotonic() - began)
            outer.push_async_exit(stack.pop_all())
            return opened

    # Prefill, then decode:

    async def _prefill_first(
        self, prefill: Backend, decode: Backend, ask: PromptAsk, headers: Mapping[str, str], room: int
    ) -> Leg:
        """Prefill. Returns the decode leg that follows from the answer."""
        if decode.kind is Kind.VLLM:
            vllm_decode_after(ask, PrefilledLeg(None))  # refuse what vLLM cannot do before anybody computes
        leg = vllm_prefill(ask, room, decode.kind)
        answer = await self._whole(prefill, leg, headers, self._waits.prefill_s)
        try:
            prefilled = read_prefilled(ask, answer, wants_token=decode.kind is Kind.SGLANG)
            if decode.kind is Kind.SGLANG:
                return sglang_decode_after(ask, room, prefilled)
        except EngineError as error:
            raise LegFailed(prefill, error.code, str(error)) from None
        if prefilled.params is None:
            self._metrics.without_kv.labels(prefill.name).inc()
        return vllm_decode_after(ask, prefilled)

    # Both at once:

    async def _both(
        self,
        stack: AsyncExitStack,
        prefill: Backend,
        decode: Backend,
        ask: PromptAsk,
        headers: Mapping[str, str],
        room: int,
    ) -> Opened:
        first = sglang_prefill(ask, room, prefill.host, prefill.bootstrap_port, decode.kind)
        if decode.kind is Kind.VLLM:
            second = vllm_decode_beside(ask, room, await self._fleet.agent_of(prefill, room))
        else:
            second = sglang_decode_beside(ask, room, prefill.host, prefill.bootstrap_port)
        prefilling = await stack.enter_async_context(_beside(self._settled(prefill, first, headers)))
        opening = await stack.enter_async_context(_beside(_outcome(self._open(stack, decode, second, ask, headers))))
        await asyncio.wait((prefilling, opening), return_when=asyncio.FIRST_COMPLETED)
        if prefilling.done() and (failure := prefilling.result()) is not None and not _is_open(opening):
            raise failure
        opened = await opening  # bounded by its own timeouts
        if isinstance(opened, Whole | Streamed):
            return opened
        if isinstance(opened, LegFailed) and opened.code != "unreachable":
            await asyncio.wait((prefilling,), timeout=BLAME_S)
            if prefilling.done() and (failure := prefilling.result()) is not None:
                raise failure  # the cause: the decode engine had nothing to decode
        raise opened

    async def _settled(self, prefill: Backend, leg: Leg, headers: Mapping[str, str]) -> Failure | None:
        """Run a prefill leg whose answer is not used. Returns its failure, or None."""
        began = time.monotonic()
        try:
            await self._whole(prefill, leg, headers, self._waits.prefill_s)
        except FAILURES as failure:
            return failure
        self._metrics.prefill_s.observe(time.monotonic() - began)
        return None

    # One leg:

    async def _open(
        self, stack: AsyncExitStack, engine: Backend, leg: Leg, ask: PromptAsk, headers: Mapping[str, str]
    ) -> Opened:
        if not ask.is_stream:
            answer = await self._whole(engine, leg, headers, self._waits.answer_s)
            return self._checked(engine, ask, answer)
        reply = await self._post(engine, leg, headers, self._waits.answer_s)
        stack.callback(reply.close)
        events = self._events(engine, reply, ask)
        stack.push_async_callback(events.aclose)
        return Streamed(await anext(events), events)

    def _checked(self, engine: Backend, ask: PromptAsk, answer: Body) -> Whole:
        """The answer as the client is to have it. Raises LegFailed if it is incomplete."""
        try:
            if ask.path == GENERATE and engine.kind is Kind.VLLM:
                answer = Answering(_rid(ask)).whole(answer)
            elif ask.path == GENERATE:
                if not answer["meta_info"]["finish_reason"]:
                    raise KeyError
            elif not answer["choices"][0]["finish_reason"]:
                raise KeyError
        except EngineError as error:
            raise LegFailed(engine, error.code, str(error), is_retryable=False) from None
        except (KeyError, IndexError, TypeError):
            reason = "answered without an answer and its finish_reason"
            raise LegFailed(engine, "bad_answer", reason, is_retryable=False) from None
        return Whole(answer)

    async def _events(
        self, engine: Backend, reply: aiohttp.ClientResponse, ask: PromptAsk
    ) -> AsyncGenerator[bytes, None]:
        """The stream's events as the client is to have them, the last one `[DONE]`. Raises LegFailed, Refusal."""
        answering = Answering(_rid(ask)) if ask.path == GENERATE and engine.kind is Kind.VLLM else None
        is_said = is_finish = False
        cutter = Events()
        try:
            while True:
                async with asyncio.timeout(self._waits.answer_s):
                    chunk = await reply.content.readany()
                if not chunk:
                    break
                for event in cutter.take(chunk):
                    if event == DONE:
                        if not is_finish:
                            raise EngineError("ended_early", "the stream ended without finish_reason")
                        yield DONE
                        return
                    if FAILED.match(event):
                        if not is_said and (status := _refused(event)):
                            raise Refusal(status, event)
                        raise LegFailed(engine, "engine_error", "an error in its stream", False, _shown(event))
                    said = _translated(answering, event) if answering else event
                    if said is None:
                        continue
                    is_said = True
                    is_finish = is_finish or (is_finished(said) if ask.path == GENERATE else bool(FINISH.search(said)))
                    yield said
            raise EngineError("ended_early", "the stream ended " + ("without [DONE]" if is_said else "before it began"))
        except EngineError as error:
            raise LegFailed(engine, error.code, str(error), is_retryable=False) from None
        except TimeoutError:
            reason = f"silent for {self._waits.answer_s:g} s"
            raise LegFailed(engine, "timed_out", reason, is_retryable=False) from None
        except (aiohttp.ClientError, OSError) as error:
            reason = f"the stream ended early: {type(error).__name__}"
            raise LegFailed(engine, "ended_early", reason, is_retryable=False) from None

    async def _whole(self, engine: Backend, leg: Leg, headers: Mapping[str, str], timeout_s: float) -> Body:
        """The JSON object that an engine answers. Raises LegFailed, Refusal."""
        ends = time.monotonic() + timeout_s
        is_retryable = engine.role is Role.PREFILL
        async with await self._post(engine, leg, headers, timeout_s) as reply:
            try:
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    answer = parse(await bounded(reply, ANSWER_BYTES))
            except TimeoutError:
                reason = f"no whole answer within {timeout_s:g} s"
                raise LegFailed(engine, "timed_out", reason, is_retryable) from None
            except (aiohttp.ClientError, OSError) as error:
                reason = f"its answer ended early: {type(error).__name__}"
                raise LegFailed(engine, "ended_early", reason, is_retryable) from None
            except ValueError:
                raise LegFailed(engine, "bad_answer", "what it answered is no JSON", is_retryable) from None
        if engine.role is Role.PREFILL and engine.kind is Kind.SGLANG and isinstance(answer, list):
            return {}
        if not isinstance(answer, dict):
            raise LegFailed(engine, "bad_answer", "what it answered is no JSON object", is_retryable)
        return answer

    async def _post(
        self, engine: Backend, leg: Leg, headers: Mapping[str, str], timeout_s: float
    ) -> aiohttp.ClientResponse:
        """Send a leg. Returns the open reply, with status 200. Raises LegFailed, Refusal."""
        is_prefill = engine.role is Role.PREFILL
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._http.post(
                    engine.url + leg.path, data=encode(leg.body), headers=headers, allow_redirects=False
                )
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise LegFailed(engine, "unreachable", "does not take a connection") from None
            raise LegFailed(engine, "timed_out", f"no answer within {timeout_s:g} s", is_prefill) from None
        except aiohttp.ClientConnectorError as error:
            raise LegFailed(engine, "unreachable", error.strerror or "cannot be reached") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = f"closed the connection without an answer: {type(error).__name__}"
            raise LegFailed(engine, "ended_early", reason, is_prefill) from None
        if reply.status == 200:
            return reply
        try:
            async with asyncio.timeout(self._waits.connect_s):
                said = await bounded(reply, ANSWER_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            said = b""
        finally:
            reply.close()
        if 400 <= reply.status < 500 and reply.status not in ELSEWHERE:
            raise Refusal(reply.status, said, reply.content_type)
        raise LegFailed(engine, "engine_error", f"answered {reply.status}", is_prefill, _shown(said))


def _translated(answering: Answering, event: bytes) -> bytes | None:
    """Raises EngineError."""
    try:
        said = parse(event)
    except ValueError:
        raise EngineError("bad_answer", "an event that is no JSON") from None
    if not isinstance(said, dict):
        raise EngineError("bad_answer", "an event that is no JSON object")
    own = answering.event(said)
    return None if own is None else encode(own)


def _rid(ask: PromptAsk) -> str:
    rid = ask.body.get("rid")
    return rid if isinstance(rid, str) else secrets.token_hex(16)


def _shown(said: bytes) -> str:
    return plain(said.decode(errors="replace"), SAID_BYTES)


def _refused(event: bytes) -> int:
    """The status of an error that the client can fix, 0 for any other."""
    try:
        code = parse(event)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 0
    return code if type(code) is int and 400 <= code < 500 and code not in ELSEWHERE else 0


def _is_open(opening: asyncio.Task[Opened | Failure]) -> bool:
    return opening.done() and isinstance(opening.result(), Whole | Streamed)


async def _outcome(opening: Awaitable[Opened]) -> Opened | Failure:
    try:
        return await opening
    except FAILURES as failure:
        return failure


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` as a task. On a normal exit it gets SETTLE_S to end, then it is cancelled. Drops its errors."""
    task = asyncio.create_task(work)
    try:
        yield task
        await asyncio.wait((task,), timeout=SETTLE_S)
    finally:
        task.cancel()
        await asyncio.wait((task,))
