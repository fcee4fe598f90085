"""smg makes a pair of workers whose label `pairing_protocol`, the model key, is the same (docs/routers.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbridge.geometry.traits import model_key
from testing.http_server import HttpServer
from testing.oracle import Shape, describe
from testing.serving import Answers, listening
from testing.waiting import wait_for
from tests.system.routers.fleet import NAME, ROUTERS, router

pytestmark = [
    pytest.mark.routers,
    pytest.mark.skipif(not (ROUTERS / "python").exists(), reason="make .venv-routers/.ready"),
]
PAIR_S = 30.0
PREFILL = Shape(layout="nhd", block_tokens=16)
SAME_MODEL = Shape(layout="hnd", block_tokens=64, codec="fp8_e4m3", tp_size=2)
OTHER_MODEL = Shape(layout="nhd", block_tokens=16, key_width=96)


class Worker(Answers):
    """What smg asks of a vLLM server that has nothing to do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "vllm", "root": NAME}]}
        known = {"/health": {}, "/v1/models": models, "/version": {"version": "0.32.0"}}
        self.answer(200 if self.path in known else 404, known.get(self.path, {}))

    def do_POST(self) -> None:
        _ = self.body
        choice = {"index": 0, "text": "hi", "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        said = {"id": "c", "object": "text_completion", "created": 1, "model": NAME}
        self.answer(200, {**said, "choices": [choice], "usage": usage})


@pytest.fixture
def smg(tmp_path: Path) -> Iterator[HttpServer]:
    server = router(tmp_path, "smg", [str(ROUTERS / "python"), "-m", "smg", "launch", "--pd-disaggregation"])
    try:
        server.wait_up("/liveness")
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize(("decode", "status"), [(SAME_MODEL, 200), (OTHER_MODEL, 503)], ids=["same", "other"])
def test_smg_pairs_workers_of_one_model_key(smg: HttpServer, decode: Shape, status: int) -> None:
    with ExitStack() as stack:
        for role, shape in {"prefill": PREFILL, "decode": decode}.items():
            key = model_key(describe(shape))
            told = {
                "url": f"http://{stack.enter_context(listening(Worker))}",
                "worker_type": role,
                "runtime_type": "vllm",
            }
            smg.ask("/workers", told | {"labels": {"pairing_protocol": key}})
        workers = lambda: json.loads(smg.ask("/workers")[1])["workers"]  # noqa: E731
        wait_for(lambda: [each["is_healthy"] for each in workers()] == [True, True], PAIR_S, smg.log.read_text, 0.2)
        answered, text = smg.ask("/v1/completions", {"model": NAME, "prompt": "to be", "max_tokens": 4})
    assert answered == status and ("no_compatible_pd_pair" in text) == (status == 503), text
