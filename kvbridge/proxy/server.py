"""The proxy's HTTP server: takes clients' requests and returns what a pair of engines answers."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics

from ..errors import OperatorError
from ..oneline import OneLine, plain_lines
from .bodies import OF_VLLM, PATHS, Asks, Body, ClientError, PromptAsk, merge, read
from .carry import Call, Carrier, Refusal, Streamed, Whole
from .connections import Connections
from .control import controlled
from .events import StreamEvent
from .fleet import (
    Backend,
    Fleet,
    LegFailed,
    NoEngine,
    Role,
    Waits,
    bounded,
    checked,
    read_engine,
    read_engines,
    read_keys,
)
from .limits import BODY_BYTES, Busy, MemoryBound, ProxyLimits, RequestBytes, limits_here
from .metrics import ProxyMetrics
from .pulse import Pulse

log = logging.getLogger("kvbridge.proxy")
log.addFilter(OneLine())


class _NotMalformed(logging.Filter):
    """Keeps malformed HTTP out of the log: the library would quote its bytes, which may be a prompt's."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


library_log = logging.getLogger("kvbridge.proxy.http")
library_log.addFilter(_NotMalformed())

INLINE_BYTES = 1 << 18  # a larger body is read on a thread, one at a time
ASKS_AT_ONCE = 16  # asks of one body that run at a time
REFUSED_BODY_S = 1.0  # how long the rest of a refused body is read, so that the client can read why
PROXY_STOP_S = 10.0  # how long requests under way may take once the proxy is told to stop
PASSED_ON = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
HEADER_CHARS = 512  # of an id or a trace context
USUAL_LIMITS = ProxyLimits()


