"""What the pools of both engines' adapters, and those of plans, say alike of a model and a rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvbridge_proto.pool import Layer, Model


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


WHOLE = Heads(0, 1, 1)  # of what every rank holds whole: latents and index keys


def model_record(
    name: str,
    layers: Mapping[int, Layer],
    *,
    depth: int,
    pp_size: int,
    weights: str = "default",
    drafts: Iterable[int] = (),
    draft: str = "",
) -> Model:
    """`layers` are this rank's, by number. Those of other pipeline ranks, and those without KV, are None."""
    count = max(max(layers) + 1, depth if pp_size > 1 else 0)
    found = tuple(sorted(drafts))
    return Model(
        name=name[:256],
        layers=tuple(layers.get(number) for number in range(count)),
        depth=depth,
        weights=weights,
        drafts=found,
        draft=draft[:256] if found else "",
    )
