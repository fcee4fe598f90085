"""Asks a prefill server's bootstrap server. A client names that server, so its answers are checked before they count.

Its address, its ranks' addresses, and every number have bounds. So a wrong one fails the request that named the server:
it reaches no log, no message and no list of ranks. Nor may it hold up other requests by not answering: SGLang's
scheduler never waits for an answer, but looks in each turn whether it has come (`Questions`).
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from threading import Event, Thread, Timer
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from kvbridge_proto.common import MAX_RANKS
from msgspec import Meta

from ...oneline import OneLine, plain
from .messages import Host, Port

log = logging.getLogger("sglang.srt.disaggregation.kvbridge")
log.addFilter(OneLine())

SERVER_ANSWER_S = 5.0  # for one answer of a server that is reached
QUESTION_S = 10.0  # for all of a question, as nothing bounds the time in which a resolver finds the address of a name
QUESTION_KEPT_S = 20.0  # how long a question is kept that nobody looks at: its request has ended
MOST_QUESTIONS = 16  # at a time to servers that have answered before, and as many to others
SERVER_ANSWER_BYTES = 1 << 20  # of an answer: 1024 ranks with addresses of 256 bytes are six tenths of it
RANKS = "/kvbridge/ranks"
SERVER = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,15})?\]):[0-9]{1,5}", re.ASCII)

Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
AgentAddress = Annotated[str, Meta(max_length=256, pattern=r"^[!-~]*\Z")]  # "" for a rank without an agent
ReplicasAnswer = dict[Annotated[str, Meta(max_length=20)], RankNumber]  # by room


class BadAnswer(Exception):
    """No answer, or one that is out of bounds. The text is safe to show."""


class ServerAnswer(msgspec.Struct, frozen=True):
    """What a prefill server is. SGLang's fields that decide only what its own backends can carry are left out."""

    attn_tp_size: Size
    attn_cp_size: Size
    dp_size: Size
    pp_size: Size
    page_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None
    kv_cache_dtype: Annotated[str, Meta(max_length=64)] | None
    follow_bootstrap_room: bool
    decode_allocation_policy: Annotated[str, Meta(max_length=64)] = "early"
    prefill_http_port: Port | None = None

    def __post_init__(self) -> None:
        check_ranks(self.attn_tp_size, self.pp_size)


class RankAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Where the agent of one prefill rank listens, and where the rank does."""

    pp_rank: RankNumber
    tp_rank: RankNumber
    agent: AgentAddress
    rank_ip: Host
    rank_port: Port


RanksAnswer = Annotated[list[RankAnswer], Meta(max_length=MAX_RANKS)]


def check_ranks(tp_size: int, pp_size: int) -> None:
    """Raises ValueError."""
    if tp_size * pp_size > MAX_RANKS:
        raise ValueError(f"ranks: {tp_size} tensor parallel x {pp_size} pipeline stages, limit {MAX_RANKS}")


def why_no_server(address: str) -> str:
    """Why this is no address of a server, or ""."""
    if SERVER.fullmatch(address):
        return ""
    return f"bootstrap_host and bootstrap_port: {plain(address, 80)!a}, must be a host and a port"


def ask(url: str, kind: Any, question: Any = None) -> Any:
    """The answer to a GET, or to a POST of `question`, as `kind`. Raises BadAnswer."""
    try:
        return msgspec.json.decode(_body(url, question), type=kind)
    except (HTTPException, msgspec.MsgspecError, ValueError, OSError, RecursionError) as error:
        raise BadAnswer(plain(f"{type(error).__name__}: {error}", 300)) from None


def server(address: str) -> ServerAnswer:
    """What the prefill server there is. Raises BadAnswer."""
    everything = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    answer: ServerAnswer = ask(f"http://{address}/route?{everything}", ServerAnswer)
    return answer


def ranks(address: str, replica: int) -> list[RankAnswer]:
    """Where the ranks of a replica are that have registered. Raises BadAnswer."""
    answer: list[RankAnswer] = ask(f"http://{address}{RANKS}?replica={replica}", RanksAnswer)
    return answer


def replicas(address: str, rooms: list[int]) -> dict[str, int]:
    """Which replica of a prefill server has each room that it knows. Raises BadAnswer."""
    answer: dict[str, int] = ask(f"http://{address}/query_dp_ranks", ReplicasAnswer, {"bootstrap_rooms": rooms})
    return answer


@dataclass(slots=True)
class _Question:
    since: float
    looked_at: float
    answer: Future[Any] = field(default_factory=Future)
    thread: Thread | None = None  # None while it waits for its turn

    def run(self, ask_it: Callable[[], Any]) -> None:
        try:
            self.answer.set_result(ask_it())
        except BadAnswer as error:
            self.answer.set_exception(error)
        except Exception as error:
            self.answer.set_exception(BadAnswer(plain(f"{type(error).__name__}: {error}", 300)))


class Questions:
    """Questions to servers, each on a thread of its own. Used by the scheduler's thread.

    Servers that never answered have threads apart, so that they cannot take all.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, _Question] = {}
        self._threads: dict[bool, list[Thread]] = {True: [], False: []}

    def answer(self, key: Hashable, ask_it: Callable[[], Any], is_known: bool) -> Any:
        """What `ask_it` returns, once; None until it has. Asks, unless it is asked already. Raises BadAnswer."""
        now = time.monotonic()
        question = self._open.get(key)
        if question is None:
            self._open = {key: each for key, each in self._open.items() if now - each.looked_at < QUESTION_KEPT_S}
            question = self._open[key] = _Question(now, now)
        question.looked_at = now
        if question.thread is None:
            self._begin(question, ask_it, is_known)
        is_answered = question.answer.done()
        if not is_answered and now - question.since < QUESTION_S:
            return None
        del self._open[key]
        if not is_answered:
            raise BadAnswer(f"none within {QUESTION_S:g} s")
        return question.answer.result()

    def _begin(self, question: _Question, ask_it: Callable[[], Any], is_known: bool) -> None:
        self._threads[is_known] = threads = [thread for thread in self._threads[is_known] if thread.is_alive()]
        if len(threads) >= MOST_QUESTIONS:
            return
        thread = Thread(target=question.run, args=(ask_it,), name="kvbridge-question", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at the limit of threads: as if it was not its turn
            return
        question.thread = thread
        threads.append(thread)


def _body(url: str, question: Any) -> bytes:
    """Raises ValueError, OSError, HTTPException. No answer leads elsewhere, and none is decompressed, to any size.

    The connection is cut after SERVER_ANSWER_S, however little it says at a time.
    """
    place, is_late = urlsplit(url), Event()
    sent = None if question is None else msgspec.json.encode(question)
    with closing(HTTPConnection(place.hostname or "", place.port, timeout=SERVER_ANSWER_S)) as server:
        server.connect()
        end = Timer(SERVER_ANSWER_S, _cut, (server.sock, is_late))
        end.daemon = True
        end.start()
        try:
            path = place._replace(scheme="", netloc="").geturl()
            server.request("GET" if sent is None else "POST", path, sent, {"Content-Type": "application/json"})
            answer = server.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            body = answer.read(SERVER_ANSWER_BYTES + 1)
        except (HTTPException, OSError):
            if not is_late.is_set():
                raise
        finally:
            end.cancel()
    if is_late.is_set():
        raise ValueError(f"not all here after {SERVER_ANSWER_S:g} s")
    if len(body) > SERVER_ANSWER_BYTES:
        raise ValueError(f"more than {SERVER_ANSWER_BYTES} bytes")
    return body


def _cut(connection: socket.socket, is_late: Event) -> None:
    is_late.set()
    with suppress(OSError):  # it has just ended by itself
        connection.shutdown(socket.SHUT_RDWR)
