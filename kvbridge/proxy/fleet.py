"""The engines of both sides: their names, their health, and which one takes the next request."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

from ..errors import KVBridgeError, OperatorError
from ..oneline import OneLine, plain
from .bodies import parse
from .legs import AgentPlace, Kind, read_agent, read_replicas
from .limits import Busy, RequestBytes
from .metrics import ProxyMetrics
from .pulse import Pulse
from .sparing import SparingLog

log = logging.getLogger("kvbridge.proxy")
log.addFilter(OneLine())

BOOTSTRAP_PORT = 8998  # SGLang's default
AGENTS_S = 10.0  # how long the addresses of SGLang's agents are kept
BOOTSTRAP_BYTES = 1 << 20  # of what a bootstrap server answers
METRICS_BYTES = 16 << 20  # of a vLLM engine's page
REPLICA = re.compile(rb'^vllm:num_requests_running\{[^\n]*\bengine="(\d+)"', re.MULTILINE)
SLOW_CHECKS = 3  # health checks without an answer, one after the other, until an engine gets no requests
LATE_ASKS = 3  # questions whose answer we did not look at in time, one after the other, until a request fails
ALL_RANKS = {f"{name}_rank": "-1" for name in ("prefill_dp", "prefill_cp", "target_tp", "target_pp")}


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        return Role.PREFILL if self is Role.DECODE else Role.DECODE


@dataclass(frozen=True, slots=True)
class Waits:
    """Timeouts and intervals, in seconds."""

    prefill_s: float = 300.0  # for a prefill engine's whole answer
    answer_s: float = 600.0  # for a decode engine's whole answer, or its next event
    connect_s: float = 5.0
    health_every_s: float = 2.0
    health_s: float = 5.0
    client_s: float = 60.0  # for a client that sends or reads slowly, or is silent between two requests
    patient_s: float = 10.0  # a client that leaves after so long without its answer is in the log
    forget_s: float = 300.0  # until an engine that was removed, and has finished, is no longer in the metrics


class LegFailed(KVBridgeError):
    """An engine failed at its leg. `is_retryable`: another engine may do it instead.

    `engine_text` is the engine's own text. It may quote the prompt, so it is for the client and not for the log.
    """

    def __init__(
        self, engine: Backend, code: str, reason: str, is_retryable: bool = True, engine_text: str = ""
    ) -> None:
        super().__init__(code, f"{engine.label}: {reason}")
        self.engine = engine
        self.is_retryable = is_retryable
        self.engine_text = engine_text

    @property
    def for_client(self) -> str:
        return f"{self}: {self.engine_text}" if self.engine_text else str(self)


class Running(Protocol):
    """An answer that is under way. `stays`: why it cannot go on at another decode engine; "" if it can."""

    stays: str


@dataclass(slots=True, eq=False)
class Backend:
    role: Role
    kind: Kind
    url: str
    bootstrap_port: int = BOOTSTRAP_PORT
    is_healthy: bool = False
    is_checked: bool = False  # whether anything is known of its health yet
    is_slow: bool = False  # its last health check took too long: others of its side come first
    is_draining: bool = False  # it gets no new requests, and others go on with what they can
    had_other_role: bool = False  # on the list: SGLang is asked to change it, once it has nothing to do
    outstanding: int = 0
    running: list[Running] = field(default_factory=list)  # twice while it takes back what it gave up
    moved: int = 0  # answers that went on at another engine since it drains
    returned: int = 0  # those that no other engine took
    turn: int = 0  # when it was last taken
    agents: dict[int, tuple[float, AgentPlace]] = field(default_factory=dict)  # by replica, with the time of asking
    replicas: tuple[float, int] | None = None
    is_single: bool | None = None  # whether a vLLM engine is known to have one replica; None until it was asked

    @property
    def name(self) -> str:
        return f"{self.kind}={self.url}"

    @property
    def label(self) -> str:
        return f"{self.role} engine {self.name}"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def bootstrap_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.bootstrap_port}"


def read_engine(role: Role, text: str) -> Backend:
    """`vllm=URL`, or `sglang=URL[,bootstrap=PORT]` of a prefill server. Raises OperatorError."""
    kind, _, rest = text.partition("=")
    url, *options = rest.split(",")
    place = urlsplit(url)
    try:
        is_url = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:
        is_url = False
    if kind not in list(Kind) or not is_url or place.path.strip("/") or place.query or place.username:
        raise OperatorError(
            "bad_option", f"{role}: got {text!r}, need vllm=http://HOST:PORT or sglang=http://HOST:PORT"
        )
    port = BOOTSTRAP_PORT
    for option in options:
        name, _, value = option.partition("=")
        takes_port = kind == Kind.SGLANG and role is Role.PREFILL
        if not (takes_port and name == "bootstrap" and value.isdecimal() and 0 < int(value) < 1 << 16):
            raise OperatorError("bad_option", f"{role}: got {option!r} in {text!r}, need bootstrap=PORT of an sglang")
        port = int(value)
    return Backend(role, Kind(kind), f"{place.scheme}://{place.netloc}", port)


def read_engines(path: Path) -> list[Backend]:
    """Read the engines, one a line: `prefill vllm=URL` or `decode sglang=URL`. `#` begins a comment.

    Raises OperatorError.
    """
    try:
        lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise OperatorError("bad_option", f"engines: cannot read {path}: {error}") from None
    found = []
    for number, words in enumerate(lines, 1):
        if not words:
            continue
        if len(words) != 2 or words[0] not in list(Role):
            text = " ".join(words)
            raise OperatorError("bad_option", f"engines: {path}, line {number}: got {text!r}, need ROLE KIND=URL")
        found.append(read_engine(Role(words[0]), words[1]))
    return checked(found)


def read_keys(path: Path) -> list[str]:
    """Two keys of SGLang's servers, or one that is both: to be asked for their roles, and to change them.

    Raises OperatorError.
    """
    try:
        keys = path.read_text().split()
    except (OSError, UnicodeError) as error:
        raise OperatorError("bad_option", f"sglang_keys: cannot read {path}: {error}") from None
    if not 1 <= len(keys) <= 2:
        raise OperatorError("bad_option", f"sglang_keys: got {len(keys)} keys in {path}, need one or two")
    return keys


def checked(engines: list[Backend]) -> list[Backend]:
    """`engines` unchanged. Raises OperatorError if one is named twice, or a side has none."""
    if len({(each.role, each.url) for each in engines}) < len(engines):
        raise OperatorError("bad_option", "prefill, decode: an engine is named twice")
    for role in Role:
        if not any(each.role is role for each in engines):
            raise OperatorError("bad_option", f"{role}: no engine is named")
    return engines


class Fleet:
    def __init__(
        self,
        engines: Sequence[Backend],
        http: aiohttp.ClientSession,
        waits: Waits,
        metrics: ProxyMetrics,
        pulse: Pulse,
        keys: Sequence[str] = (),
    ) -> None:
        self._keys = keys
        self._engines: dict[Role, list[Backend]] = {role: [] for role in Role}
        self._http, self._waits, self._metrics, self._pulse = http, waits, metrics, pulse
        self.sparing = SparingLog("kvbridge.proxy")  # of what requests meet
        self._turns = count(1)
        self._watches: dict[Backend, asyncio.Task[None]] = {}
        self._leaving: dict[Backend, asyncio.Task[None]] = {}
        self._first_check = asyncio.Event()  # of any engine
        self.replace(engines)

    def replace(self, engines: Sequence[Backend]) -> None:
        """Use these engines from now on. One that is removed gets no new requests and finishes what it has."""
        known = {(each.role, each.name, each.bootstrap_port): each for each in self.listed()}
        kept = [known.get((each.role, each.name, each.bootstrap_port), each) for each in engines]
        left = set(self.listed()).difference(kept)
        for gone in left:
            self._watches.pop(gone).cancel()
            gone.is_draining = True
            self._set_healthy(gone, False, "it is not on the list any more")
            self._metrics.healthy.remove(gone.role, gone.name)  # nobody is to be alarmed by it
            self._leaving[gone] = asyncio.create_task(self._forget(gone))
        for each in kept:
            if each not in self._watches:
                each.had_other_role = any((gone.name, gone.role) == (each.name, each.role.other) for gone in left)
                self._metrics.healthy.labels(each.role, each.name).set(0)
                self._metrics.outstanding.labels(each.role, each.name)
                self._watches[each] = asyncio.create_task(self._watch(each))
        self._engines = {role: [each for each in kept if each.role is role] for role in Role}
        self._wake()

    def _wake(self) -> None:
        """Let all look again that wait for an engine's first check."""
        self._first_check.set()
        self._first_check = asyncio.Event()

    async def _forget(self, gone: Backend) -> None:
        """Remove its other series some time after its last request, so that whoever drains it sees the 0."""
        while True:
            await asyncio.sleep(self._waits.forget_s)
            if not gone.outstanding:
                break
        if not any((each.role, each.name) == (gone.role, gone.name) for each in self.listed()):
            self._metrics.forget(gone.role, gone.name)
        del self._leaving[gone]

    async def close(self) -> None:
        """Stop the health checks."""
        tasks = [*self._watches.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def listed(self) -> list[Backend]:
        return [each for engines in self._engines.values() for each in engines]

    def named(self, name: str) -> list[Backend]:
        """The engines of this name, of each role; also one that is off the list and has not been forgotten."""
        return [each for each in (*self.listed(), *self._leaving) if each.name == name]

    @property
    def shares_prompts(self) -> bool:
        """Whether all answers to a prompt share what is prefilled: all engines are vLLM's, and decode has no replicas.

        Where it has, vLLM spreads the answers of one call over them, and an offer serves one.
        """
        is_vllm, decoding = all(each.kind is Kind.VLLM for each in self.listed()), self.healthy(Role.DECODE)
        return is_vllm and bool(decoding) and all(each.is_single for each in decoding)

    @property
    def moves(self) -> bool:
        """Whether a decode engine on the list could give its answers to another."""
        return any(map(self.has_other, self._engines[Role.DECODE]))

    def has_other(self, engine: Backend) -> bool:
        """Whether a decode engine on the list is of this one's kind, which may have left it."""
        return any(each is not engine and each.kind is engine.kind for each in self._engines[Role.DECODE])

    def drain(self, name: str, is_draining: bool) -> list[Backend]:
        """Drain the engines of this name, of each role, or take them back. Returns them."""
        named = [each for each in self.listed() if each.name == name]
        for each in named:
            if is_draining and not each.is_draining:
                each.moved = each.returned = 0
            each.is_draining = is_draining
            log.info("%s engine %s %s", each.role, name, "drains" if is_draining else "is taken back")
        return named

    def moved(self, engine: Backend, outcome: str) -> None:
        """Count an answer that this engine gave up, or that went on at another when it failed (`resumed`)."""
        engine.moved += outcome == "moved"
        engine.returned += outcome == "returned"
        self._metrics.moves.labels(engine.name, outcome).inc()

    def healthy(
        self, role: Role, without: Collection[Backend] = (), kinds: Collection[Kind] = tuple(Kind)
    ) -> list[Backend]:
        able = (each for each in self._engines[role] if each.is_healthy and not each.is_draining)
        return [each for each in able if each not in without and each.kind in kinds]

    async def wait_checked(self, role: Role, kinds: Collection[Kind] = tuple(Kind)) -> None:
        """Wait until an engine of this side is healthy, or each has had its first health check: 2 * `health_s` at most.

        SGLang answers its first check after a second. Until then its side is not without an engine.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._waits.health_s):
                while not self.healthy(role, kinds=kinds) and any(
                    each.kind in kinds and not each.is_checked for each in self._engines[role]
                ):
                    await self._first_check.wait()

    @contextmanager
    def lend(
        self,
        role: Role,
        without: Collection[Backend] = (),
        kinds: Collection[Kind] = tuple(Kind),
        running: Running | None = None,
    ) -> Iterator[Backend]:
        """The healthy engine with the fewest legs under way; among equals the one lent longest ago. Raises NoEngine."""
        able = self.healthy(role, without, kinds)
        if not able:
            raise NoEngine(role, [each for each in self._engines[role] if each.kind in kinds], kinds)
        with self.used(min(able, key=lambda each: (each.is_slow, each.outstanding, each.turn)), running) as engine:
            yield engine

    @contextmanager
    def used(self, engine: Backend, running: Running | None = None) -> Iterator[Backend]:
        """Count a leg of this engine until the end of the block."""
        engine.turn = next(self._turns)
        engine.outstanding += 1
        gauge = self._metrics.outstanding.labels(engine.role, engine.name)
        gauge.inc()
        if running is not None:
            engine.running.append(running)
        try:
            yield engine
        finally:
            engine.outstanding -= 1
            gauge.dec()
            if running is not None:
                engine.running.remove(running)

    def failed(self, failure: LegFailed) -> None:
        """Count a failure. An engine that cannot be reached gets nothing more until it passes a health check."""
        engine = failure.engine
        self.sparing.say(f"{failure.code} {engine.role} {engine.name}", f"{failure.code}: {failure}")
        self._metrics.failures.labels(engine.role, engine.name, failure.code).inc()
        engine.agents.clear()
        engine.replicas = engine.is_single = None
        if failure.code == "unreachable":
            self._set_healthy(engine, False, "it cannot be reached")

    async def _watch(self, engine: Backend) -> None:
        """Check its health until cancelled."""
        slow, of_role = 0, ""
        while True:
            began = asyncio.get_running_loop().time()
            try:
                why = await self._health_problem(engine)
                if not why and engine.kind is Kind.SGLANG:
                    why, before = await self._role_problem(engine), of_role
                    if (of_role := why) != before and why and not engine.is_healthy:
                        log.info("%s engine %s: %s", engine.role, engine.name, why)
                slow, engine.is_slow = 0, False
            except TimeoutError:
                if self._pulse.was_late_since(began):
                    continue  # it may have answered, and we did not look
                slow, engine.is_slow = slow + 1, True
                why = f"/health did not answer within {self._waits.health_s:g} s, {slow} times"
                if slow < SLOW_CHECKS and engine.is_healthy:
                    log.info("%s engine %s is slow: %s", engine.role, engine.name, why)
                    why = ""
            if why:
                engine.is_single = None
            elif engine.kind is Kind.VLLM and engine.role is Role.DECODE and engine.is_single is None:
                engine.is_single = await self._is_single(engine)
            self._set_healthy(engine, not why, why)
            if not engine.is_checked:
                engine.is_checked = True
                self._wake()
            await asyncio.sleep(self._waits.health_every_s)

    async def _health_problem(self, engine: Backend) -> str:
        """Why an engine gets no requests; empty if it is healthy. Raises TimeoutError."""
        try:
            async with asyncio.timeout(self._waits.health_s):
                async with self._http.get(f"{engine.url}/health", allow_redirects=False) as answer:
                    return "" if answer.status == 200 else f"/health answered {answer.status}"
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"/health: {type(error).__name__}: {error}"

    async def _role_problem(self, engine: Backend) -> str:
        """Why an SGLang server that is healthy gets no requests of this role; empty if that is its role, or not known.

        It is asked to change if its line on the list has changed. Otherwise somebody else may know better.
        """
        try:
            said = await self._answered(engine, "/model_info")
            role = said.get("disaggregation_mode") if isinstance(said, dict) else None
            if role != engine.role.other:  # not known: whoever has changed its line may have changed it
                engine.had_other_role = False
                return ""
            if not engine.had_other_role:
                return f"it is a {role} server"
            if any(each.outstanding for each in self._leaving if each.name == engine.name):
                return f"as a {role} server it has requests under way"
            # SGLang wants to be told what CUDA graphs take, and goes on without them if they do not fit.
            wanted = {"new_role": engine.role, "decode_cuda_graph_memory_gb": 0}
            said = await self._answered(engine, "/pd_role_switch", wanted, self._waits.prefill_s)
            if said == {"error": "Unauthorized"}:
                return "it does not change its role: its --admin-api-key, or else --api-key, is not in --sglang-keys"
            if isinstance(said, dict) and said.get("success"):
                log.info("engine %s is a %s server now", engine.name, engine.role)
                engine.had_other_role = False
                return ""
            return f"it does not change its role: {plain(str(said), 300)}"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            return f"its role is not known: {type(error).__name__}: {error}" if engine.had_other_role else ""

    async def _answered(self, engine: Backend, path: str, body: object = None, within_s: float | None = None) -> object:
        """Whatever the status. Raises ValueError, TimeoutError, aiohttp's errors."""
        method, key = ("GET", self._keys[:1]) if body is None else ("POST", self._keys[-1:])
        headers = {"Authorization": f"Bearer {key[0]}"} if key else {}
        async with asyncio.timeout(within_s or self._waits.health_s):
            asked = self._http.request(method, f"{engine.url}{path}", json=body, headers=headers, allow_redirects=False)
            async with asked as answer:
                return parse(await bounded(answer, BOOTSTRAP_BYTES))

    async def _is_single(self, engine: Backend) -> bool | None:
        """Whether its metrics name one replica. None if it does not answer."""
        try:
            async with asyncio.timeout(self._waits.health_s):
                async with self._http.get(f"{engine.url}/metrics", allow_redirects=False) as answer:
                    return len(set(REPLICA.findall(await bounded(answer, METRICS_BYTES)))) == 1
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None

    def _set_healthy(self, engine: Backend, is_healthy: bool, why: str) -> None:
        if engine in self._watches:
            self._metrics.healthy.labels(engine.role, engine.name).set(is_healthy)
        if is_healthy != engine.is_healthy:
            log.log(
                logging.INFO if is_healthy else logging.WARNING,
                "%s engine %s %s",
                engine.role,
                engine.name,
                "is healthy" if is_healthy else f"gets no requests: {why}",
            )
        engine.is_healthy = is_healthy

    async def agent_of(self, engine: Backend, room: int) -> AgentPlace:
        """The agent that offers what this SGLang prefill server computes under `room`. Raises LegFailed, Busy."""
        loop = asyncio.get_running_loop()
        for _ in range(LATE_ASKS):
            began = loop.time()
            try:
                async with asyncio.timeout(self._waits.connect_s):
                    return await self._asked_agent(engine, room, began)
            except TimeoutError:
                if self._pulse.was_late_since(began):
                    continue  # it may have answered, and we did not look
                reason = f"its bootstrap server did not answer within {self._waits.connect_s:g} s"
            except (aiohttp.ClientError, OSError, ValueError, KVBridgeError) as error:
                reason = f"its bootstrap server at {engine.bootstrap_url}: {error}"
            raise LegFailed(engine, "no_bootstrap", reason)
        raise Busy("busy", f"the proxy itself stood still {LATE_ASKS} times while it asked for an agent, try again")

    async def _asked_agent(self, engine: Backend, room: int, now: float) -> AgentPlace:
        if engine.replicas is None or now - engine.replicas[0] > AGENTS_S:
            engine.replicas = (now, read_replicas(await self._ask(engine, "/route", ALL_RANKS)))
        replica = room % engine.replicas[1]
        kept = engine.agents.get(replica)
        if kept is None or now - kept[0] > AGENTS_S:
            place = read_agent(await self._ask(engine, "/kvbridge/ranks", {"replica": str(replica)}))
            kept = engine.agents[replica] = (now, place)
        return kept[1]

    async def _ask(self, engine: Backend, path: str, query: dict[str, str]) -> object:
        async with self._http.get(f"{engine.bootstrap_url}{path}", params=query, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"{path} answered {answer.status}")
            return parse(await bounded(answer, BOOTSTRAP_BYTES))


class NoEngine(KVBridgeError):
    """No engine of one side is healthy, or none of the kinds that could take a request."""

    def __init__(self, role: Role, engines: Sequence[Backend], kinds: Collection[Kind]) -> None:
        which = "" if len(kinds) == len(Kind) else f" of {' or '.join(kinds)}"
        named = ", ".join(each.name for each in engines) or "there is none"
        super().__init__("no_engine", f"no {role} engine{which} is healthy: {named}")
        self.role = role


async def bounded(answer: aiohttp.ClientResponse, most: int, share: RequestBytes | None = None) -> bytes:
    """The whole of an answer, held in `share`. Raises ValueError if it is longer than `most` bytes, Busy."""
    parts, size = [], 0
    async for chunk in answer.content.iter_any():
        parts.append(chunk)
        size += len(chunk)
        if size > most:
            raise ValueError(f"an answer of more than {most} bytes")
        if share is not None:
            share.add(len(chunk))
    return b"".join(parts)
