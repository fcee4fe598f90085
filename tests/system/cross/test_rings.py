"""DeepSeek V4.1 between vLLM's scheduler, worker and caches and SGLang's pool, allocator and halves of a request.

On Blackwell, where both may have all rows in one form. No forward runs: both sides compare each row that their kernels
read with what they would have computed, byte for byte. A row is the same hash on both sides: see compressed.py.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge.adapters.sglang.prompts import prompt_digest
from testing.waiting import wait_for
from tests.integration.adapters.conftest import sglang  # noqa: F401  # a fixture
from tests.integration.adapters.sglang_v4 import Engine, Request
from tests.integration.adapters.test_sglang_compressed import attached, pages
from tests.integration.adapters.test_sglang_life import FOREIGN, SUCCESS, WAITING
from tests.integration.adapters.test_sglang_pool import on_a_cpu  # noqa: F401  # a fixture
from tests.system.cross.test_compressed import poll, receiver_of, send, told
from tests.system.engines.fleet import PREFILL

pytestmark = [pytest.mark.cross, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
START_S = 120.0
MODEL: dict[str, Any] = {"ratios": [0, 2, 2, 1], "kv_source_layers": [1, 3]}
# vLLM's kv_cache_dtype, and SGLang's layout of windows and of rows (`SGLANG_DSV4_COMPRESSED_KV_LAYOUT`).
FORMS = {"fp8_ds_mla": ("v41", "fp8"), "nvfp4_ds_mla": ("v41_new", "auto")}
# Around where rows of 2, laps of vLLM's rings of 8, blocks of both and the window end.
LENGTHS = [2, 3, 4, 8, 9, 10, 17, 33, 65, 66, 129, 130, 256, 257, 258, 301]
CACHES = {"window": ".swa_cache", "rows": "", "keys": ".indexer.k_cache", "state": ".compressor.state_cache"}
ROOMS, PROMPTS = count(1), count(1)
SAMPLED = 7  # all tokens that either side samples


class Hashed(Request):
    """Its rows are those that vLLM's side has of this prompt."""

    prompted: list[int]
    disagg_kv_sender: Any
    origin_input_ids: Any

    def value(self, cache: tuple[int, str], numbers: np.ndarray, width: int) -> np.ndarray:
        kind, _, ratio = cache[1].partition(" of ")
        name = f"model.layers.{cache[0]}.attn{CACHES[kind]}".encode()
        tokens, each = (*self.prompted, *[SAMPLED] * 64), 1 if kind in ("window", "state") else int(ratio)
        found = np.zeros((len(numbers), width), np.uint8)
        for place, number in enumerate(numbers.tolist()):
            prefix = hashlib.blake2b(repr(tokens[: (number + 1) * each]).encode()).digest()
            found[place] = np.frombuffer(hashlib.shake_128(prefix + name).digest(width), np.uint8)
        return found


class Sides:
    def __init__(self, folder: Path, stack: ExitStack, form: str) -> None:
        layout, compressed = FORMS[form]
        self.ranks: dict[str, tuple[Engine, Any]] = {}
        for role, drafts in (("prefill", 0), ("decode", 4)):
            more = MODEL | {"kv_layout": layout, "compressed_kv_layout": compressed}
            engine = Engine(role == "decode", drafts, **more)
            (of,) = stack.enter_context(attached(folder, role, [engine]))
            of.queue.scheduler.model_config.vocab_size = 1 << 20
            of.digest = lambda req: prompt_digest(req, ("", ""))
            self.ranks[role] = engine, of
        command = [os.environ["KVBRIDGE_TEST_VLLM_PYTHON"], "-m", "tests.system.cross.ring_engine", str(folder), form]
        with (folder / "vllm.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        stack.callback(process.wait, START_S)  # it ends its agent first
        wait_for(lambda: (folder / "vllm").exists() or process.poll() is not None, START_S)
        assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
        self._calls: Connection = stack.enter_context(Client(str(folder / "vllm")))
        self._log = folder / "vllm.log"

    def vllm(self, prompt: list[int], max_tokens: int, **params: Any) -> tuple[Any, int]:
        self._calls.send({"prompt": prompt, "max_tokens": max_tokens, **params})
        try:
            return self._calls.recv()
        except EOFError:
            pytest.fail(self._log.read_text()[-3000:])


@pytest.fixture(scope="module", params=list(FORMS))
def sides(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("v41"), stack, request.param)


def fresh(length: int) -> list[int]:
    seed = next(PROMPTS)
    return [(place * 7919 + seed * 104729 + 13) % 50021 for place in range(length)]


def to_sglang(sides: Sides, prompt: list[int], prefix: int = 0) -> None:
    engine, of = sides.ranks["decode"]
    room = next(ROOMS)
    offered, _ = sides.vllm(prompt, 1, **PREFILL, bootstrap_room=room, fetched_by="sglang")
    host, port, id = (offered[key] for key in ("remote_host", "remote_port", "remote_request_id"))
    said = {"sender": f"tcp://{host}:{port}", "first_token": SAMPLED, "rendezvous": id}
    request = Hashed(engine, 0, engine.request(0).kv)
    request.prompted = prompt
    states = request.preallocate(len(prompt), prefix)
    before = [each.clone() for each in engine.tensors()]
    made = receiver_of(of, told(request, prompt, room, said), len(prompt) - prefix)
    made.send_metadata(np.array(pages(request, prefix, len(prompt)).ids, np.int32), 1, states, prefix)
    assert poll(made) == SUCCESS, of.failure_records
    made.clear()
    request.assert_came(before, prefix, len(prompt))
    request.decode(9)
    engine.free(request)


def to_vllm(sides: Sides, prompt: list[int]) -> None:
    from kvbridge.adapters.sglang.sender import KVBridgeSender

    (engine, of), room, end = sides.ranks["prefill"], next(ROOMS), len(prompt) - 1
    request = Hashed(engine, 0, engine.request(0).kv)
    request.prompted = prompt
    made = request.disagg_kv_sender = KVBridgeSender(of, FOREIGN, room)
    made.bind(told(request, prompt, room, {"fetched_by": "vllm"}))
    assert len(request.origin_input_ids) == end, "vLLM computes the last token"
    assert made.poll() == WAITING, of.failure_records
    request.prefill(end)
    send(of, request, made, end)
    host, _, port = of.talk.address.removeprefix("tcp://").partition(":")
    where = {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room}
    _, computed = sides.vllm(prompt, 9, **where, remote_host=host, remote_port=int(port))
    assert computed == 9, "the prompt did not travel, it was computed again"
    assert poll(made) == SUCCESS, of.failure_records
    made.clear()
    engine.free(request)


@pytest.mark.parametrize("length", LENGTHS)
def test_vllm_goes_on_from_sglangs_rows(sides: Sides, length: int) -> None:
    to_vllm(sides, fresh(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_sglang_goes_on_from_vllms_rows(sides: Sides, length: int) -> None:
    to_sglang(sides, fresh(length))


@pytest.mark.parametrize("more", [2, 3, 30, 140])
def test_a_prefix_that_vllm_has(sides: Sides, more: int) -> None:
    prompt = fresh(257)
    to_vllm(sides, prompt)
    _, computed = sides.vllm([*prompt[:256], *fresh(2)], 1)
    assert computed < 256, "its cache has what came"
    to_vllm(sides, [*prompt[:256], *fresh(more)])


@pytest.mark.parametrize("length", [385, 640])
def test_a_prefix_that_sglang_has(sides: Sides, length: int) -> None:
    to_sglang(sides, fresh(length), prefix=256)
