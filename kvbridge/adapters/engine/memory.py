"""An engine rank's KV memory as it is attached: the pool that describes it and the storages that hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvbridge_proto.pool import CodecName, Pool

# Dtypes whose numbers are stored as they are; fp8 is under scales that the engine knows.
CODEC_OF: dict[torch.dtype, CodecName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """`storages[i]` holds region i of the pool. They stay allocated until the agent has let go of them."""

    pool: Pool
    storages: tuple[torch.UntypedStorage, ...]

    @property
    def device(self) -> torch.device:
        """The device of all storages."""
        return self.storages[0].device
