"""Small engines that speak like real ones, keep what they received, and misbehave when told to. Loopback only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvbridge.proxy.bodies import MESSAGES, PATHS, RESPONSES
from kvbridge.proxy.fleet import Backend, Fleet, Role, Waits, read_engine
from kvbridge.proxy.server import serving

WAITS = Waits(prefill_s=60, answer_s=60, connect_s=10, health_every_s=0.05, health_s=5, client_s=60)
PROMPT = [1, 2, 3, 4]
TOKENS = [7, 8, 9]
AGENT = {"remote_host": "10.0.0.5", "remote_port": 7700, "remote_key": "KEY"}

# What SGLang 0.5.23's /generate takes; a body with another name is refused by its dataclass.
GENERATE_FIELDS = {
    *("rid", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("stream", "bootstrap_host", "bootstrap_port", "bootstrap_room", "lora_path", "cache_salt", "priority"),
}


@dataclass
class StandIn:
    """One engine. `act` may answer a request in its place: it gets the request and its body."""

    kind: str
    role: str
    url: str = ""
    got: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    act: Callable[[web.Request, dict[str, Any]], Any] | None = None
    is_healthy: bool = True
    replicas: int = 1
    mode: str = ""  # SGLang's own role, if that is another than on the proxy's list
    keys: tuple[str, str] = ("", "")  # that it wants to say its role, and to change it
    is_busy: bool = False  # so that it does not change its role
    changes: list[str] = field(default_factory=list)  # of its role, as it is asked for them
    hangs_until: asyncio.Event | None = None  # at its health check
    looks_up: Callable[[], Any] | None = None  # awaited before its bootstrap server answers
    checks: int = 0  # of its health
    left: int = 0  # requests whose client closed the connection
    stop: Any = None
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    agents: list[Any] = field(default_factory=lambda: [[0, 1, "tcp://10.0.0.9:1"], [0, 0, "tcp://10.0.0.{}:7700#KEY"]])

    @property
    def body(self) -> dict[str, Any]:
        (one,) = self.got
        return one[1]

    async def ask(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.got.append((request.path, body, dict(request.headers)))
        self.busy.set()
        try:
            if self.act is not None and (answer := await self.act(request, body)) is not None:
                return answer
            return await (self._vllm if self.kind == "vllm" else self._sglang)(request, body)
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _vllm(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/generate":
            return web.Response(status=404)
        unknown = [name for name in body if name.startswith("bootstrap_") or name == "custom_params"]
        params = body.get("kv_transfer_params")
        if unknown or (body.get("stream_options") and not body.get("stream")):
            return web.json_response({"error": {"message": f"{unknown} stream_options", "code": 400}}, status=400)
        if body.get("min_tokens", 0) > (body.get("max_tokens") or 16):
            return web.json_response({"error": {"message": "min_tokens", "code": 400}}, status=400)
        if request.path in (RESPONSES, MESSAGES):
            return await self._of_vllm(request, body)
        tokens = TOKENS[:1] if body.get("max_tokens") == 1 else TOKENS
        answer = _openai(request.path, body, tokens)
        if params and params.get("do_remote_decode"):
            answer["kv_transfer_params"] = _offered(params)
        if body.get("stream"):
            return await stream(request, _chunks(request.path, body, tokens))
        return web.json_response(answer)

    async def _of_vllm(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The paths that only vLLM has here. Their streams have named events and no [DONE]."""
        is_cut = (body.get("max_output_tokens") or body.get("max_tokens")) == 1
        answer: dict[str, Any] = {"id": "x", "model": "m", "said": " 7" if is_cut else " 7 8 9"}
        if request.path == RESPONSES:
            answer |= {"status": "incomplete", "output": []}
            events = [{"type": "response.created"}, {"type": "response.completed", "response": answer}]
        else:
            answer |= {"type": "message", "stop_reason": "max_tokens"}
            events = [{"type": "message_start"}, {"type": "message_stop"}]
        if (params := body.get("kv_transfer_params")) and params.get("do_remote_decode"):
            answer["kv_transfer_params"] = _offered(params)
        return await stream(request, events, is_done=False) if body.get("stream") else web.json_response(answer)

    async def _sglang(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "kv_transfer_params" in body or not (body.get("bootstrap_room") and body.get("bootstrap_host")):
            return web.json_response({"error": {"message": "no bootstrap_room", "code": 400}}, status=400)
        if request.path != "/generate":
            if body.get("stream"):
                return await stream(request, _chunks(request.path, body, TOKENS))
            return web.json_response(_openai(request.path, body, TOKENS))
        if unknown := set(body) - GENERATE_FIELDS:
            return web.json_response({"error": {"message": f"unexpected {sorted(unknown)}"}}, status=400)
        said = [_native(body, TOKENS[: n + 1], n == len(TOKENS) - 1) for n in range(len(TOKENS))]
        return await stream(request, said) if body.get("stream") else web.json_response(said[-1])

    async def health(self, _: web.Request) -> web.Response:
        self.checks += 1
        if self.hangs_until is not None:
            await self.hangs_until.wait()
        return web.Response(status=200 if self.is_healthy else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        if self.kind != "vllm":
            return web.Response(status=404)
        lines = [f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 0.0\n' for n in range(self.replicas)]
        return web.Response(text="# TYPE vllm:num_requests_running gauge\n" + "".join(lines))

    async def model_info(self, request: web.Request) -> web.Response:
        if not _has(request, self.keys[0]):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"disaggregation_mode": self.mode or self.role})

    async def change(self, request: web.Request) -> web.Response:
        if not _has(request, self.keys[1]):
            return web.json_response({"error": "Unauthorized"}, status=401)
        asked = await request.json()
        self.changes.append(asked["new_role"])
        if self.is_busy or "decode_cuda_graph_memory_gb" not in asked:
            return web.json_response({"success": False, "message": "instance is not idle"}, status=400)
        self.mode = asked["new_role"]
        return web.json_response({"success": True, "message": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.kind}]})

    async def route(self, request: web.Request) -> web.Response:
        if self.looks_up is not None:
            await self.looks_up()
        is_all = all(request.query[f"{n}_rank"] == "-1" for n in ("prefill_dp", "prefill_cp", "target_tp", "target_pp"))
        return web.json_response({"dp_size": 2, "follow_bootstrap_room": True}, status=200 if is_all else 400)

    async def ranks(self, request: web.Request) -> web.Response:
        replica = request.query["replica"]
        return web.json_response([[pp, tp, url.format(replica), "10.0.0.5", 4000] for pp, tp, url in self.agents])


