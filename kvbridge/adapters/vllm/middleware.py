"""Bootstrap style in front of vLLM: `vllm serve --middleware kvbridge.adapters.vllm.middleware.BootstrapRooms ...`.

sglang-router, smg and other routers of SGLang's style send one body to both engines at once, with `bootstrap_host`,
`bootstrap_port` and `bootstrap_room` in it, which vLLM ignores. This middleware turns it into a prefill of one token
that is offered on an engine whose kv_role is kv_producer, and into a want on a kv_consumer.

vLLM puts it before its own authentication. So it reads nothing by itself: a body is read and turned when what is behind
asks for it, which is after authentication. Of a body it searches `SEARCHED_BYTES` at most, and builds nothing but the
few values that it needs: 16 MiB of a prompt cost 40 ms, where all of it as Python's objects cost 2.2 s and 484 MiB.

The decode side has the same call, and waits for its prompt. So if vLLM refuses a prefill with a room, or its client
hangs up before it is answered, the engine's scheduler is told: that of every replica, since nobody here knows whose
agent the decode side asks. vLLM's call for that is there since 0.26.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from msgspec import Raw

from ...errors import EngineError
from ...oneline import OneLine, plain
from .options import VLLMOptions
from .params import read_remote, read_room

log = logging.getLogger("vllm.kvbridge.middleware")
log.addFilter(OneLine())

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SEARCHED_BYTES = 64 << 20  # how much of a body is searched for a room; a longer one with a room is refused
MOST_VALUE_BYTES = 1 << 16  # of a value that we read: a room, or a list of them
BAD_REQUEST = 400
FIELD = b'"bootstrap_room"'
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
PATHS = ("/v1/completions", "/v1/chat/completions")  # whose token limits we know


class BootstrapRooms:
    """An ASGI middleware. It reads the engine's configuration from vLLM's application state."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Rewrite a body with a room, once it is asked for; pass any other one on as it came."""
        if not _may_be_ours(scope):
            return await self._app(scope, receive, send)
        call = _Call(scope, receive, send)
        try:
            await self._app(scope, call.receive, call.send)
        except EngineError as error:
            if error is not call.refusal:
                raise
        finally:
            await call.tell_if_refused()
        if call.refusal is not None:
            await _refuse(send, str(call.refusal))


class _Call:
    """One call: turns its body when it is first asked for. If that is refused, nothing that is behind answers it.

    FastAPI makes an answer of its own of any error while it reads a body: that answer is dropped.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.refusal: EngineError | None = None
        self._scope = scope
        self._receive = receive
        self._send = send
        self._heard: list[Message] | None = None  # what is left of it; None before it is asked for
        self._offer: dict[str, Any] | None = None  # the parameters of a prefill that is to offer in a room
        self._status = 0  # of the answer, once it has begun
        self._is_given_up = False  # the client hung up before that

    async def receive(self) -> Message:
        if self._heard is None:
            self._heard = []
            try:
                self._heard = (await self._turned())[::-1]
            except EngineError as error:
                self.refusal = error
                raise
        message = self._heard.pop() if self._heard else await self._receive()
        self._is_given_up |= message["type"] == "http.disconnect" and not self._status
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is None:
            self._status = message.get("status", self._status)
            await self._send(message)

    async def tell_if_refused(self) -> None:
        """Have the scheduler tell who waits in the room of a prefill that was refused or given up. Raises nothing."""
        is_good = 0 < self._status < 400 and not self._is_given_up
        if self._offer is None or is_good:
            return
        state, status = self._scope["app"].state, self._status if self.refusal is None else BAD_REQUEST
        params = self._offer | {"status": 0 if self._is_given_up else status}
        try:
            for replica in range(_replicas(state.vllm_config)):
                await state.engine_client.notify_kv_transfer_request_rejected(
                    f"refused-{uuid.uuid4().hex}", params, data_parallel_rank=replica
                )
        except Exception:  # the call is answered; who waits in its room hears nothing until its deadline
            log.warning(
                "room %s: the scheduler was not told that its call ended", params["bootstrap_room"], exc_info=True
            )

    async def _turned(self) -> list[Message]:
        """The messages of the body for this engine. Raises EngineError."""
        heard = [await self._receive()]
        read = len(heard[0].get("body", b""))
        while heard[-1].get("more_body") and read <= SEARCHED_BYTES:
            heard.append(await self._receive())
            read += len(heard[-1].get("body", b""))
        text = b"".join(message.get("body", b"") for message in heard)
        if FIELD not in text or heard[-1]["type"] != "http.request":
            return heard
        if heard[-1].get("more_body"):
            raise EngineError("bad_params", f"body: more than {SEARCHED_BYTES} bytes, with a bootstrap_room")
        scope = self._scope
        turned, params = _turned(text, scope["path"], scope["app"].state.vllm_config.kv_transfer_config)
        if turned is text:
            return heard
        if "do_remote_decode" in params:
            self._offer = params
            _check_replica(scope)
        length = (b"content-length", str(len(turned)).encode())
        scope["headers"] = [*(each for each in scope["headers"] if each[0] != length[0]), length]
        return [{"type": "http.request", "body": turned, "more_body": False}]


def _replicas(engine: Any) -> int:
    """How many replicas vLLM's own balancer chooses among (`--data-parallel-size`)."""
    parallel = engine.parallel_config
    return int(parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size)


