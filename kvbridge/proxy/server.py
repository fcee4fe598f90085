"""The proxy's HTTP server: takes clients' requests and returns what a pair of engines answers."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from ..errors import OperatorError
from ..oneline import OneLine, plain_lines
from .bodies import PATHS, Asks, Body, ClientError, PromptAsk, encode, merge, read
from .carry import Carrier, Refusal, Streamed, Whole
from .events import DONE, framed
from .fleet import Backend, Fleet, LegFailed, NoEngine, Role, Waits, bounded, checked, read_engine, read_engines
from .metrics import ProxyMetrics

log = logging.getLogger("kvbridge.proxy")
log.addFilter(OneLine())


class _NotMalformed(logging.Filter):
    """Keeps malformed HTTP out of the log: the library would quote its bytes, which may be a prompt's."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


library_log = logging.getLogger("kvbridge.proxy.http")
library_log.addFilter(_NotMalformed())

BODY_BYTES = 64 << 20
AT_ONCE = 16  # asks of one body that run at a time: each holds the whole body
LINGER_S = 1.0  # how long the rest of a refused body is read, so that the client can read why
STOP_S = 10.0  # how long requests under way may take once the proxy is told to stop
PASSED_ON = ("Authorization",)


def run(
    prefill: Sequence[str], decode: Sequence[str], listed: Path | None, listen: str, waits: Waits, log_level: str
) -> None:
    """Serve until SIGTERM or SIGINT. On SIGHUP read the file `listed` again. Raises OperatorError."""
    named = [read_engine(Role.PREFILL, said) for said in prefill] + [read_engine(Role.DECODE, s) for s in decode]
    if listed is not None and named:
        raise OperatorError("bad_option", "engines: they are in the file, or named by --prefill and --decode; not both")
    engines = checked(named) if listed is None else read_engines(listed)
    host, port = read_listen(listen)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    asyncio.run(_run(engines, listed, host, port, waits))


class _PlainFormatter(logging.Formatter):
    """Indents the lines of exceptions, also in libraries' records, so that none looks like a record of ours."""

    def format(self, record: logging.LogRecord) -> str:
        return plain_lines(super().format(record))


