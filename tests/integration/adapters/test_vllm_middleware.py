"""Bodies as routers of the bootstrap style send them, and what vLLM gets instead. Needs no vLLM."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.adapters.vllm import middleware
from kvbridge.adapters.vllm.middleware import BootstrapRooms

pytestmark = pytest.mark.proves("G16")

ROOM = 4711
HOST = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 7701, "bootstrap_room": ROOM}
JSON = [(b"content-type", b"application/json"), (b"x-other", b"1")]
WANT = {"do_remote_prefill": True, "bootstrap_room": ROOM, "remote_host": "10.0.0.1", "remote_port": 7701}
OFFER = {"do_remote_decode": True, "bootstrap_room": ROOM}


class Application:
    """vLLM's: keeps the scope and the messages it gets, until the body's end or its client's, and answers 200."""

    def __init__(self) -> None:
        self.scope: Any = None
        self.heard: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        while not self.heard or self.heard[-1].get("more_body"):
            self.heard.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.heard)


def call(
    body: Any,
    role: str = "kv_producer",
    headers: Any = JSON,
    method: str = "POST",
    cuts: int = 1,
    ends: bool = True,
    path: str = "/v1/completions",
    engine: Any = None,
    replicas: int = 1,
    **extra: Any,
) -> tuple[Application, list[Any]]:
    """The application that was behind it, and what was sent to the client."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    step = -(-len(text) // cuts) or 1
    parts = [text[at : at + step] for at in range(0, len(text), step)] or [b""]
    heard = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        heard[-1]["more_body"] = False
    heard.append({"type": "http.disconnect"})
    waiting: Iterator[Any] = iter(heard)
    told: list[Any] = []

    async def receive() -> Any:
        return next(waiting)

    async def send(message: Any) -> None:
        told.append(message)

    state = SimpleNamespace(vllm_config=configured(role, replicas, **extra), engine_client=engine)
    app = SimpleNamespace(state=state)
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": app}
    behind = Application()
    asyncio.run(BootstrapRooms(behind)(scope, receive, send))
    return behind, told


def configured(role: str, replicas: int = 1, **extra: Any) -> Any:
    """vLLM's configuration, as far as the middleware reads it."""
    transfer = SimpleNamespace(kv_role=role, kv_connector_extra_config=extra) if role else None
    parallel = SimpleNamespace(data_parallel_size=replicas, data_parallel_size_local=1, local_engines_only=False)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


def turned(body: dict[str, Any], role: str = "kv_producer", **extra: Any) -> Any:
    behind, told = call(body, role, **extra)
    assert told[0]["status"] == 200, told
    headers = dict(behind.scope["headers"])
    assert headers[b"content-length"] == str(len(behind.body)).encode() and headers[b"x-other"] == b"1"
    return json.loads(behind.body)


def refusal(body: dict[str, Any], role: str = "kv_consumer", **more: Any) -> str:
    behind, told = call(body, role, **more)
    assert not behind.heard, "it went on"
    assert (told[0]["status"], told[1].get("more_body", False)) == (400, False)
    error = json.loads(told[1]["body"])["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    return error["message"]


@pytest.mark.parametrize("cuts", [1, 9])
@pytest.mark.parametrize("stream", [True, False])
def test_a_prefill_engine_offers_and_computes_one_token(stream: bool, cuts: int) -> None:
    body = {"model": "m", "prompt": "1 2 3", "max_tokens": 40, "stream": stream, "n": 2}
    assert turned(body | HOST, cuts=cuts) == body | {"max_tokens": 1, "kv_transfer_params": OFFER}


def test_a_chat_of_some_tokens_at_least_is_one_token_too() -> None:
    body = {"messages": [{"role": "user", "content": "é 💙"}], "max_completion_tokens": 40, "min_tokens": 9}
    one = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "kv_transfer_params": OFFER}
    assert turned(body | HOST) == body | one


