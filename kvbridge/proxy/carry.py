"""Carries one ask through a pair of engines: picks them, sends both legs, retries, and cancels what is left over."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
import msgspec

from ..errors import EngineError
from ..oneline import plain
from .bodies import CHAT, COMPLETIONS, GENERATE, MESSAGES, OF_VLLM, Body, ClientError, PromptAsk, encode, parse, pieces
from .events import DONE, ERROR_EVENT, Events, StreamEvent, is_end
from .fleet import Backend, Fleet, LegFailed, NoEngine, Role, Waits, bounded
from .generate import Answering
from .legs import (
    Kind,
    Leg,
    PrefilledLeg,
    read_prefilled,
    sglang_decode_after,
    sglang_decode_beside,
    sglang_prefill,
    traced,
    vllm_decode_after,
    vllm_decode_beside,
    vllm_prefill,
)
from .limits import Busy, RequestBytes
from .logprobs import reads_all, wants_inputs, with_inputs
from .metrics import ProxyMetrics
from .moves import MovableAnswer
from .pulse import Pulse

T = TypeVar("T")

ATTEMPTS = 3
ANSWER_BYTES = 64 << 20
SAID_BYTES = 2000  # of an engine's error text, for the client
BLAME_S = 1.0  # after a decode leg failed, for a failure of its prefill leg to show
SETTLE_S = 5.0  # for a prefill leg to end by itself after the answer is complete
LOST = ("ended_early", "timed_out", "engine_error")  # how a stream fails that another engine may go on with
MOST_RESUMED = ATTEMPTS - 1  # times that an answer goes on after its engine failed: it may be why
MOVES_AT_ONCE = 16  # answers that wait for another engine to go on; others run on where they are until then, or wait
BODY_PIECE_BYTES = 1 << 16  # of a body: as much as is written before others get their turn
TRY_ELSEWHERE = (408, 425, 429)  # not the client's fault: another engine may take the request


class Refusal(Exception):
    """An engine refused the client's request. Others would too, so its answer goes to the client as it is."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"refused with {status}")
        self.status, self.body, self.content_type = status, body, content_type


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request: what engines get of its headers, what is held for it, and who has not answered it yet."""

    headers: Mapping[str, str]
    share: RequestBytes
    awaits: set[str]
    running: MovableAnswer | None = None  # to one of its prompts


@dataclass(frozen=True, slots=True)
class Whole:
    """A decode engine's answer."""

    answer: bytes


@dataclass(frozen=True, slots=True)
class Streamed:
    """A decode engine's streamed answer: its first event, and those that follow. `end` has the engine end it."""

    first: StreamEvent
    rest: AsyncGenerator[StreamEvent, None]
    engine: Backend
    end: Callable[[], None]


Opened = Whole | Streamed
Failure = LegFailed | ClientError | Refusal | Busy
LEG_FAILURES = (LegFailed, ClientError, Refusal, Busy)


class _Ended(msgspec.Struct):
    finish_reason: Any = None


class _Answer(msgspec.Struct):
    """What is read of a decode engine's answer: whether it is one, and complete."""

    choices: list[_Ended] = []
    meta_info: _Ended | None = None
    status: Any = None
    stop_reason: Any = None

    def is_complete(self, path: str, samples: int) -> bool:
        if path in (COMPLETIONS, CHAT):
            return len(self.choices) == samples and all(each.finish_reason for each in self.choices)
        if path == GENERATE:
            return bool(self.meta_info and self.meta_info.finish_reason)
        return bool(self.stop_reason) if path == MESSAGES else self.status in ("completed", "incomplete")