def read_listen(said: str) -> tuple[str, int]:
    """Raises OperatorError."""
    host, _, port = said.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise OperatorError("bad_option", f"listen: got {said!r}, need HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _run(engines: Sequence[Backend], listed: Path | None, host: str, port: int, waits: Waits) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with serving(engines, host, port, waits) as (place, fleet):
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
async def serving(engines: Sequence[Backend], host: str, port: int, waits: Waits) -> AsyncIterator[tuple[str, Fleet]]:
    """Run the proxy; yields its address and its engines. Raises OperatorError if it cannot listen there."""
    # A connection per request: an engine that closes an idle connection would look like one that failed.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=waits.connect_s)
    metrics = ProxyMetrics()
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers={"Accept-Encoding": "identity"}, trust_env=False
    ) as http:
        fleet = Fleet(engines, http, waits, metrics)
        proxy = Proxy(fleet, http, waits, metrics)
        runner = web.AppRunner(
            proxy.app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=STOP_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            logger=library_log,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise OperatorError("bad_address", f"listen: cannot serve on {host}:{port}: {error}") from None
            taken = runner.addresses[0]
            yield (f"[{taken[0]}]:{taken[1]}" if ":" in taken[0] else f"{taken[0]}:{taken[1]}"), fleet
        finally:
            await runner.cleanup()
            await fleet.close()


class Proxy:
    """The HTTP paths. The outcome of every request is counted, once."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, waits: Waits, metrics: ProxyMetrics) -> None:
        self._fleet, self._http, self._waits, self._metrics = fleet, http, waits, metrics
        self._carrier = Carrier(fleet, http, waits, metrics)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES)
        for path in PATHS:
            app.router.add_post(path, self._ask)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._page)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        well = {role.value: [each.name for each in self._fleet.well(role)] for role in Role}
        return web.json_response({"well": well}, status=200 if all(well.values()) else 503)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.Response:
        """A decode engine's own answer."""
        try:
            with self._fleet.lend(Role.DECODE) as engine:
                async with asyncio.timeout(self._waits.connect_s):
                    url = f"{engine.url}/v1/models"
                    async with self._http.get(url, headers=_headers(request), allow_redirects=False) as reply:
                        said = await bounded(reply, BODY_BYTES)
                        return web.Response(body=said, status=reply.status, content_type=reply.content_type)
        except NoEngine as error:
            return _error(503, error.code, str(error))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            return _error(502, "engine_error", f"decode engine {engine.name}: /v1/models: {type(error).__name__}")

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        began, outcome = time.monotonic(), "client_left"
        try:
            response, outcome = await self._answered(request)
            return response
        except OSError:  # the client left while we wrote to it
            return web.Response()
        finally:
            self._metrics.requests.labels(request.path, outcome).inc()
            self._metrics.request_s.observe(time.monotonic() - began)

    async def _answered(self, request: web.Request) -> tuple[web.StreamResponse, str]:
        try:
            asked = read(request.path, await self._body(request))
            headers = _headers(request)
            if not asked.asks[0].is_stream:
                return await self._whole(request, asked, headers)
            return await self._stream(request, asked.asks[0], headers)
        except ClientError as error:
            return _error(error.status, error.code, str(error)), "refused"
        except Refusal as said:
            return web.Response(body=said.body, status=said.status, content_type=said.content_type), "refused"
        except NoEngine as error:
            return _error(503, error.code, str(error)), error.code
        except LegFailed as error:
            return _error(502, error.code, error.for_client), error.code

    async def _body(self, request: web.Request) -> bytes:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise ClientError("bad_encoding", "a body with Content-Encoding is not taken", status=415)
        try:
            async with asyncio.timeout(self._waits.client_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise ClientError("too_large", f"a body of more than {BODY_BYTES} bytes", status=413) from None
        except web.RequestPayloadError:
            raise ClientError("bad_body", "the body's chunks cannot be read") from None
        except TimeoutError:
            raise ClientError("too_slow", f"no whole body within {self._waits.client_s:g} s", status=408) from None

    async def _whole(
        self, request: web.Request, asked: Asks, headers: Mapping[str, str]
    ) -> tuple[web.StreamResponse, str]:
        if len(asked.asks) == 1:  # the answer is sent before we wait for the rest of the prefill leg
            async with self._carrier.carried(asked.asks[0], headers) as opened:
                assert isinstance(opened, Whole)
                response = web.Response(body=encode(merge(asked, [opened.answer])), content_type="application/json")
                await response.prepare(request)
                await self._sent(response.write_eof())
                return response, "answered"
        answers = await self._each(asked.asks, headers)
        return web.Response(body=encode(merge(asked, answers)), content_type="application/json"), "answered"

    async def _each(self, asks: Sequence[PromptAsk], headers: Mapping[str, str]) -> list[Body]:
        """Carry the asks side by side, AT_ONCE at a time. The first that fails cancels the others."""
        places = asyncio.Semaphore(AT_ONCE)
        tasks = [asyncio.create_task(self._one(ask, headers, places)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _one(self, ask: PromptAsk, headers: Mapping[str, str], places: asyncio.Semaphore) -> Body:
        async with places, self._carrier.carried(ask, headers) as opened:
            assert isinstance(opened, Whole)
            return opened.answer

    async def _stream(
        self, request: web.Request, ask: PromptAsk, headers: Mapping[str, str]
    ) -> tuple[web.StreamResponse, str]:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with self._carrier.carried(ask, headers) as opened:
                assert isinstance(opened, Streamed)
                await response.prepare(request)
                await self._sent(response.write(framed(opened.first)))
                async for event in opened.rest:
                    await self._sent(response.write(framed(event)))
                    if event == DONE:
                        await self._sent(response.write_eof())
            return response, "answered"
        except LegFailed as error:
            if not response.prepared:
                raise
            await self._sent(response.write(framed(json.dumps(_said(error.code, error.for_client, 502)).encode())))
            await self._sent(response.write_eof())  # without [DONE]: the answer is incomplete
            return response, error.code

    async def _sent(self, writing: object) -> None:
        """Await a write to the client. Raises ConnectionError, also if the client does not read."""
        try:
            async with asyncio.timeout(self._waits.client_s):
                await writing  # type: ignore[misc]
        except TimeoutError:
            raise ConnectionError("the client does not read") from None


def _headers(request: web.Request) -> dict[str, str]:
    passed = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    return passed | {"Content-Type": "application/json"}


def _said(code: str, message: str, status: int) -> Body:
    """An error in the format of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "engine_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response(_said(code, message, status), status=status)