def test_a_decode_engine_wants_what_the_named_agent_has_and_keeps_the_rest() -> None:
    body = {"messages": [], "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}}
    assert turned(body | HOST, "kv_consumer") == body | {"kv_transfer_params": WANT}


@pytest.mark.parametrize(("extra", "port"), [({}, 7700), ({"kvbridge_bootstrap_port": 7123}, 7123)])
@pytest.mark.parametrize("told", [{"bootstrap_port": None}, {}], ids=["null", "none"])
def test_a_port_that_the_router_leaves_out_is_the_option_s(told: Any, extra: Any, port: int) -> None:
    body = {"prompt": "1", "bootstrap_host": "10.0.0.1", "bootstrap_room": ROOM} | told
    assert turned(body, "kv_consumer", **extra)["kv_transfer_params"] == WANT | {"remote_port": port}


@pytest.mark.parametrize(
    ("body", "rooms"),
    [
        ({"prompt": ["1", "2", "3"]}, 3),
        ({"prompt": ["1", "2"], "n": 3}, 2),
        ({"prompt": ["1", "2"], "n": 3}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"messages": [], "n": 4}, 4),
    ],
)
def test_the_first_of_several_rooms_serves_the_whole_call(body: dict[str, Any], rooms: int) -> None:
    several = {name: [value] * rooms for name, value in HOST.items()}
    several["bootstrap_room"] = list(range(ROOM, ROOM + rooms))
    assert turned(body | several, "kv_consumer")["kv_transfer_params"] == WANT
    assert turned(body | several)["kv_transfer_params"] == OFFER


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"role": "kv_both"}, "must be kv_producer or kv_consumer"),
        ({"role": ""}, "must be kv_producer or kv_consumer"),
        ({"prompt": "1", "n": 0, "bootstrap_room": []}, "bootstrap_room: 0 of them"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "must be one of them"),
        ({"bootstrap_room": [1]}, "bootstrap_room: 1 of them, must be 2"),
        ({"bootstrap_room": [1, 2, 3]}, "bootstrap_room: 3 of them, must be 2"),
        ({"bootstrap_room": []}, "bootstrap_room: 0 of them, must be 2"),
        ({"bootstrap_room": [1, 2, 3], "n": 2}, "bootstrap_room: 3 of them, must be 2 or 4"),
        ({"bootstrap_room": [1, None]}, "bootstrap_room: one is missing"),
        ({"bootstrap_room": [None, 1]}, "bootstrap_room: one is missing"),
        ({"bootstrap_room": [1, "2"]}, "bootstrap_room: '2'"),
        ({"bootstrap_room": 0}, "bootstrap_room: 0"),
        ({"bootstrap_room": {}}, "bootstrap_room: dict"),
        ({"bootstrap_host": None}, "without request, host or port"),
        ({"bootstrap_host": ["a", "b"]}, "bootstrap_host: 'a' and others"),
        ({"bootstrap_host": 1.5}, "remote_host: float"),
        ({"bootstrap_host": "h" * 300}, "longer than the wire allows"),
        ({"bootstrap_port": [7700]}, "bootstrap_port: 1 of them"),
        ({"bootstrap_port": {}}, "bootstrap_port: {}, must be in [1, 65535]"),
        ({"bootstrap_port": 0}, "bootstrap_port: 0, must be in [1, 65535]"),
        ({"bootstrap_port": 70000}, "bootstrap_port: 70000, must be in [1, 65535]"),
        ({"bootstrap_port": True}, "bootstrap_port: True, must be in [1, 65535]"),
    ],
)
def test_what_it_cannot_mean_is_refused_with_the_reason(more: dict[str, Any], said: str) -> None:
    assert said in refusal({"prompt": ["1", "2"]} | HOST | more, more.get("role", "kv_consumer"))


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ({"prompt": "1"}, {}),
        ({"prompt": "1", "bootstrap_room": None, "bootstrap_host": None}, {}),
        ({"prompt": '"bootstrap_room"', "kv_transfer_params": {"do_remote_decode": True}}, {}),
        ({"messages": [{"content": {"bootstrap_room": 7}}]}, {}),
        (["bootstrap_room"], {}),
        (b"", {}),
        (HOST, {"method": "GET"}),
        (HOST, {"headers": [(b"content-type", b"multipart/form-data; boundary=x")]}),
        (HOST, {"headers": [*JSON, (b"content-encoding", b"gzip")]}),
        (HOST, {"headers": []}),
        (HOST, {"ends": False}),
    ],
)
@pytest.mark.parametrize("cuts", [1, 7])
def test_what_is_not_ours_goes_on_as_it_came(body: Any, more: dict[str, Any], cuts: int) -> None:
    behind, told = call(body, cuts=cuts, **more)
    assert behind.body == (body if isinstance(body, bytes) else json.dumps(body).encode())
    assert "content-length" not in dict(behind.scope["headers"]) and told[0]["status"] == 200
    assert behind.heard[-1]["type"] == ("http.request" if more.get("ends", True) else "http.disconnect")


