"""Asks a prefill server's bootstrap server. A client names that server, so its answers are checked before they count.

Its address, its ranks' addresses, and every number have bounds. So a wrong one fails the request that named the server:
it reaches no log, no message and no list of ranks.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Annotated, Any

import msgspec
import requests
from kvbridge_proto.common import MAX_RANKS
from msgspec import Meta
from requests import RequestException, Response
from urllib3.exceptions import HTTPError

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
        method = "GET" if question is None else "POST"
        with requests.request(
            method, url, json=question, timeout=ANSWER_S, stream=True, allow_redirects=False
        ) as answer:
            return msgspec.json.decode(_body(answer), type=kind)
    except (RequestException, HTTPError, msgspec.MsgspecError, ValueError, OSError, RecursionError) as error:
        raise BadAnswer(plain(f"{type(error).__name__}: {error}", 300)) from None


def replicas(address: str, rooms: list[int]) -> dict[str, int]:
    """Which replica of a prefill server has each room; none if it gives no usable answer."""
    try:
        answer: dict[str, int] = ask(f"http://{address}/query_dp_ranks", ReplicasAnswer, {"bootstrap_rooms": rooms})
    except BadAnswer as error:
        log.error("no usable answer from the prefill server at %s: %s", address, error)
        return {}
    return answer


def _body(answer: Response) -> bytes:
    """Raises ValueError, HTTPError. Nothing is decompressed: it could become any size."""
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}")
    end, body = time.monotonic() + ANSWER_S, bytearray()
    while piece := answer.raw.read1(1 << 16, decode_content=False):
        body += piece
        if len(body) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        if time.monotonic() > end:
            raise ValueError(f"not all here after {ANSWER_S:g} s")
    return bytes(body)