def run(
    prefill: Sequence[str],
    decode: Sequence[str],
    listed: Path | None,
    listen: str,
    waits: Waits,
    has_fallback: bool,
    moves: bool,
    log_level: str,
    control: Path | None = None,
    sglang_keys: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. On SIGHUP read the file `listed` again. Raises OperatorError."""
    named = [read_engine(Role.PREFILL, text) for text in prefill] + [read_engine(Role.DECODE, s) for s in decode]
    if listed is not None and named:
        raise OperatorError("bad_option", "engines: they are in the file, or named by --prefill and --decode; not both")
    engines = checked(named) if listed is None else read_engines(listed)
    keys = () if sglang_keys is None else read_keys(sglang_keys)
    host, port = read_listen(listen)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    disable_created_metrics()  # one more series per counter, which nobody reads
    limits = limits_here(len(engines))
    asyncio.run(_run(engines, listed, host, port, waits, limits, has_fallback, moves, control, keys))


class _PlainFormatter(logging.Formatter):
    """Indents the lines of exceptions, also in libraries' records, so that none looks like a record of ours."""

    def format(self, record: logging.LogRecord) -> str:
        return plain_lines(super().format(record))


def read_listen(text: str) -> tuple[str, int]:
    """Raises OperatorError."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise OperatorError("bad_option", f"listen: got {text!r}, need HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _run(
    engines: Sequence[Backend],
    listed: Path | None,
    host: str,
    port: int,
    waits: Waits,
    limits: ProxyLimits,
    has_fallback: bool,
    moves: bool,
    control: Path | None,
    keys: Sequence[str],
) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        served = serving(engines, host, port, waits, limits, has_fallback, moves, keys)
        place, fleet = await stack.enter_async_context(served)
        if control is not None:
            await stack.enter_async_context(controlled(fleet, control))
        if listed is not None:
            loop.add_signal_handler(signal.SIGHUP, _reload, fleet, listed)
        log.info("serving: http://%s %s", place, _sides(engines))
        await stopped.wait()


def _reload(fleet: Fleet, listed: Path) -> None:
    """Use the engines that the file names now. If it cannot be read, keep those that it named before."""
    try:
        engines = read_engines(listed)
    except OperatorError as error:
        return log.error("%s: not reloaded: %s", error.code, error)
    fleet.replace(engines)
    log.info("reloaded: %s", _sides(engines))


def _sides(engines: Sequence[Backend]) -> str:
    return " ".join(f"{role}: {', '.join(e.name for e in engines if e.role is role)}" for role in Role)


@asynccontextmanager
async def serving(
    engines: Sequence[Backend],
    host: str,
    port: int,
    waits: Waits,
    limits: ProxyLimits = USUAL_LIMITS,
    has_fallback: bool = True,
    moves: bool = True,
    keys: Sequence[str] = (),
) -> AsyncIterator[tuple[str, Fleet]]:
    """Run the proxy; yields its address and its engines. Raises OperatorError if it cannot listen there."""
    # A connection per request: an engine that closes an idle connection would look like one that failed.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=waits.connect_s)
    metrics = ProxyMetrics()
    pulse = Pulse(metrics)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers={"Accept-Encoding": "identity"}, trust_env=False
    ) as http:
        fleet = Fleet(engines, http, waits, metrics, pulse, keys)
        carrier = Carrier(fleet, http, waits, metrics, pulse, limits.asks, has_fallback, moves)
        proxy = Proxy(fleet, carrier, http, waits, limits, metrics)
        runner = web.AppRunner(
            proxy.app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=PROXY_STOP_S,
            lingering_time=REFUSED_BODY_S,
            keepalive_timeout=waits.client_s,  # until a request's head is whole, too
            auto_decompress=False,
            logger=library_log,
        )
        await runner.setup()
        assert runner.server is not None
        proxy.connections = Connections(runner.server, limits.connections, metrics, fleet.sparing)
        try:
            async with proxy.connections.listening(host, port) as taken:
                yield (f"[{taken[0]}]:{taken[1]}" if ":" in taken[0] else f"{taken[0]}:{taken[1]}"), fleet
        finally:
            await runner.cleanup()
            await fleet.close()
            pulse.close()


@web.middleware
async def _in_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The library's own refusals, in the format of all others."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return _refused(ClientError("not_found", f"no such path: {request.method} {request.path[:200]}", status=404))
    except web.HTTPMethodNotAllowed as error:
        takes = ", ".join(sorted(error.allowed_methods))
        answer = _refused(ClientError("bad_method", f"{request.path} takes {takes}", status=405))
        answer.headers["Allow"] = error.headers["Allow"]
        return answer


class Proxy:
    """The HTTP paths. The outcome of every request is counted, once."""

    connections: Connections

    def __init__(
        self,
        fleet: Fleet,
        carrier: Carrier,
        http: aiohttp.ClientSession,
        waits: Waits,
        limits: ProxyLimits,
        metrics: ProxyMetrics,
    ) -> None:
        self._fleet, self._carrier, self._http, self._waits, self._metrics = fleet, carrier, http, waits, metrics
        self._held = MemoryBound(limits.held_bytes, metrics)
        self._reading = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_in_json])
        for path in PATHS:
            app.router.add_post(path, self._ask)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._page)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        healthy = {role.value: [each.name for each in self._fleet.healthy(role)] for role in Role}
        return web.json_response({"healthy": healthy}, status=200 if self._carrier.can_serve() else 503)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.Response:
        """A decode engine's own answer."""
        await self._fleet.wait_checked(Role.DECODE)
        try:
            with self._fleet.lend(Role.DECODE) as engine:
                async with asyncio.timeout(self._waits.connect_s):
                    url = f"{engine.url}/v1/models"
                    async with self._http.get(url, headers=_headers(request), allow_redirects=False) as reply:
                        body = await bounded(reply, BODY_BYTES)
                        return web.Response(body=body, status=reply.status, content_type=reply.content_type)
        except NoEngine as error:
            return _error(503, error.code, str(error))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            return _error(502, "engine_error", f"decode engine {engine.name}: /v1/models: {type(error).__name__}")

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        began, outcome = time.monotonic(), "client_left"
        awaits: set[str] = set()
        try:
            with self._held.share() as share:
                response, outcome = await self._answered(request, Call(_headers(request), share, awaits))
            return response
        except OSError:  # the client left while we wrote to it
            return web.Response()
        finally:
            took_s = time.monotonic() - began
            self._metrics.requests.labels(request.path, outcome).inc()
            self._metrics.request_s.observe(took_s)
            if outcome == "client_left" and took_s > self._waits.patient_s:
                waited = f"without a whole answer; waited for {', '.join(sorted(awaits)) or 'its own body'}"
                left = f"client_left: a client of {request.path} left after {took_s:.0f} s {waited}"
                self._fleet.sparing.say(f"client_left {sorted(awaits)}", f"{left}{_named(request)}")

    async def _answered(self, request: web.Request, call: Call) -> tuple[web.StreamResponse, str]:
        try:
            raw = await self._body(request, call.share)
            with self.connections.serving(request):
                asked = await self._read(request.path, raw)
                if not asked.asks[0].is_stream:
                    return await self._whole(request, asked, call)
                return await self._stream(request, asked.asks[0], call)
        except ClientError as error:
            return _refused(error), "refused"
        except Refusal as refusal:
            return web.Response(body=refusal.body, status=refusal.status, content_type=refusal.content_type), "refused"
        except (NoEngine, Busy) as error:
            self._fleet.sparing.say(error.code, f"{error.code}: answered 503: {error}{_named(request)}")
            return _error(503, error.code, str(error)), error.code
        except LegFailed as error:
            return _error(502, error.code, error.for_client), error.code

    async def _body(self, request: web.Request, share: RequestBytes) -> bytes:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise ClientError("bad_encoding", "a body with Content-Encoding is not taken", status=415)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._waits.client_s):
                async for part in request.content.iter_any():
                    size += len(part)
                    if size > BODY_BYTES:
                        raise ClientError("too_large", f"a body of more than {BODY_BYTES} bytes", status=413)
                    share.add(len(part))
                    parts.append(part)
        except web.RequestPayloadError:
            raise ClientError("bad_body", "the body's chunks cannot be read") from None
        except TimeoutError:
            raise ClientError("too_slow", f"no whole body within {self._waits.client_s:g} s", status=408) from None
        return b"".join(parts)

    async def _read(self, path: str, raw: bytes) -> Asks:
        if len(raw) <= INLINE_BYTES:
            return read(path, raw, self._fleet.shares_prompts)
        async with self._reading:
            return await asyncio.to_thread(read, path, raw, self._fleet.shares_prompts)

    async def _whole(self, request: web.Request, asked: Asks, call: Call) -> tuple[web.StreamResponse, str]:
        if len(asked.asks) == 1:  # the answer is sent before we wait for the rest of the prefill leg
            async with self._carrier.carried(asked.asks[0], call) as opened:
                assert isinstance(opened, Whole)
                response = web.Response(body=merge(asked, [opened.answer]), headers=_answer_headers(request, JSON_TYPE))
                await response.prepare(request)
                await self._sent(response.write_eof())
                return response, "answered"
        answers = await self._each(asked.asks, call)
        return web.Response(body=merge(asked, answers), headers=_answer_headers(request, JSON_TYPE)), "answered"

    async def _each(self, asks: Sequence[PromptAsk], call: Call) -> list[bytes]:
        """Carry the asks side by side, ASKS_AT_ONCE at a time. The first that fails cancels the others."""
        answers: dict[int, bytes] = {}
        left = iter(enumerate(asks))
        tasks = [asyncio.create_task(self._some(left, answers, call)) for _ in range(min(ASKS_AT_ONCE, len(asks)))]
        try:
            await asyncio.gather(*tasks)
            return [answers[place] for place in range(len(asks))]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _some(self, left: Iterator[tuple[int, PromptAsk]], answers: dict[int, bytes], call: Call) -> None:
        for place, ask in left:
            async with self._carrier.carried(ask, _numbered(call, place)) as opened:
                assert isinstance(opened, Whole)
                answers[place] = opened.answer

    async def _stream(self, request: web.Request, ask: PromptAsk, call: Call) -> tuple[web.StreamResponse, str]:
        response = web.StreamResponse(headers=_answer_headers(request, STREAM_TYPE))
        try:
            async with self._carrier.carried(ask, call) as opened:
                assert isinstance(opened, Streamed)
                await response.prepare(request)
                await self._sent(response.write(opened.first.framed()))
                async for event in opened.rest:
                    await self._sent(response.write(event.framed()))
                await self._sent(response.write_eof())
            return response, "answered"
        except (LegFailed, Busy) as error:
            if not response.prepared:
                raise
            for_client = error.for_client if isinstance(error, LegFailed) else str(error)
            data = json.dumps(_error_body(error.code, for_client, 502)).encode()
            await self._sent(response.write(StreamEvent(data, b"error" if ask.path in OF_VLLM else b"").framed()))
            await self._sent(response.write_eof())  # without [DONE]: the answer is incomplete
            return response, error.code

    async def _sent(self, writing: object) -> None:
        """Await a write to the client. Raises ConnectionError, also if the client does not read."""
        try:
            async with asyncio.timeout(self._waits.client_s):
                await writing  # type: ignore[misc]
        except TimeoutError:
            raise ConnectionError("the client does not read") from None


