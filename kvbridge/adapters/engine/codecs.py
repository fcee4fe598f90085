"""How vLLM and SGLang both store plain numbers."""

from __future__ import annotations

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