class Carrier:
    """`has_fallback`: a prompt that no prefill engine can prefill is computed by a vLLM decode engine.

    `moves`: running answers of an engine that drains or fails go on at another one.
    """

    def __init__(
        self,
        fleet: Fleet,
        http: aiohttp.ClientSession,
        waits: Waits,
        metrics: ProxyMetrics,
        pulse: Pulse,
        places: int,
        has_fallback: bool,
        moves: bool,
    ) -> None:
        self._fleet, self._http, self._waits, self._metrics, self._pulse = fleet, http, waits, metrics, pulse
        self._places = asyncio.Semaphore(places)
        self._has_fallback, self._moves = has_fallback, moves
        self._moving = 0
        self._resuming = asyncio.Semaphore(MOVES_AT_ONCE)

    def can_serve(self) -> bool:
        """Whether a request could be carried now."""
        can_prefill = bool(self._fleet.healthy(Role.PREFILL)) or self._has_fallback
        kinds = ALL_KINDS if self._fleet.healthy(Role.PREFILL) else (Kind.VLLM,)
        return can_prefill and bool(self._fleet.healthy(Role.DECODE, kinds=kinds))

    @asynccontextmanager
    async def carried(self, ask: PromptAsk, call: Call) -> AsyncIterator[Opened]:
        """Yields the decode engine's answer as soon as it begins. Cancels what is still under way on exit.

        Raises ClientError, Refusal, NoEngine, LegFailed, Busy.
        """
        async with self._places, AsyncExitStack() as stack:
            answer = MovableAnswer(ask)
            if not answer.stays and not (self._moves and self._fleet.moves):
                answer.stays = "no other engine" if self._moves else "moves are off"
            call, is_whole = replace(call, running=answer), bool(answer.stays)
            opened = await self._opened(stack, ask if is_whole else answer.first(), call)
            if isinstance(opened, Streamed) and not is_whole:
                answer.begun_at(opened.engine.kind)
                if not self._fleet.has_other(opened.engine):
                    answer.stays = answer.stays or "no other engine"
                events = self._moved(stack.pop_all(), stack, opened, answer, call)
                await stack.enter_async_context(aclosing(events))
                opened = replace(opened, first=await anext(events), rest=events)
            try:
                yield opened
            except LegFailed as failure:
                self._fleet.failed(failure)
                raise

    async def _moved(
        self, stack: AsyncExitStack, outer: AsyncExitStack, opened: Streamed, answer: MovableAnswer, call: Call
    ) -> AsyncGenerator[StreamEvent, None]:
        """The client's events. When its engine drains or fails, it goes on at another.

        Owns `stack`: what is open. In the end leaves it to `outer`: no client waits until it is closed.
        """
        failed: list[LegFailed] = []
        events = await stack.enter_async_context(aclosing(_events_of(opened)))
        try:
            while True:
                failure = None
                try:
                    async for event in events:
                        yield self._noted(opened, answer, event, call)
                        if self._can_move(opened.engine, answer):
                            break
                    else:
                        return
                except LegFailed as error:
                    failure = error
                    if failure.code not in LOST or len(failed) == MOST_RESUMED or not answer.can_be_cut:
                        raise
                async with AsyncExitStack() as following:
                    if failure is None:
                        other = await self._go_on(following, opened, answer, call)
                    else:
                        failed.append(failure)
                        other = await self._resume(following, failed, answer, call)
                    if other is not None:
                        ended, stack, opened = stack, following.pop_all(), other
                        events = await stack.enter_async_context(aclosing(_events_of(opened)))
                        await ended.aclose()  # the engine counts as used until another has its KV
        finally:
            outer.push_async_exit(stack)

    def _noted(self, opened: Streamed, answer: MovableAnswer, event: StreamEvent, call: Call) -> StreamEvent:
        had_prompt = bool(answer.prompt)
        try:
            own = answer.event(event)
            if not had_prompt:
                call.share.add(len(answer.prompt))
        except EngineError as error:
            raise LegFailed(opened.engine, error.code, str(error), is_retryable=False) from None
        except Busy as busy:
            answer.stays = busy.code
        return own

    def _can_move(self, engine: Backend, answer: MovableAnswer) -> bool:
        is_due = engine.is_draining and self._moving < MOVES_AT_ONCE and answer.can_be_cut
        computes = engine.kind is Kind.VLLM or bool(self._fleet.healthy(Role.PREFILL))
        return is_due and computes and bool(self._fleet.healthy(Role.DECODE, kinds=(engine.kind,)))

    async def _go_on(
        self, stack: AsyncExitStack, before: Streamed, answer: MovableAnswer, call: Call
    ) -> Streamed | None:
        """Have another engine go on, and this one end its answer: vLLM at once, as it keeps its KV for the other.

        If none does, vLLM computes it again. SGLang, which could not, goes on with what it has: None.
        """
        engine, ends = before.engine, before.engine.kind is Kind.VLLM
        ask, outcome = answer.rest(is_kept=ends), "moved"
        opened: Opened | None
        if ends:
            before.end()
            call.awaits.discard(engine.label)
        self._moving += 1
        try:
            opened = await self._opened(stack, ask, call)
            call.awaits.discard(engine.label)
        except (NoEngine, *LEG_FAILURES) as error:
            self._fleet.sparing.say("returned", f"returned: {engine.label} goes on with what it gave up: {error}")
            outcome, answer.stays = "returned", "no other engine took it"
            opened = await self._returned(stack, engine, ask, answer, call) if ends else None
        finally:
            self._moving -= 1
        self._fleet.moved(engine, outcome)
        if opened is None:
            return None
        answer.goes_on(ask)
        assert isinstance(opened, Streamed)
        return opened

    async def _returned(
        self, stack: AsyncExitStack, engine: Backend, ask: PromptAsk, answer: MovableAnswer, call: Call
    ) -> Opened:
        stack.enter_context(self._fleet.used(engine, answer))
        try:
            return await self._open(stack, engine, vllm_decode_after(ask, PrefilledLeg(None)), ask, call)
        except (Refusal, ClientError) as refusal:  # the client has a part of the answer already
            raise LegFailed(engine, "refused", str(refusal), is_retryable=False) from None

    async def _resume(
        self, stack: AsyncExitStack, failed: list[LegFailed], answer: MovableAnswer, call: Call
    ) -> Streamed:
        """Have another engine go on. `failed` are those that had this answer before; raises the last one's failure."""
        failure, ask = failed[-1], answer.rest(is_kept=False)
        call.awaits.discard(failure.engine.label)
        try:
            async with self._resuming:
                opened = await self._opened(stack, ask, call, [each.engine for each in failed])
        except (NoEngine, *LEG_FAILURES) as error:
            self._fleet.sparing.say("not resumed", f"not resumed: of {failure.engine.label}: {error}")
            raise failure from None
        assert isinstance(opened, Streamed)
        answer.goes_on(ask)
        self._fleet.failed(failure)
        self._fleet.moved(failure.engine, "resumed")
        return opened

    async def _opened(
        self, stack: AsyncExitStack, ask: PromptAsk, call: Call, without: Sequence[Backend] = ()
    ) -> Opened:
        """Try pairs until one answers, then, if prefill is what failed, decode engines alone."""
        failed = list(without)
        for role in Role:
            await self._fleet.wait_checked(role, _kinds(ask, role))
        attempt, alone = 0, "reads_all" if reads_all(ask) and self._computes(ask, failed) else ""
        while True:
            attempt += 1
            try:
                return await self._attempt(stack, ask, call, failed, alone)
            except NoEngine as none:
                error: NoEngine | LegFailed = none
                role, is_other = none.role, False
            except LegFailed as failure:
                self._fleet.failed(failure)
                failed.append(failure.engine)
                if not failure.is_retryable:
                    raise
                error, role = failure, failure.engine.role
                is_other = attempt < ATTEMPTS and bool(self._fleet.healthy(role, failed))
            if is_other:
                self._metrics.retries.inc()
            elif role is Role.PREFILL and self._has_fallback and self._computes(ask, failed):
                attempt, alone = 0, error.code
                self._fleet.sparing.say(
                    f"alone {alone}", f"{alone}: without prefill, a decode engine computes a prompt"
                )
            else:
                raise error

    def _computes(self, ask: PromptAsk, failed: list[Backend]) -> bool:
        """Whether a decode engine is healthy that can compute this prompt."""
        is_able = Kind.VLLM in _kinds(ask, Role.DECODE)
        return is_able and bool(self._fleet.healthy(Role.DECODE, failed, (Kind.VLLM,)))

    async def _attempt(
        self, outer: AsyncExitStack, ask: PromptAsk, call: Call, failed: list[Backend], alone: str
    ) -> Opened:
        """Try one pair; or a decode engine that computes the prompt, for the reason `alone`.

        On success `outer` takes what is held; on failure it is released.
        """
        async with AsyncExitStack() as stack:
            began = time.monotonic()
            if alone:
                decode = stack.enter_context(self._fleet.lend(Role.DECODE, failed, (Kind.VLLM,), call.running))
                self._metrics.without_prefill.labels(alone).inc()
                opened = await self._open(stack, decode, vllm_decode_after(ask, PrefilledLeg(None)), ask, call)
            else:
                opened = await self._paired(stack, ask, call, failed, began)
            self._metrics.first_s.observe(time.monotonic() - began)
            outer.push_async_exit(stack.pop_all())
            return opened

    async def _paired(
        self, stack: AsyncExitStack, ask: PromptAsk, call: Call, failed: list[Backend], began: float
    ) -> Opened:
        """By the next pair, under a new room."""
        with ExitStack() as prefilling:  # vLLM's prefill is over once the answer begins
            prefill, decode = (
                held.enter_context(self._fleet.lend(role, failed, _kinds(ask, role), call.running))
                for role, held in ((Role.PREFILL, prefilling), (Role.DECODE, stack))
            )
            self._metrics.pairs.labels(prefill.kind, decode.kind).inc()
            room = secrets.randbelow((1 << 63) - 1) + 1
            if prefill.kind is Kind.SGLANG:
                stack.push(prefilling.pop_all())
                return await self._both(stack, prefill, decode, ask, call, room)
            leg = await self._prefill_first(prefill, decode, ask, call, room)
            self._metrics.prefill_s.observe(time.monotonic() - began)
            return await self._open(stack, decode, leg, ask, call)

    # Prefill, then decode:

    async def _prefill_first(self, prefill: Backend, decode: Backend, ask: PromptAsk, call: Call, room: int) -> Leg:
        """Prefill. Returns the decode leg that follows from the answer."""
        if decode.kind is Kind.VLLM:
            vllm_decode_after(ask, PrefilledLeg(None))  # refuse what vLLM cannot do before anybody computes
        leg = vllm_prefill(ask, room, decode.kind)
        answer = await self._whole(prefill, leg, call, self._waits.prefill_s)
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
        self, stack: AsyncExitStack, prefill: Backend, decode: Backend, ask: PromptAsk, call: Call, room: int
    ) -> Opened:
        first = sglang_prefill(ask, room, prefill.host, prefill.bootstrap_port, decode.kind)
        if decode.kind is Kind.VLLM:
            second = vllm_decode_beside(ask, room, await self._fleet.agent_of(prefill, room))
        else:
            second = sglang_decode_beside(ask, room, prefill.host, prefill.bootstrap_port)
        prefilling = await stack.enter_async_context(_beside(self._settled(prefill, first, call)))
        inputs = prefilling if decode.kind is Kind.SGLANG and wants_inputs(ask) else None
        opening = await stack.enter_async_context(
            _beside(_outcome(self._open(stack, decode, second, ask, call, inputs)))
        )
        await asyncio.wait((prefilling, opening), return_when=asyncio.FIRST_COMPLETED)
        if (failure := _failure(prefilling)) is not None and not _is_open(opening):
            raise failure
        opened = await opening  # bounded by its own timeouts
        if isinstance(opened, Whole | Streamed):
            return opened
        if isinstance(opened, LegFailed) and opened.code != "unreachable":
            await asyncio.wait((prefilling,), timeout=BLAME_S)
            if (failure := _failure(prefilling)) is not None:
                raise failure  # the cause: the decode engine had nothing to decode
        raise opened

    async def _settled(self, prefill: Backend, leg: Leg, call: Call) -> bytes | Failure:
        """Run a prefill leg beside its decode leg. Returns its answer or its failure."""
        began = time.monotonic()
        try:
            answer = await self._whole(prefill, leg, call, self._waits.prefill_s)
            parse(answer, dict[str, msgspec.Raw] | list[msgspec.Raw])
        except ValueError:
            return LegFailed(prefill, "bad_answer", "what it answered is no JSON object")
        except LEG_FAILURES as failure:
            return failure
        self._metrics.prefill_s.observe(time.monotonic() - began)
        return answer

    # One leg:

    async def _open(
        self,
        stack: AsyncExitStack,
        engine: Backend,
        leg: Leg,
        ask: PromptAsk,
        call: Call,
        inputs: Prefilling | None = None,
    ) -> Opened:
        """`inputs`: the prefill leg whose answer has the prompt's log probabilities."""
        if not ask.is_stream:
            answer = self._checked(engine, ask, await self._whole(engine, leg, call, self._waits.answer_s))
            return Whole(await self._with_inputs(engine, ask, inputs, answer) if inputs else answer)
        async with AsyncExitStack() as opening:  # who cancels us closes what is in `stack` while we still wait here
            reply = await self._post(engine, leg, call, self._waits.answer_s)
            opening.callback(reply.close)
            events = self._events(engine, reply, ask, call, inputs)
            opening.push_async_callback(events.aclose)
            opened = Streamed(await anext(events), events, engine, reply.close)
            stack.push_async_exit(opening.pop_all())
            return opened

    def _checked(self, engine: Backend, ask: PromptAsk, answer: bytes) -> bytes:
        """The answer as the client is to have it. Raises LegFailed if it is incomplete."""
        try:
            if ask.path == GENERATE and engine.kind is Kind.VLLM:
                return encode(Answering(_rid(ask)).whole(parse(answer, Body)))
            if parse(answer, _Answer).is_complete(ask.path, ask.samples):
                return answer
        except EngineError as error:
            raise LegFailed(engine, error.code, str(error), is_retryable=False) from None
        except ValueError:
            raise LegFailed(engine, "bad_answer", "what it answered cannot be read", is_retryable=False) from None
        reason = "answered without an answer and its finish_reason"
        raise LegFailed(engine, "bad_answer", reason, is_retryable=False)

    async def _with_inputs(self, engine: Backend, ask: PromptAsk, inputs: Prefilling, answer: bytes) -> bytes:
        prefilled = await asyncio.shield(inputs)  # bounded by its own timeouts
        if not isinstance(prefilled, bytes):
            raise prefilled
        try:
            return with_inputs(ask, prefilled, answer)
        except (ValueError, KeyError, IndexError, TypeError):
            reason = "its log probabilities cannot be read"
            raise LegFailed(engine, "bad_answer", reason, is_retryable=False) from None

    async def _events(
        self,
        engine: Backend,
        reply: aiohttp.ClientResponse,
        ask: PromptAsk,
        call: Call,
        inputs: Prefilling | None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """The stream's events for the client, the last one its end. Raises LegFailed, Refusal."""
        answering = Answering(_rid(ask)) if ask.path == GENERATE and engine.kind is Kind.VLLM else None
        has_begun = is_finish = is_over = False
        with _blamed(engine, False, f"silent for {self._waits.answer_s:g} s", "the stream ended early"):
            async with aclosing(self._received(reply, call)) as received:
                async for event in received:
                    answer: StreamEvent | None = event
                    if event.data == DONE:
                        if not is_finish:
                            raise EngineError("ended_early", "the stream ended without finish_reason")
                        is_over = True
                    elif ERROR_EVENT.match(event.data):
                        if not has_begun and (status := _refused(event.data)):
                            raise Refusal(status, event.data)
                        raise LegFailed(engine, "engine_error", "an error in its stream", False, _shown(event.data))
                    elif answer := _translated(answering, event) if answering else event:
                        if inputs and (ask.path == GENERATE or not has_begun):
                            answer = StreamEvent(await self._with_inputs(engine, ask, inputs, answer.data))
                        has_begun = True
                        is_finish = is_finish or is_end(ask.path, answer.data)
                        is_over = is_finish and ask.path in OF_VLLM
                    if is_over:
                        call.awaits.discard(engine.label)
                    if answer is not None:
                        yield answer
                    if is_over:
                        return
            raise EngineError("ended_early", "the stream ended " + ("too early" if has_begun else "before it began"))

    async def _received(self, reply: aiohttp.ClientResponse, call: Call) -> AsyncGenerator[StreamEvent, None]:
        cutter = Events()
        while True:
            async with asyncio.timeout(self._waits.answer_s):
                chunk = await reply.content.readany()
            if not chunk:
                return
            before = cutter.rest_bytes
            for event in cutter.take(chunk):
                yield event
            call.share.add(cutter.rest_bytes - before)

    async def _whole(self, engine: Backend, leg: Leg, call: Call, timeout_s: float) -> bytes:
        """What an engine answers. Raises LegFailed, Refusal, Busy."""
        ends = time.monotonic() + timeout_s
        is_retryable = engine.role is Role.PREFILL
        async with await self._post(engine, leg, call, timeout_s) as reply:
            with _blamed(engine, is_retryable, f"no whole answer within {timeout_s:g} s", "its answer ended early"):
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    answer = await bounded(reply, ANSWER_BYTES, call.share)
                call.awaits.discard(engine.label)
                return answer

    async def _post(self, engine: Backend, leg: Leg, call: Call, timeout_s: float) -> aiohttp.ClientResponse:
        """Send a leg. Returns the open reply, with status 200. Raises LegFailed, Refusal."""
        is_prefill = engine.role is Role.PREFILL
        ended = "closed the connection without an answer"
        with _blamed(engine, is_prefill, f"no answer within {timeout_s:g} s", ended):
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._sent(engine, leg, call)
            except aiohttp.ConnectionTimeoutError:
                raise LegFailed(engine, "unreachable", "does not take a connection") from None
            except aiohttp.ClientConnectorError as error:
                raise LegFailed(engine, "unreachable", error.strerror or "cannot be reached") from None
        if reply.status == 200:
            return reply
        try:
            async with asyncio.timeout(self._waits.connect_s):
                text = await bounded(reply, ANSWER_BYTES, call.share)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            text = b""
        finally:
            reply.close()
        if 400 <= reply.status < 500 and reply.status not in TRY_ELSEWHERE:
            raise Refusal(reply.status, text, reply.content_type)
        raise LegFailed(engine, "engine_error", f"answered {reply.status}", is_prefill, _shown(text))

    async def _sent(self, engine: Backend, leg: Leg, call: Call) -> aiohttp.ClientResponse:
        call.awaits.add(engine.label)
        if trace := call.headers.get("traceparent"):
            leg = traced(leg, engine.kind, trace)
        body = pieces(leg.body)
        headers = {**call.headers, "Content-Length": str(sum(map(len, body)))}
        while True:
            began = asyncio.get_running_loop().time()
            try:
                url = engine.url + leg.path
                return await self._http.post(url, data=_in_turns(body), headers=headers, allow_redirects=False)
            except aiohttp.ConnectionTimeoutError:
                if not self._pulse.was_late_since(began):
                    raise  # else we did not look whether it took the connection


ALL_KINDS = tuple(Kind)


def _kinds(ask: PromptAsk, role: Role) -> tuple[Kind, ...]:
    """Those that take what was asked."""
    if ask.path in OF_VLLM or ask.samples > 1:
        return (Kind.VLLM,)
    return (Kind(ask.kind),) if ask.kind and role is Role.DECODE else ALL_KINDS


Prefilling = asyncio.Task[bytes | Failure]


@contextmanager
def _blamed(engine: Backend, is_retryable: bool, late: str, ended: str) -> Iterator[None]:
    """What goes wrong inside is a failure of this engine: `late` says that it is silent, `ended` that it goes away."""
    try:
        yield
    except EngineError as error:
        raise LegFailed(engine, error.code, str(error), is_retryable) from None
    except TimeoutError:
        raise LegFailed(engine, "timed_out", late, is_retryable) from None
    except (aiohttp.ClientError, OSError) as error:
        raise LegFailed(engine, "ended_early", f"{ended}: {type(error).__name__}", is_retryable) from None
    except ValueError as error:
        raise LegFailed(engine, "bad_answer", str(error), is_retryable) from None


async def _events_of(opened: Streamed) -> AsyncGenerator[StreamEvent, None]:
    yield opened.first
    async for event in opened.rest:
        yield event


async def _in_turns(body: list[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for piece in body:
        for begin in range(0, len(piece), BODY_PIECE_BYTES):
            yield piece[begin : begin + BODY_PIECE_BYTES]


def _translated(answering: Answering, event: StreamEvent) -> StreamEvent | None:
    """Raises EngineError."""
    try:
        body = parse(event.data, Body)
    except ValueError:
        raise EngineError("bad_answer", "an event that is no JSON object") from None
    own = answering.event(body)
    return None if own is None else StreamEvent(encode(own))


def _rid(ask: PromptAsk) -> str:
    rid = ask.body.get("rid")
    return rid if isinstance(rid, str) else secrets.token_hex(16)


def _shown(text: bytes) -> str:
    return plain(text.decode(errors="replace"), SAID_BYTES)


def _refused(event: bytes) -> int:
    """The status of an error that the client can fix, 0 for any other."""
    try:
        code = parse(event)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 0
    return code if type(code) is int and 400 <= code < 500 and code not in TRY_ELSEWHERE else 0


def _failure(prefilling: Prefilling) -> Failure | None:
    outcome = prefilling.result() if prefilling.done() else None
    return None if isinstance(outcome, bytes) else outcome


def _is_open(opening: asyncio.Task[Opened | Failure]) -> bool:
    return opening.done() and isinstance(opening.result(), Whole | Streamed)


async def _outcome(opening: Awaitable[Opened]) -> Opened | Failure:
    try:
        return await opening
    except LEG_FAILURES as failure:
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
