"""Asks a prefill server's bootstrap server. A client names that server, so its answers are checked before they count.

Its address, its ranks' addresses, and every number have bounds. So a wrong one fails the request that named the server:
it reaches no log, no message and no list of ranks.
"""

from __future__ import annotations

import logging
import re
import socket
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from threading import Event, Timer
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from kvbridge_proto.common import MAX_RANKS
from msgspec import Meta

from ...oneline import OneLine, plain
from .messages import Host, Port

log = logging.getLogger("sglang.srt.disaggregation.kvbridge")
log.addFilter(OneLine())

ANSWER_S = 5.0
MOST_BYTES = 1 << 20  # of an answer: 1024 ranks with addresses of 256 bytes are a third of it
SERVER = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,15})?\]):[0-9]{1,5}", re.ASCII)

Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
AgentAddress = Annotated[str, Meta(max_length=256, pattern=r"^[!-~]*\Z")]  # "" for a rank without an agent
RanksAnswer = Annotated[list[tuple[RankNumber, RankNumber, AgentAddress]], Meta(max_length=MAX_RANKS)]
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


class RankAnswer(msgspec.Struct, frozen=True):
    """Where one prefill rank listens, and where its agent does."""

    rank_ip: Host
    rank_port: Port
    kvbridge_agent: AgentAddress = ""


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


def replicas(address: str, rooms: list[int]) -> dict[str, int]:
    """Which replica of a prefill server has each room; none if it gives no usable answer."""
    try:
        answer: dict[str, int] = ask(f"http://{address}/query_dp_ranks", ReplicasAnswer, {"bootstrap_rooms": rooms})
    except BadAnswer as error:
        log.error("no usable answer from the prefill server at %s: %s", address, error)
        return {}
    return answer


def _body(url: str, question: Any) -> bytes:
    """Raises ValueError, OSError, HTTPException. No answer leads elsewhere, and none is decompressed, to any size.

    The scheduler waits meanwhile. So the connection is cut after ANSWER_S, however little it says at a time.
    """
    place, is_late = urlsplit(url), Event()
    sent = None if question is None else msgspec.json.encode(question)
    with closing(HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_S)) as server:
        server.connect()
        end = Timer(ANSWER_S, _cut, (server.sock, is_late))
        end.daemon = True
        end.start()
        try:
            path = place._replace(scheme="", netloc="").geturl()
            server.request("GET" if sent is None else "POST", path, sent, {"Content-Type": "application/json"})
            answer = server.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            body = answer.read(MOST_BYTES + 1)
        except (HTTPException, OSError):
            if not is_late.is_set():
                raise
        finally:
            end.cancel()
    if is_late.is_set():
        raise ValueError(f"not all here after {ANSWER_S:g} s")
    if len(body) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return body


def _cut(connection: socket.socket, is_late: Event) -> None:
    is_late.set()
    with suppress(OSError):  # it has just ended by itself
        connection.shutdown(socket.SHUT_RDWR)
