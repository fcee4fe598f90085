"""What the pools of both engines' adapters, and those of plans, say alike of a model and a rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

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


CHANNEL_HEADS = 64  # what has channels and no heads is cut among as many ranks at most, or as a divisor of this


@dataclass(frozen=True, slots=True)
class ConvPiece:
    """A piece of a state's convolution: so many channels for each of `heads` heads in all."""

    part: str
    heads: int
    channels: int


@dataclass(frozen=True, slots=True)
class State:
    """A layer's recurrent state, of all ranks: the last `rows` inputs of a short convolution, then the state proper.

    The convolution's channels are the pieces side by side, and each piece is cut among ranks by its own heads. The
    state proper has `heads` x `values` x `keys` numbers. Some have no convolution, and some no state proper: `heads` 0.
    `is_turned`: in memory keys precede values.
    """

    conv: tuple[ConvPiece, ...]
    rows: int
    heads: int
    values: int
    keys: int
    is_turned: bool = False

    @classmethod
    def gated_delta(cls, key_heads: int, heads: int, keys: int, values: int, kernel: int) -> State:
        conv = (
            ConvPiece("conv_q", key_heads, keys),
            ConvPiece("conv_k", key_heads, keys),
            ConvPiece("conv_v", heads, values),
        )
        return cls(conv, kernel - 1, heads, values, keys)

    @classmethod
    def mamba2(cls, heads: int, values: int, keys: int, groups: int, kernel: int) -> State:
        """B and C belong to groups of heads. If there is one group, every rank has them whole."""
        conv = ConvPiece("conv_x", heads, values), ConvPiece("conv_b", groups, keys), ConvPiece("conv_c", groups, keys)
        return cls(conv, kernel - 1, heads, values, keys)

    @classmethod
    def mamba1(cls, channels: int, keys: int, kernel: int) -> State:
        heads = gcd(channels, CHANNEL_HEADS)
        return cls((ConvPiece("conv_x", heads, channels // heads),), kernel - 1, heads, channels // heads, keys)

    @classmethod
    def short_conv(cls, channels: int, kernel: int) -> State:
        heads = gcd(channels, CHANNEL_HEADS)
        return cls((ConvPiece("conv_x", heads, channels // heads),), kernel - 1, 0, 0, 0)

    @classmethod
    def lightning(cls, heads: int, width: int) -> State:
        return cls((), 0, heads, width, width)

    @property
    def takes_drafts_back(self) -> bool:
        """Whether vLLM's kernels do: it pads the step of a fetched prompt's last token with as many as it drafts.

        Those of Mamba 1 (one piece, and heads) and of lightning keep what they are given (0.30 to 0.33).
        """
        return len(self.conv) == 3 or not self.heads

    @property
    def record(self) -> Layer:
        """Of the state proper, or else of the convolution."""
        if self.heads:
            return Layer(kind="state", kv_heads=self.heads, key_width=self.keys, value_width=self.values)
        return Layer(kind="state", kv_heads=self.conv[0].heads, key_width=self.conv[0].channels, value_width=0)

    def parts(self, tp_rank: int, tp_size: int) -> tuple[tuple[str, Heads, int], ...]:
        """Each part with the heads of this rank and the numbers of one head, the state proper last."""
        pieces = [(each.part, Heads.of(each.heads, tp_rank, tp_size), self.rows * each.channels) for each in self.conv]
        if self.heads:
            pieces.append(("state", Heads.of(self.heads, tp_rank, tp_size), self.values * self.keys))
        return tuple(pieces)

    def channels(self, tp_rank: int, tp_size: int) -> int:
        """Of the convolution on this rank."""
        return sum(Heads.of(each.heads, tp_rank, tp_size).count * each.channels for each in self.conv)


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
    """`layers` are this rank's, by number. Those of other pipeline ranks, and those without KV, are None.

    States beside attention in one layer have numbers after the model's layers, on every pipeline rank.
    """
    are_beside = any(layer.kind == "state" and number >= depth for number, layer in layers.items())
    count = max(max(layers) + 1, depth * (1 + are_beside) if pp_size > 1 else 0)
    found = tuple(sorted(drafts))
    return Model(
        name=name[:256],
        layers=tuple(layers.get(number) for number in range(count)),
        depth=depth,
        weights=weights,
        drafts=found,
        draft=draft[:256] if found else "",
    )