def test_no_more_is_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "SEARCHED_BYTES", 400)
    long = {"prompt": "1" * 1000}
    assert call(long, cuts=10)[0].body == json.dumps(long).encode()
    assert "more than 400 bytes" in refusal(HOST | long, cuts=10)


def test_imports_nothing_that_an_api_server_has_not() -> None:
    asked = "import sys, kvbridge.adapters.vllm.middleware; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-Sc", f"import sys; sys.path = {sys.path!r}; {asked}"],
                            capture_output=True, text=True, check=True, timeout=30).stdout.split()  # fmt: skip
    assert set(loaded) - sys.stdlib_module_names <= {
        "kvbridge",
        "kvbridge_proto",
        "msgspec",
        "typing_extensions",
        "__main__",
    }


def test_a_path_whose_limits_are_not_known_is_refused_a_room_and_goes_on_without() -> None:
    assert "/v1/completions and" in refusal({"input": "1"} | HOST, path="/v1/responses")
    behind, _ = call({"input": {"bootstrap_room": 7}}, path="/v1/responses")
    assert json.loads(behind.body) == {"input": {"bootstrap_room": 7}}


# What it says of a prefill that vLLM refuses:


class Engine:
    """vLLM's client of its engine core."""

    def __init__(self, is_dead: bool = False) -> None:
        self.told: list[tuple[Any, Any]] = []
        self.names: set[str] = set()
        self._is_dead = is_dead

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: Any, *, data_parallel_rank: int | None = None
    ) -> None:
        if self._is_dead:
            raise RuntimeError("EngineCore encountered an issue")
        assert request_id not in self.names
        self.names.add(request_id)
        self.told.append((kv_transfer_params, data_parallel_rank))