def _check_replica(scope: MutableMapping[str, Any]) -> None:
    """Of a call with a room: it must name its replica if there are several. Raises EngineError.

    The decode side asks the one agent that the call names. vLLM would choose any replica, whose agent is another.
    """
    count = _replicas(scope["app"].state.vllm_config)
    if count > 1 and not dict(scope["headers"]).get(b"x-data-parallel-rank", b"").isdigit():
        reason = f"of {count} replicas, the one whose agent bootstrap_port names must be in X-data-parallel-rank"
        raise EngineError("bad_params", f"bootstrap_room: {reason}")


def _may_be_ours(scope: MutableMapping[str, Any]) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    headers = dict(scope["headers"])
    return b"json" in headers.get(b"content-type", b"").lower() and b"content-encoding" not in headers


def _turned(text: bytes, path: str, engine: Any) -> tuple[bytes, dict[str, Any]]:
    """The body for this engine, and the parameters in it; `text` itself if it has no room. Raises EngineError."""
    try:
        body = msgspec.json.decode(text, type=dict[str, Raw])
    except msgspec.ValidationError:  # no object
        return text, {}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EngineError("bad_params", f"body: not JSON: {plain(str(error), 80)}") from None
    if (room := _value(body, "bootstrap_room")) is None:
        return text, {}
    if not path.endswith(PATHS):
        raise EngineError("bad_params", f"bootstrap_room: understood at {' and '.join(PATHS)} only")
    if body.get("kv_transfer_params", b"null") not in (b"null", b"{}"):
        raise EngineError("bad_params", "kv_transfer_params and bootstrap_room: must be one of them")
    role = engine.kv_role if engine is not None else None
    if role not in ("kv_producer", "kv_consumer"):
        reason = f"bootstrap_room: this engine's kv_role is {role}, must be kv_producer or kv_consumer"
        raise EngineError("bad_params", reason)
    host, port, room = (_first(_value(body, name), name, body) for name in FIELDS)
    params: dict[str, Any] = {"bootstrap_room": room}
    limits: dict[str, int] = {}
    if role == "kv_producer":
        params["do_remote_decode"] = True
        read_room(params)
        limits = _one_token(body)
    else:
        if port is None:
            port = VLLMOptions.read(engine.kv_connector_extra_config).bootstrap_port
        if type(port) is not int or not 0 < port < 65536:
            raise EngineError("bad_params", f"bootstrap_port: {port!a:.40}, must be in [1, 65535]")
        params |= {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
        read_remote(params)
    kept = {name: value for name, value in body.items() if name not in FIELDS}
    return msgspec.json.encode(kept | limits | {"kv_transfer_params": params}), params


def _value(body: dict[str, Raw], name: str) -> Any:
    """What the body says under this name, None if nothing. Raises EngineError for more than such a value may be."""
    said = body.get(name, Raw(b"null"))
    if len(memoryview(said)) > MOST_VALUE_BYTES:
        raise EngineError("bad_params", f"{name}: longer than {MOST_VALUE_BYTES} bytes")
    try:
        return msgspec.json.decode(said)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EngineError("bad_params", f"{name}: {plain(str(error), 80)}") from None


def _one_token(body: dict[str, Raw]) -> dict[str, int]:
    """Limits a prefill to one token. Streaming is left as it is: routers only read the answer to its end."""
    limits = ["max_tokens"] + ["max_completion_tokens"] * ("messages" in body) + ["min_tokens"] * ("min_tokens" in body)
    return dict.fromkeys(limits, 1)


def _sizes(body: dict[str, Raw]) -> set[int]:
    """How many rooms such a call may have: one for each prompt, or one for each answer."""
    prompts, answers = _prompts(bytes(memoryview(body.get("prompt", Raw(b"null"))))), _value(body, "n")
    return {prompts, prompts * answers} if type(answers) is int else {prompts}


def _prompts(prompt: bytes) -> int:
    """How many there are: a list is one prompt if it holds tokens, and otherwise several."""
    if not prompt.startswith(b"[") or prompt[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return len(msgspec.json.decode(prompt, type=list[Raw]))


def _first(value: Any, name: str, body: dict[str, Raw]) -> Any:
    """The first of values that may come once per prompt. vLLM takes one room a call: digests tell its prompts apart."""
    if not isinstance(value, list):
        return value
    sizes = _sizes(body)
    if not value or len(value) not in sizes:
        needed = " or ".join(map(str, sorted(sizes)))
        raise EngineError("bad_params", f"{name}: {len(value)} of them, must be {needed}")
    if name == "bootstrap_room":
        for each in value:
            if each is None:
                raise EngineError("bad_params", f"{name}: one is missing, must be {len(value)} numbers")
            read_room({name: each})
    elif any(each != value[0] for each in value):
        raise EngineError("bad_params", f"{name}: {value[0]!a:.40} and others, must be one prefill engine's")
    return value[0]


async def _refuse(send: Send, reason: str) -> None:
    """Answer as vLLM itself answers a bad request."""
    error = {"message": f"kvbridge: {reason}", "type": "BadRequestError", "param": None, "code": BAD_REQUEST}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": BAD_REQUEST, "headers": headers})
    await send({"type": "http.response.body", "body": body})
