"""SGLang's own KV pools, without a server: described, attached by real agents, and carried from page 16 to page 64.

On a GPU the rows are written after a long kernel, so that reading before the fence would show.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Offer, Want
from kvbridge_proto.pool import Shard

from demo.sglang_rows import DTYPES
from tests.integration.agent.harness import agent
from tests.system.sglang.rows import SavedRows

LAYERS, HEADS, WIDTH, LATENT, ROPE = 3, 4, 128, 512, 64
SLOTS = 16384  # a layer of the smallest pool is 16 MiB: torch gives each tensor an allocation, or a part of one
TOKENS = 1000  # ends inside a page, of 16 and of 64
LATE_CYCLES = 100_000_000  # about 50 ms on an H200
ANSWER_S = 60.0  # a first transfer compiles
MARKS = (pytest.param("cpu", marks=pytest.mark.sglang), pytest.param("cuda:0", marks=pytest.mark.gpu))


@pytest.fixture(params=MARKS)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        from demo.sglang_cpu import ENVIRONMENT, stand_in

        os.environ.update(ENVIRONMENT)
        stand_in()
    pytest.importorskip("sglang.srt.mem_cache.memory_pool", reason="needs SGLang", exc_type=ImportError)
    return str(request.param)


def queue_of(kind: str, page: int, dtype: torch.dtype, device: str) -> Any:
    """A scheduler's queue, as far as a description looks at it, with a real pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {"page_size": page, "dtype": dtype, "layer_num": LAYERS, "device": device, "enable_memory_saver": False}
    if kind == "heads":
        pool = MHATokenToKVPool(SLOTS, head_num=HEADS, head_dim=WIDTH, **common)
    else:
        pool = MLATokenToKVPool(SLOTS, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **common)
    text = SimpleNamespace(num_hidden_layers=LAYERS)
    config = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, hf_text_config=text)
    runner = SimpleNamespace(model=torch.nn.Module())
    return SimpleNamespace(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=None,
        metadata_buffers=SimpleNamespace(output_ids=torch.zeros(1)),
        scheduler=SimpleNamespace(
            model_config=config, tp_worker=SimpleNamespace(model_runner=runner), req_to_token_pool=None
        ),
    )


def tensors(queue: Any) -> dict[tuple[int, str], torch.Tensor]:
    pool = queue.token_to_kv_pool
    parts = {"latent": pool.kv_buffer} if hasattr(pool, "kv_buffer") else {"k": pool.k_buffer, "v": pool.v_buffer}
    return {(layer, part): buffers[layer] for part, buffers in parts.items() for layer in range(LAYERS)}


@contextlib.contextmanager
def attached(queue: Any, path: Path, name: str, device: str) -> Iterator[Any]:
    """Its conversation with an agent of its own, which has its memory."""
    from kvbridge.adapters.engine.client import EngineClient
    from kvbridge.adapters.engine.conversation import Conversation
    from kvbridge.adapters.sglang.pool import describe, moved

    memory = describe(queue, Shard(tp_rank=0, tp_size=1), model_name="pools", engine_id=name)
    with (
        agent(path, name, 90.0, device=device, slot_bytes=1 << 20) as running,
        Conversation(EngineClient(running.socket), memory, logging.getLogger(name)) as talk,
    ):
        if device == "cpu":
            moved(queue.token_to_kv_pool)
        assert talk.start(60.0), running.text()
        kinds = {"cpu": "shm_fd", "cuda:0": "cuda_ipc"}
        assert f"memory={kinds[device]}" in running.text()
        yield talk


def wait_end(*talks: Any) -> list[Any]:
    """The end of the one thing that each has open."""
    ended: list[Any] = [None] * len(talks)
    limit = time.monotonic() + ANSWER_S
    while None in ended:
        assert time.monotonic() < limit, ended
        for i, talk in enumerate(talks):
            ended[i] = next(iter(talk.turn()), ended[i])
        time.sleep(0.001)
    return ended


def as_bytes(rows: torch.Tensor) -> Any:
    return rows.contiguous().view(torch.uint8).cpu().numpy()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["heads", "latent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_cross_from_page_16_to_page_64(tmp_path: Path, device: str, kind: str, dtype: torch.dtype) -> None:
    sender, receiver = queue_of(kind, 16, torch.bfloat16, device), queue_of(kind, 64, dtype, device)
    pages = {page: torch.randperm(SLOTS // page)[: -(-TOKENS // page)].tolist() for page in (16, 64)}
    slots = {
        page: torch.tensor([table[i // page] * page + i % page for i in range(TOKENS)], device=device)
        for page, table in pages.items()
    }
    before, after = tensors(sender), tensors(receiver)
    rows = {key: torch.randn(TOKENS, *into.shape[1:], device=device).to(into.dtype) for key, into in before.items()}
    for into in after.values():
        into.view(torch.uint8).fill_(0x55)
    with (
        attached(sender, tmp_path, "sender", device) as given,
        attached(receiver, tmp_path, "receiver", device) as taken,
    ):
        if device != "cpu":
            torch.cuda._sleep(LATE_CYCLES)
        for key, into in before.items():
            into[slots[16]] = rows[key]
        pieces = {page: (Blocks(0, 0, tuple(table)),) for page, table in pages.items()}
        given.offer(
            Offer(
                number=given.new_number(),
                rendezvous="room",
                request="given",
                tokens=TOKENS,
                blocks=pieces[16],
                is_last=True,
                hold_s=60.0,
                fence=given.mark(),
            )
        )
        taken.want(
            Want(
                number=taken.new_number(),
                request="taken",
                rendezvous="room",
                sender=given.address,
                first_token=0,
                end_token=TOKENS,
                blocks=pieces[64],
                deadline_s=50.0,
                fence=taken.mark(),
            )
        )
        ends = wait_end(given, taken)
        assert all(each.is_good for each in ends), ends
    sent = SavedRows({key: as_bytes(values) for key, values in rows.items()}, "bf16").converted(DTYPES[str(dtype)])
    for key, into in after.items():
        assert (as_bytes(into[slots[64]]) == sent.rows[key]).all(), key
        others = torch.ones(into.shape[0], dtype=torch.bool, device=device)
        others[slots[64]] = False
        assert (into.view(torch.uint8)[others] == 0x55).all(), f"{key}: rows of nobody were written"
