"""Which KV heads a rank holds, by the rule that vLLM and SGLang share. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