JSON_TYPE = {"Content-Type": "application/json"}
STREAM_TYPE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def _headers(request: web.Request) -> dict[str, str]:
    passed = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    return {name: value for name, value in passed.items() if name == "Authorization" or _is_short(value)} | JSON_TYPE


def _is_short(value: str) -> bool:
    return len(value) <= HEADER_CHARS and value.isascii() and value.isprintable()


def _answer_headers(request: web.Request, own: dict[str, str]) -> dict[str, str]:
    return own | {name: value for name, value in _headers(request).items() if name == "X-Request-Id"}


def _named(request: web.Request) -> str:
    """For the log: the id that the client knows."""
    name = _headers(request).get("X-Request-Id")
    return f", X-Request-Id {name}" if name else ""


def _numbered(call: Call, place: int) -> Call:
    """Each part of a body that is split has an id of its own: an engine may take none twice."""
    name = call.headers.get("X-Request-Id")
    return replace(call, headers={**call.headers, "X-Request-Id": f"{name}-{place}"}) if name else call


def _error_body(code: str, message: str, status: int) -> Body:
    """An error in the format of OpenAI's API, which is also one of Anthropic's."""
    kind = "invalid_request_error" if status < 500 else "engine_error"
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}


def _refused(error: ClientError) -> web.Response:
    return _error(error.status, error.code, str(error))


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response(_error_body(code, message, status), status=status)