class Behind(Application):
    """vLLM's: `status` 0 does not answer, but waits until its client hangs up."""

    status = 404

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        heard = await receive()
        if not self.status:
            while heard["type"] != "http.disconnect":
                heard = await receive()
        await send({"type": "http.response.start", "status": self.status or 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def told_of(
    status: int, monkeypatch: pytest.MonkeyPatch, body: Any = HOST, role: str = "kv_producer", **more: Any
) -> Any:
    monkeypatch.setattr(Behind, "status", status)
    monkeypatch.setattr(sys.modules[__name__], "Application", Behind)
    engine = Engine()
    _, told = call({"prompt": "1"} | body, role, engine=engine, **more)
    assert told[0]["status"] == (status or 200)
    return engine.told


@pytest.mark.parametrize("status", [400, 404, 500, 0])
def test_who_waits_in_the_room_of_a_prefill_that_is_refused_or_given_up_is_told(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_of(status, monkeypatch) == [(OFFER | {"status": status}, 0)]


@pytest.mark.parametrize(("rank", "status"), [(b"1", 404), (b"9", 400), (b"", 400), (b"one", 400)])
def test_all_replicas_are_told(rank: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever the call names: decode asks the agent that the router names, and nobody here knows whose that is."""
    headers = [*JSON, (b"x-data-parallel-rank", rank)]
    told = told_of(status, monkeypatch, headers=headers, replicas=3)
    assert told == [(OFFER | {"status": status}, replica) for replica in range(3)]


def test_a_call_in_a_room_must_name_its_replica_if_there_are_several() -> None:
    """vLLM would choose any, and decode asks one agent."""
    body = {"prompt": "1"} | HOST
    said = "of 2 replicas, the one whose agent bootstrap_port names must be in X-data-parallel-rank"
    assert said in refusal(body, "kv_producer", engine=Engine(), replicas=2)
    named = [*JSON, (b"x-data-parallel-rank", b"1")]
    assert call(body, headers=named, replicas=2)[1][0]["status"] == 200
    assert call({"prompt": "1"}, replicas=2)[1][0]["status"] == 200
    assert call(body, "kv_consumer", replicas=2)[1][0]["status"] == 200


@pytest.mark.parametrize(
    ("status", "role", "body"), [(200, "kv_producer", HOST), (404, "kv_consumer", HOST), (404, "kv_producer", {})]
)
def test_nobody_is_told_of_a_call_that_succeeds_or_offers_nothing_in_a_room(
    status: int, role: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_of(status, monkeypatch, body, role) == []


def test_an_engine_that_cannot_be_told_leaves_the_answer_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Application", Behind)
    assert call({"prompt": "1"} | HOST, engine=Engine(is_dead=True))[1][0]["status"] == 404
    assert f"room {ROOM}: the scheduler was not told" in caplog.text


# What it costs, and whom:


class Swallowing(Application):
    """As FastAPI: makes an answer of its own of an error while it reads the body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"There was an error parsing the body"})


def test_whoever_answers_behind_it_a_refusal_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Application", Swallowing)
    _, told = call({"prompt": "1"} | HOST | {"bootstrap_room": 0}, "kv_consumer")
    assert [message["type"] for message in told] == ["http.response.start", "http.response.body"]
    assert b"bootstrap_room: 0" in told[1]["body"]


@pytest.mark.proves("T10")
def test_nothing_is_read_for_a_caller_that_is_turned_away_behind_it() -> None:
    async def turned_away(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def receive() -> Any:
        pytest.fail("the body was read")

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON}
    asyncio.run(BootstrapRooms(turned_away)(scope, receive, send))
    assert told[0]["status"] == 401


@pytest.mark.parametrize(
    "body", [b'{"bootstrap_room": 1', b'\xff"bootstrap_room"', b'{"bootstrap_room": ' + b"[" * 100_000]
)
def test_a_body_with_a_room_that_is_no_json_is_refused(body: bytes) -> None:
    behind, told = call(body)
    assert not behind.heard and told[0]["status"] == 400 and b"kvbridge: body: not JSON" in told[1]["body"]


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_room", "n"])
def test_a_value_longer_than_any_is_refused(name: str) -> None:
    body = {"prompt": ["1", "2"]} | HOST | {"bootstrap_port": [1, 1], name: "x" * (1 << 17)}
    assert f"{name}: longer than" in refusal(body)
    assert "bootstrap_room: " in refusal({"prompt": "1"} | HOST | {"bootstrap_room": 10**4000})


@pytest.mark.proves("T10")
def test_a_long_prompt_costs_little_of_the_servers_loop_and_memory() -> None:
    """16 MiB of tokens cost 2.2 s and 484 MiB. What is behind it then reads the body in any case."""
    body = b'{"prompt": [' + b"1," * (8 << 20) + b'1], "bootstrap_host": "h", "bootstrap_room": 7}'
    before = time.thread_time()
    behind, _ = call(body)
    assert len(behind.body) > len(body) and time.thread_time() - before < 1
    tracemalloc.start()
    try:
        call(body)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.proves("T10")
@pytest.mark.vllm
@pytest.mark.parametrize(("key", "status"), [("wrong", 401), ("right", 200), ("right, no room", 400)])
def test_before_vllms_own_authentication_it_reads_nothing(key: str, status: int) -> None:
    """With vLLM's middleware and FastAPI, in vLLM's order."""
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    httpx: Any = importlib.import_module("httpx")
    app: Any = importlib.import_module("fastapi").FastAPI()
    read = []

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def look(scope: Any, receive: Any, send: Any) -> None:
        async def counted() -> Any:
            read.append(1)
            return await receive()

        await app(scope, counted, send)

    app.add_api_route("/v1/completions", answer, methods=["POST"])
    app.state.vllm_config = configured("kv_producer")
    app.add_middleware(authenticate.AuthenticationMiddleware, tokens=["right"])
    app.add_middleware(BootstrapRooms)

    async def asked() -> Any:
        body = {"prompt": "1"} | HOST | ({"bootstrap_room": 0} if "no room" in key else {})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(look), base_url="http://x") as client:
            headers = {"Authorization": f"Bearer {key.split(',')[0]}"}
            return await client.post("/v1/completions", json=body, headers=headers)

    answered = asyncio.run(asked())
    assert answered.status_code == status and bool(read) == (status != 401)
    if status == 200:
        assert answered.json() == {"prompt": "1", "max_tokens": 1, "kv_transfer_params": OFFER}
    elif status == 400:
        assert "bootstrap_room: 0" in answered.json()["error"]["message"]
