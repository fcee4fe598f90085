"""Bootstrap style in front of vLLM: `vllm serve --middleware kvbridge.adapters.vllm.middleware.BootstrapRooms ...`.

sglang-router, smg and other routers of SGLang's style send one body to both engines at once, with `bootstrap_host`,
`bootstrap_port` and `bootstrap_room` in it, which vLLM ignores. This middleware turns it into a prefill of one token
that is offered on an engine whose kv_role is kv_producer, and into a want on a kv_consumer. It runs in vLLM's API
server before authentication: it keeps nothing of a body, and searches no more of it than `MOST_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ...errors import EngineError
from .options import VLLMOptions
from .params import read_remote, read_room

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_BYTES = 64 << 20  # how much of a body is searched for a room; a longer one with a room is refused
FIELD = b'"bootstrap_room"'
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
PATHS = ("/v1/completions", "/v1/chat/completions")  # whose token limits we know


class BootstrapRooms:
    """An ASGI middleware. It reads the engine's configuration from vLLM's application state."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Rewrite a body with a room; pass any other one on as it came."""
        if not _may_be_ours(scope):
            return await self._app(scope, receive, send)
        heard = [await receive()]
        read = len(heard[0].get("body", b""))
        while heard[-1].get("more_body") and read <= MOST_BYTES:
            heard.append(await receive())
            read += len(heard[-1].get("body", b""))
        text = b"".join(message.get("body", b"") for message in heard)
        if FIELD in text and heard[-1]["type"] == "http.request":
            try:
                if heard[-1].get("more_body"):
                    raise EngineError("bad_params", f"body: more than {MOST_BYTES} bytes, with a bootstrap_room")
                text = _turned(text, scope["path"], scope["app"].state.vllm_config.kv_transfer_config)
            except EngineError as error:
                return await _refuse(send, str(error))
            heard = [{"type": "http.request", "body": text, "more_body": False}]
            length = (b"content-length", str(len(text)).encode())
            scope = {**scope, "headers": [*(each for each in scope["headers"] if each[0] != length[0]), length]}
        heard.reverse()

        async def again() -> Message:
            return heard.pop() if heard else await receive()

        await self._app(scope, again, send)


def _may_be_ours(scope: MutableMapping[str, Any]) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    headers = dict(scope["headers"])
    return b"json" in headers.get(b"content-type", b"").lower() and b"content-encoding" not in headers


def _turned(text: bytes, path: str, engine: Any) -> bytes:
    """The body rewritten for this engine; unchanged if it has no room or is not valid JSON. Raises EngineError."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(body, dict) or body.get("bootstrap_room") is None:
        return text
    if not path.endswith(PATHS):
        raise EngineError("bad_params", f"bootstrap_room: understood at {' and '.join(PATHS)} only")
    if body.get("kv_transfer_params"):
        raise EngineError("bad_params", "kv_transfer_params and bootstrap_room: must be one of them")
    role = engine.kv_role if engine is not None else None
    if role not in ("kv_producer", "kv_consumer"):
        reason = f"bootstrap_room: this engine's kv_role is {role}, must be kv_producer or kv_consumer"
        raise EngineError("bad_params", reason)
    sizes = _sizes(body)
    host, port, room = (_first(body.pop(name, None), name, sizes) for name in FIELDS)
    params: dict[str, Any] = {"bootstrap_room": room}
    if role == "kv_producer":
        params["do_remote_decode"] = True
        read_room(params)
        body |= _one_token(body)
    else:
        if port is None:
            port = VLLMOptions.read(engine.kv_connector_extra_config).bootstrap_port
        if type(port) is not int or not 0 < port < 65536:
            raise EngineError("bad_params", f"bootstrap_port: {port!a:.40}, must be in [1, 65535]")
        params |= {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
        read_remote(params)
    return json.dumps(body | {"kv_transfer_params": params}).encode()


def _one_token(body: dict[str, Any]) -> dict[str, Any]:
    """Limits a prefill to one token. Streaming is left as it is: routers only read the answer to its end."""
    limits = ["max_tokens"] + ["max_completion_tokens"] * ("messages" in body) + ["min_tokens"] * ("min_tokens" in body)
    return dict.fromkeys(limits, 1)


def _sizes(body: dict[str, Any]) -> set[int]:
    """How many rooms such a call may have: one for each prompt, or one for each answer."""
    prompt, answers = body.get("prompt"), body.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt) else 1
    return {prompts, prompts * answers} if type(answers) is int else {prompts}


def _first(value: Any, name: str, sizes: set[int]) -> Any:
    """The first of values that may come once per prompt. vLLM takes one room a call: digests tell its prompts apart."""
    if not isinstance(value, list):
        return value
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
    error = {"message": f"kvbridge: {reason}", "type": "BadRequestError", "param": None, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
