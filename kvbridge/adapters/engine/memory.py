"""An engine rank's KV memory as it is attached: the pool that describes it and the storages that hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvbridge_proto.pool import Pool


@dataclass(frozen=True, slots=True)
class Memory:
    """`storages[i]` holds region i of the pool. They stay allocated until the agent has let go of them."""

    pool: Pool
    storages: tuple[torch.UntypedStorage, ...]

    @property
    def device(self) -> torch.device:
        """The device of all storages."""
        return self.storages[0].device
