"""How vLLM and SGLang both shard heads and store plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvbridge_proto.pool import CodecName

# Dtypes whose numbers are stored as they are; fp8 is under scales that the engine knows.
CODEC_OF: dict[torch.dtype, CodecName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads that this rank holds. With fewer heads than ranks, neighbouring ranks hold the same one."""

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, tp_rank: int, tp_size: int) -> Heads:
        """The heads of rank `tp_rank` by the rule of vLLM and SGLang (QKVParallelLinear)."""
        if total >= tp_size:
            return cls(tp_rank * (total // tp_size), total // tp_size, total)
        return cls(tp_rank // (tp_size // total), 1, total)