def _offered(params: dict[str, Any]) -> dict[str, Any]:
    room = params["bootstrap_room"]
    told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": f"room/{room}/d1"}
    return told | AGENT | {"bootstrap_room": room}


def _native(body: dict[str, Any], tokens: list[int], is_last: bool) -> dict[str, Any]:
    finish = {"type": "length", "length": len(tokens)} if is_last else None
    meta = {"id": body.get("rid", "r"), "finish_reason": finish, "prompt_tokens": 4, "completion_tokens": len(tokens)}
    return {"text": "".join(f" {t}" for t in tokens), "output_ids": tokens, "meta_info": meta}


def _openai(path: str, body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    text = "".join(f" {t}" for t in tokens)
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
    if body.get("return_token_ids"):
        choice |= {"token_ids": tokens, "prompt_token_ids": PROMPT}
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        choice["logprobs"] = _logprobs(path, body)
    choices = [choice | {"index": number} for number in range(body.get("n") or 1)]
    usage = {"prompt_tokens": 4, "completion_tokens": len(choices) * len(tokens)}
    usage["total_tokens"] = sum(usage.values())
    return {"id": "x", "object": "o", "created": 1, "model": "m", "choices": choices, "usage": usage}


def _logprobs(path: str, body: dict[str, Any]) -> dict[str, Any]:
    names = ["token_id:7", "token_id:5", "token_id:6"] if body.get("return_tokens_as_token_ids") else ["a", "b", "c"]
    top = dict(zip(names, (-0.5, -3.0, -1.5), strict=True))
    if "chat" not in path:
        return {"tokens": names[:1], "token_logprobs": [-0.5], "top_logprobs": [top], "text_offset": [0]}
    told = [{"token": name, "logprob": value} for name, value in top.items()]
    return {"content": [{"token": names[0], "logprob": -0.5, "top_logprobs": told}]}


def _chunks(path: str, body: dict[str, Any], tokens: list[int]) -> list[dict[str, Any]]:
    said = []
    for place, token in enumerate(tokens):
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": f" {token}"}} if "chat" in path else {"text": f" {token}"}
        if body.get("return_token_ids"):
            choice |= {"token_ids": [token]} | ({"prompt_token_ids": PROMPT} if place == 0 else {})
        if place == len(tokens) - 1:
            choice["finish_reason"] = "length"
        said.append({"id": "x", "choices": [choice]})
    return said


async def stream(
    request: web.Request, said: list[dict[str, Any]], is_done: bool = True, pause_s: float = 0.0
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for each in said:
        named = f"event: {each['type']}\n" if "type" in each else ""
        await response.write(f"{named}data: {json.dumps(each)}\n\n".encode())
        await asyncio.sleep(pause_s)
    if is_done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _served(app: web.Application) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


class World:
    """Engines, the proxy before them, and a client."""

    def __init__(self) -> None:
        self.engines: list[StandIn] = []
        self.url = ""
        self.http: aiohttp.ClientSession
        self.fleet: Fleet

    def all(self, role: str) -> list[StandIn]:
        return [each for each in self.engines if each.role == role]

    @property
    def prefill(self) -> StandIn:
        return self.all("prefill")[0]

    @property
    def decode(self) -> StandIn:
        return self.all("decode")[0]

    async def ask(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=raw, **more) as answer:
            text = await answer.text()
            if answer.content_type == "text/event-stream":
                return answer.status, [line[6:] for line in text.split("\n") if line.startswith("data: ")]
            return answer.status, json.loads(text)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def metrics(self) -> str:
        async with self.http.get(self.url + "/metrics") as answer:
            return await answer.text()

    async def shows(self, text: str, within_s: float = 60.0) -> None:
        """Until the metrics have it."""
        async with asyncio.timeout(within_s):
            while text not in await self.metrics():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def until(self, holds: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110 - what is waited for knows no events
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world(prefill: str, decode: str, waits: Waits = WAITS, **more: Any) -> AsyncIterator[World]:
    """`prefill` and `decode` are kinds with commas between; `more` is for the proxy."""
    found, runners, named = World(), [], []
    try:
        for role, kinds in (("prefill", prefill), ("decode", decode)):
            for kind in kinds.split(","):
                engine = StandIn(kind, role)
                app = web.Application(client_max_size=64 << 20)
                for path in PATHS:
                    app.router.add_post(path, engine.ask)
                app.router.add_get("/health", engine.health)
                app.router.add_get("/v1/models", engine.models)
                app.router.add_get("/metrics", engine.metrics)
                app.router.add_get("/model_info", engine.model_info)
                app.router.add_post("/pd_role_switch", engine.change)
                app.router.add_get("/route", engine.route)
                app.router.add_get("/kvbridge/ranks", engine.ranks)
                runner, port = await _served(app)
                runners.append(runner)
                engine.url, engine.stop = f"http://127.0.0.1:{port}", runner.cleanup
                found.engines.append(engine)
                option = f",bootstrap={port}" if (kind, role) == ("sglang", "prefill") else ""
                named.append(read_engine(Role(role), f"{kind}={engine.url}{option}"))
        async with (
            serving(named, "127.0.0.1", 0, waits, **more) as (place, found.fleet),
            aiohttp.ClientSession() as found.http,
        ):
            found.url = f"http://{place}"
            await found.until(lambda: all(each.is_healthy for each in named))
            yield found
            await found.until(lambda: not any(each.outstanding for each in named))
    finally:
        for runner in runners:
            await runner.cleanup()


def _has(request: web.Request, key: str) -> bool:
    return not key or request.headers.get("Authorization") == f"Bearer {key}"


def named(engine: StandIn) -> str:
    return Backend(Role(engine.role), engine.kind, engine.url).name
