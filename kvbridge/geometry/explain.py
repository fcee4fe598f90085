"""What each change means for the people who run the engines, one sentence each. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvbridge_proto.pool import Codec, CodecName, Plane, Pool

from ..values import Value
from .compat import Difference, common_planes, form_of
from .layers import align, unfilled
from .wire import PLAIN, ROW_SCALED, base_name, is_rotated, is_same_row, is_same_scales, wire_codec


class Bound(Value):
    """The most by which a number x may be off after conversion to 8 bits with scale s, and where it saturates."""

    off_by: str
    up_to: str


BOUNDS: dict[CodecName, Bound] = {
    "fp8_e4m3": Bound("|x|/16 + s/1024", "448 s"),
    "fp8_e5m2": Bound("|x|/8 + s/131072", "57344 s"),
    "int8": Bound("s/2", "127 s"),
}


def sentence(change: Difference, sender: Pool, receiver: Pool) -> str:
    """What happens because of one of the `changes` between two pools."""
    words = WORDS[change.field]
    return words if isinstance(words, str) else words(sender, receiver)


def _cp_size(sender: Pool, receiver: Pool) -> str:
    ranks = sender.shard.cp_size
    if ranks == 1:
        return f"tokens are picked out at the sender: 1/{receiver.shard.cp_size} of them for each rank of the receiver"
    return f"a rank of the receiver takes the tokens that it keeps from each rank of the sender (1/{ranks} of all)"


def _kind(sender: Pool, receiver: Pool) -> str:
    windows = sorted({group.window for group in receiver.groups if group.window})
    return f"only the last {' or '.join(map(str, windows))} tokens of these layers travel"


def _layers(sender: Pool, receiver: Pool) -> str:
    if missing := unfilled((align(sender, receiver),), receiver):
        those = ", ".join(map(str, missing))
        return f"the sender lacks layers of the receiver's draft model ({those}): the prompt's rows there are zeros"
    return "layers that the receiver does not have stay where they are"


def _codec(sender: Pool, receiver: Pool) -> str:
    ours, theirs = _first(sender, receiver, lambda one, other: form_of(one) != form_of(other))
    wire = _wire(ours.codec, theirs.codec, is_rotated(ours.part) != is_rotated(theirs.part))
    verb = "converted" if PLAIN.get(base_name(theirs.codec), 1) > 1 else "quantized"
    side = "sender" if is_same_row(wire, theirs.codec) else "receiver"
    if not is_same_row(wire, ours.codec) and side == "receiver":
        side = "sender and at the receiver"
    crossing = f"{wire.row_bytes} bytes of a row cross, {ours.codec.row_bytes} there and {theirs.codec.row_bytes} here"
    return f"rows are {verb} at the {side}; {crossing}{_error(theirs.codec)}"


def _wire(sender: Codec, receiver: Codec, rotates: bool) -> Codec:
    """The codec of a row on its way. A latent's tiles and rope are together as wide as the plain side's row."""
    if "fp8_ds_mla" in (sender.name, receiver.name):
        return receiver if sender.name == "fp8_ds_mla" else sender
    return wire_codec(sender, 0, receiver, 0, 1, rotates)


def _scales(sender: Pool, receiver: Pool) -> str:
    _, theirs = _first(sender, receiver, lambda one, other: not is_same_scales(one.codec.scales, other.codec.scales))
    return f"requantized to the receiver's scales{_error(theirs.codec)}"


def _rotation(sender: Pool, receiver: Pool) -> str:
    ours, theirs = _first(sender, receiver, lambda one, other: is_rotated(one.part) != is_rotated(other.part))
    wire = wire_codec(ours.codec, 0, theirs.codec, 0, 1, rotates=True)
    crossing = f"{wire.row_bytes} bytes of a row cross, {ours.codec.row_bytes} there and {theirs.codec.row_bytes} here"
    return f"rows are multiplied by a Hadamard matrix at the receiver; {crossing}{_error(theirs.codec)}"


def _scale_codec(sender: Pool, receiver: Pool) -> str:
    _, theirs = _first(sender, receiver, lambda one, other: one.codec.scale_codec != other.codec.scale_codec)
    return f"rows get scales of the receiver's form{_error(theirs.codec)}"


def _error(codec: Codec) -> str:
    bound = BOUNDS.get(base_name(codec))
    own = ", with the s of each row" if codec.name in ROW_SCALED else ""
    return f"; off by at most {bound.off_by}, saturating at {bound.up_to}{own}" if bound else ""


def _first(sender: Pool, receiver: Pool, is_other: Callable[[Plane, Plane], bool]) -> tuple[Plane, Plane]:
    """The first planes for which `is_other` is true."""
    return next(pair for pair in common_planes(align(sender, receiver), receiver) if is_other(*pair))


WORDS: dict[str, str | Callable[[Pool, Pool], str]] = {
    "tp_size": "each rank of the receiver takes its heads from the ranks that hold them",
    "pp_size": "each rank of the receiver takes its layers from the ranks that hold them",
    "cp_size": _cp_size,
    "cp_interleave": "a rank of the receiver takes from each rank of the sender the tokens that both keep",
    "kind": _kind,
    "block_tokens": "tokens get new places in the receiver's blocks; whole rows travel, not blocks",
    "codec": _codec,
    "scale_codec": _scale_codec,
    "rotation": _rotation,
    "scores": "the receiver's engine adds the model's weight to scores that come without it, or takes it off",
    "scales": _scales,
    "layout": "rows are gathered in the sender's order and scattered in the receiver's",
    "layers": _layers,
}
