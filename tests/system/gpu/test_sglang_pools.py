"""SGLang's own KV pools, without a server: described, attached by real agents, and carried from page 16 to page 64.

On a GPU the rows are written after a long kernel, so that reading before the fence would show.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Offer, Want
from kvbridge_proto.pool import Shard

from demo.sglang_rows import DTYPES
from testing.agents import agent
from tests.support import index_keys
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
        from kvbridge.adapters.sglang.on_cpu import ENVIRONMENT, stand_in

        os.environ.update(ENVIRONMENT)
        stand_in()
    pytest.importorskip("sglang.srt.mem_cache.memory_pool", reason="needs SGLang", exc_type=ImportError)
    return str(request.param)


class Indexer(torch.nn.Module):
    """By its name: SGLang rotates keys where it is not fused."""

    def __init__(self, layer_id: int, is_fused: bool) -> None:
        super().__init__()
        self.layer_id, self.use_dsa_indexer_fusion = layer_id, is_fused


def queue_of(kind: str, page: int, dtype: torch.dtype, device: str, is_fused: bool = True) -> Any:
    """A scheduler's queue, as far as a description looks at it, with a real pool."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    common = {"page_size": page, "dtype": dtype, "layer_num": LAYERS, "device": device, "enable_memory_saver": False}
    if kind == "heads":
        pool = MHATokenToKVPool(SLOTS, head_num=HEADS, head_dim=WIDTH, **common)
    elif kind == "latent":
        pool = MLATokenToKVPool(SLOTS, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **common)
    else:
        index = {"index_head_dim": 128, "kv_cache_dim": LATENT + ROPE, "skip_topk_layers": [False, True, False]}
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device=device.partition(":")[0]))
        pool = DSATokenToKVPool(SLOTS, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **index, **common)
    text = SimpleNamespace(num_hidden_layers=LAYERS)
    config = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, hf_text_config=text)
    runner = SimpleNamespace(model=torch.nn.ModuleList(Indexer(layer, is_fused) for layer in range(LAYERS)))
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
        contextlib.closing(Conversation(EngineClient(running.socket), memory, logging.getLogger(name))) as talk,
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


def ask(given: Any, taken: Any, tables: Sequence[list[int]]) -> None:
    """For all tokens of a prompt, whose blocks these are."""
    ours, theirs = ((Blocks(0, 0, tuple(table)),) for table in tables)
    given.offer(
        Offer(
            number=given.new_number(),
            rendezvous="room",
            request="given",
            tokens=TOKENS,
            blocks=ours,
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
            blocks=theirs,
            deadline_s=50.0,
            fence=taken.mark(),
        )
    )


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
        ask(given, taken, (pages[16], pages[64]))
        ends = wait_end(given, taken)
        assert all(each.is_good for each in ends), ends
    sent = SavedRows({key: as_bytes(values) for key, values in rows.items()}, "bf16").converted(DTYPES[str(dtype)])
    for key, into in after.items():
        assert (as_bytes(into[slots[64]]) == sent.rows[key]).all(), key
        others = torch.ones(into.shape[0], dtype=torch.bool, device=device)
        others[slots[64]] = False
        assert (into.view(torch.uint8)[others] == 0x55).all(), f"{key}: rows of nobody were written"


def index_bytes(table: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in [pages, bytes] each token of a prompt has its key and scale: `_set_k_and_s_triton` in SGLang."""
    token = torch.arange(TOKENS, device=device)
    place = (token % 64)[:, None]
    keys, scales = (torch.arange(size, device=device) for size in (128, 4))
    within = torch.cat([place * 128 + keys, 64 * 128 + place * 4 + scales], 1)
    return torch.tensor(table, device=device)[token // 64][:, None], within


@pytest.mark.timeout(240)
def test_index_keys_cross_beside_latents_whether_a_side_rotates_them_or_not(tmp_path: Path, device: str) -> None:
    dtype, count = torch.bfloat16, -(-TOKENS // 64)
    sender, receiver = (queue_of("sparse", 64, dtype, device, is_fused=False) for _ in range(2))
    other = queue_of("sparse", 64, dtype, device, is_fused=True)
    tables = [torch.randperm(SLOTS // 64)[:count].tolist() for _ in range(2)]
    slots = [torch.tensor([table[i // 64] * 64 + i % 64 for i in range(TOKENS)], device=device) for table in tables]
    held = [each.token_to_kv_pool for each in (sender, receiver)]
    for pool in (*held, other.token_to_kv_pool):  # with the same, since the rest of a last page may come along
        for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
            buffer.view(torch.uint8).fill_(0x55)
    assert [len(buffer) for buffer in held[0].index_k_with_scale_buffer][1] == 0, "it uses another layer's choice"
    with (
        attached(sender, tmp_path, "sender", device) as given,
        attached(receiver, tmp_path, "receiver", device) as taken,
        attached(other, tmp_path, "other", device) as unlike,
    ):
        expected = [buffer.clone() for buffer in (*held[1].kv_buffer, *held[1].index_k_with_scale_buffer)]
        for layer in range(LAYERS):
            latents = torch.randn(TOKENS, 1, LATENT + ROPE, device=device).to(dtype)
            held[0].kv_buffer[layer][slots[0]] = expected[layer][slots[1]] = latents
            if layer != 1:
                keys = torch.randint(0, 255, (TOKENS, 132), dtype=torch.uint8, device=device)
                keys[keys == 0x7F] = 0x33  # no NaN
                keys[:, 128:] = (torch.rand(TOKENS, 1, device=device) + 1e-3).view(torch.uint8)
                held[0].index_k_with_scale_buffer[layer][index_bytes(tables[0], device)] = keys
                expected[LAYERS + layer][index_bytes(tables[1], device)] = keys
        ask(given, taken, tables)
        ends = wait_end(given, taken)
        assert all(each.is_good for each in ends), ends
        for found, wanted in zip((*held[1].kv_buffer, *held[1].index_k_with_scale_buffer), expected, strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        ask(given, unlike, tables)
        ends = wait_end(given, unlike)
        assert all(each.is_good for each in ends), ends
    places = index_bytes(tables[1], device)
    for found, wanted in zip(other.token_to_kv_pool.index_k_with_scale_buffer, expected[LAYERS:], strict=True):
        if len(found):
            came = wanted[places].cpu().numpy()
            turned = index_keys.received(came[:, :128], came[:, 128:], "pow2_fp32", "pow2_fp32", rotates=True)
            assert np.array_equal(found[places].cpu().numpy(), np.concatenate(turned, axis=1))
            rest = torch.ones_like(found, dtype=torch.bool)
            rest[places] = False
            assert (found[rest] == 0x55).all(), "rows of nobody were written"


@pytest.mark.gpu
def test_sglang_rotates_as_the_tests_do() -> None:
    """By its own function, to which it gives bf16: each number is rounded to it."""
    indexer = pytest.importorskip(
        "sglang.srt.layers.attention.dsa.dsa_indexer", reason="needs SGLang", exc_type=ImportError
    )
    rows = torch.randn(4096, 128, device="cuda").bfloat16()
    found = indexer.rotate_activation(rows).cpu()
    assert torch.equal(found, torch.from_numpy(index_keys.rotated(rows.float().cpu().numpy())).bfloat16())
