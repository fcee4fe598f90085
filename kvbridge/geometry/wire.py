"""Which codec crosses the wire, and when two codecs mean the same bytes. Pure."""

from __future__ import annotations

import msgspec
from kvbridge_proto.pool import CODECS, Codec, CodecName

from ..cache_kinds import COMPRESSOR, RAW, ROTATED

ATTENTION_PARTS = ("k", "v", "latent")  # the model says how wide they are
# What follows is from the table of codecs, where `Form` says what each means. Bytes per number, or per scale:
PLAIN = {name: form.element_bytes for name, form in CODECS.items() if form.is_plain}
POWERS = {name: form.element_bytes for name, form in CODECS.items() if form.is_power}
ROW_SCALED = {name: form.numbers for name, form in CODECS.items() if form.numbers}
# Codecs of a row's scale that rows are converted from and to.
ROW_SCALES: set[CodecName] = {"fp32", *POWERS}
PLANE_SCALED = [name for name, form in CODECS.items() if form.is_plane_scaled]
# The most numbers in a converted row with a scale of its own: the kernels hold all of them at once.
MOST_NUMBERS = 1024
SCALED_ROWS = {name for name, form in CODECS.items() if form.has_scale_rows}


def is_scale(part: str) -> bool:
    """True if a plane of this part holds the scales of another's rows."""
    return part.endswith("_scale")


def is_rotated(part: str) -> bool:
    """True if rows of this part are multiplied by a Hadamard matrix."""
    return part.startswith(ROTATED)


def is_raw(part: str) -> bool:
    """True if scores in rows of this part lack the weight of a token's place."""
    return part.startswith(RAW)


def has_scores(part: str) -> bool:
    """True if rows of this part have scores, in their second half."""
    return part.endswith(COMPRESSOR)


def base_part(part: str) -> str:
    """The name of a part whose rows are the same but for the rotation, or for the weight of scores."""
    return part.removeprefix(ROTATED).removeprefix(RAW)


def base_name(codec: Codec) -> CodecName:
    """The codec of a row's numbers, without its scale."""
    return ROW_SCALED.get(codec.name, codec.name)


def scales_of(codec: Codec, first_head: int, heads: int) -> tuple[float, ...]:
    """The scales of some heads of a plane: none, one for all, or one each."""
    scales = codec.scales
    return scales[first_head : first_head + heads] if len(scales) > 1 else scales


def is_same_row(ours: Codec, theirs: Codec) -> bool:
    """True if a row has the same form on both sides, and so have scales of its own; those of the plane aside."""
    return ours is theirs or (
        (ours.name, ours.width, ours.element_bytes, ours.row_bytes, ours.scale_codec)
        == (theirs.name, theirs.width, theirs.element_bytes, theirs.row_bytes, theirs.scale_codec)
    )


def can_convert(sender: Codec, receiver: Codec) -> bool:
    """True if rows of the sender can become rows of the receiver, scales included."""
    if is_same_row(sender, receiver):
        return True
    names = {sender.name, receiver.name}
    scaled = [codec for codec in (sender, receiver) if codec.name in ROW_SCALED]
    if sender.width != receiver.width or (scaled and sender.width > MOST_NUMBERS):
        return False
    if any(codec.scale_codec not in ROW_SCALES for codec in scaled):
        return False
    return names <= {*PLAIN, *ROW_SCALED} or ("fp8_ds_mla" in names and names <= {*PLAIN, "fp8_ds_mla"})


def can_rotate(sender: Codec, receiver: Codec) -> bool:
    """True if rows of the sender can become rotated rows of the receiver, or the reverse."""
    width = sender.width
    names = {sender.name, receiver.name}
    is_power = width & (width - 1) == 0 and width <= MOST_NUMBERS
    return is_power and names <= {*PLAIN, *ROW_SCALED} and can_convert(sender, receiver)


def is_same_scales(ours: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    """True if each head has the same scale on both sides, given for all heads or for each; none means 1."""
    return ours == theirs or len(set(ours or (1.0,)) | set(theirs or (1.0,))) == 1


def wire_codec(
    sender: Codec, sender_head: int, receiver: Codec, receiver_head: int, heads: int, rotates: bool = False
) -> Codec:
    """The narrower of two codecs (the sender's if equally wide) with the scales of just these heads.

    Rows with a scale each exist only in memory: if converted, they cross in the other side's codec, or in fp32 if both
    sides have such rows. Rows that are rotated at the receiver cross as the sender has them, or in fp32.
    """
    is_receivers = receiver.row_bytes < sender.row_bytes and not rotates
    if rotates or not is_same_row(sender, receiver):
        has_own = sender.name in ROW_SCALED, receiver.name in ROW_SCALED
        if all(has_own) or (rotates and has_own[0]):
            return Codec(name="fp32", width=sender.width, element_bytes=4, row_bytes=4 * sender.width)
        is_receivers = has_own[0] or (is_receivers and not has_own[1])
    codec, first_head = (receiver, receiver_head) if is_receivers else (sender, sender_head)
    if len(codec.scales) <= 1 or len(codec.scales) == heads:
        return codec
    return msgspec.structs.replace(codec, scales=scales_of(codec, first_head, heads))
