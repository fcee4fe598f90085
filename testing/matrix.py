"""What can be carried, as rows of cases. Only data: tests/unit/test_matrix.py carries them.

A row is one line of docs/convertible.md. All of its cases have the same verdict. If some can be carried and some
cannot, split the row.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbridge_proto.pool import CodecName, GroupKind

from kvbridge.geometry.wire import PLAIN, ROW_SCALED
from testing.oracle import More, Shape, mla
from testing.pools import EIGHT_BITS, ranks_of

BLOCK_SCALED: tuple[CodecName, ...] = ("mxfp8_e4m3", "nvfp4", "fp4_mx_block16", "mxfp4", "int4_row_scale")
LATENT: tuple[CodecName, ...] = ("bf16", "fp8_e4m3", "fp8_ds_mla")
PACKED_LATENT: dict[CodecName, int] = {"fp8_ds_v4": 512, "nvfp4_ds_mla": 576}
LAYOUTS = ("nhd", "packed_hnd", "cross_layer", "cpu_vec")
BLOCKS = (1, 16, 48)
RANKS = (1, 2, 4, 8)
SHARES = ((1, 1), (2, 1), (3, 16), (8, 3))
WINDOW = 20
HYBRID: tuple[GroupKind, ...] = ("full", "sliding")
STATE: tuple[GroupKind, ...] = ("full", "sliding", "state")
WINDOWS: tuple[tuple[GroupKind, ...], ...] = (("sliding",), HYBRID, ("chunked",))
END = 70
FIRSTS = (0, 5, 48)  # no prefix; inside a block; at a border of blocks of every size
# `of` of each head where there are 4.
SCALES: dict[str, dict[str, tuple[float, ...]] | None] = {
    "none": None,
    "plane": {"k": (0.5,), "v": (0.03,), "latent": (0.25,)},
    "head": {"k": (0.5, 1.0, 0.3, 7.0), "v": (0.02, 2.0, 0.25, 1.0), "latent": (0.25,)},
}


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens [first, end) from one engine to another."""

    sender: Shape
    receiver: Shape
    first: int = 0
    end: int = END
    slot_bytes: int = 1 << 14


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page."""

    name: str
    words: str
    cases: Callable[[], Iterable[Case]]
    to_every_rank: bool = False

    def ranks(self, case: Case, number: int) -> Sequence[int]:
        """The receiver's ranks to which case `number` is carried: all, or one that changes from case to case."""
        count = len(ranks_of(case.receiver))
        return range(count) if self.to_every_rank else [number % count]


GQA = Shape(key_width=32, value_width=32, layers=2, blocks=8)
LATENT_SHAPE = mla(layers=1, blocks=8)


def sized(shape: Shape) -> Shape:
    """The shape with blocks for END tokens and a few more."""
    blocks = -(-END // min([shape.block_tokens, *shape.group_tokens.values()])) + 3
    return replace(shape, blocks=blocks)


def case(sender: Shape, receiver: Shape, number: int = 0) -> Case:
    """A case. Its first token and slot size change from number to number."""
    first, slot_bytes = FIRSTS[number % 3], (1 << 14, 5000, 1 << 12, 1 << 17)[number % 4]
    return Case(sized(sender), sized(receiver), first, END, slot_bytes)


def product(shape: Shape, axis: str, values: Sequence[Any], **receiver: Any) -> Iterator[Case]:
    """Every value of an axis with every other, as sender and receiver."""
    for number, (ours, theirs) in enumerate(itertools.product(values, values)):
        one, other = ({axis: value} if axis else value for value in (ours, theirs))
        yield case(replace(shape, **one), replace(shape, **{**receiver, **other}), number)


def equal() -> Iterator[Case]:
    every: tuple[CodecName, ...] = (*PLAIN, "opaque")
    for codec in every:
        for number, layout in enumerate(LAYOUTS):
            shape = replace(GQA, codec=codec, layout=layout, scales=SCALES["head"])
            yield case(shape, shape, number)


def codecs() -> Iterator[Case]:
    for number, (ours, theirs) in enumerate(itertools.product(PLAIN, PLAIN)):
        layout, other = LAYOUTS[number % 4], LAYOUTS[number // 4 % 4]
        yield case(replace(GQA, codec=ours, layout=layout), replace(GQA, codec=theirs, layout=other), number)


def scales() -> Iterator[Case]:
    for number, (ours, theirs) in enumerate(itertools.product(itertools.product(EIGHT_BITS, SCALES), repeat=2)):
        if ours != theirs:
            sender, receiver = (replace(GQA, codec=codec, scales=SCALES[name]) for codec, name in (ours, theirs))
            yield case(sender, replace(receiver, tp_size=1 + number % 2), number)


def row_scales() -> Iterator[Case]:
    names = (*PLAIN, *ROW_SCALED)
    for number, (ours, theirs) in enumerate(itertools.product(names, names)):
        if ours != theirs and {ours, theirs} & set(ROW_SCALED):
            sender = replace(GQA, codec=ours, scales=SCALES["head"], layout=LAYOUTS[number % 3])
            receiver = replace(GQA, codec=theirs, scales=SCALES["plane"], block_tokens=32, tp_size=1 + number % 2)
            yield case(sender, receiver, number)


def equal_row_scales() -> Iterator[Case]:
    every: tuple[CodecName, ...] = (*ROW_SCALED, "int4_row_scale")
    for codec in every:
        for number, (layout, other, ranks) in enumerate(itertools.product(LAYOUTS[:3], LAYOUTS[:3], (1, 2))):
            sender = replace(GQA, codec=codec, layout=layout, tp_size=ranks)
            yield case(sender, replace(GQA, codec=codec, layout=other, block_tokens=BLOCKS[number % 3]), number)


def tensor_parallel() -> Iterator[Case]:
    for heads in (2, 7, 8):
        yield from product(
            replace(GQA, kv_heads=heads, key_width=16), "tp_size", RANKS, layout="packed", value_width=32
        )


def pipelines() -> Iterator[Case]:
    splits = [{"pp_size": len(each), "pp_layers": each} for each in ((5,), (2, 3), (1, 3, 1), (3, 1, 1))]
    yield from product(replace(GQA, layers=5, layout="cross_layer"), "", splits, layout="nhd", tp_size=2)


def prefixes() -> Iterator[Case]:
    for number, (first, ours, theirs) in enumerate(itertools.product((0, 1, 15, 16, 47, 48, 69), BLOCKS, BLOCKS)):
        sender, receiver = replace(GQA, block_tokens=ours), replace(GQA, block_tokens=theirs)
        yield replace(case(sender, receiver, number), first=first)


def latent_ranks() -> Iterator[Case]:
    yield from product(LATENT_SHAPE, "tp_size", RANKS, block_tokens=48)


def index_keys() -> Iterator[Case]:
    """Every page has all keys, then their scales, or there are no scales. Some layers have none.

    Latents beside them are converted as any others, index keys stay as they are.
    """
    scaled = More("index_key", width=128, codec="fp8_row_scale", page_tokens=16, layers=(0, 2))
    plain = replace(scaled, codec="bf16", page_tokens=0)
    for shape in (replace(LATENT_SHAPE, layers=3, more=(scaled,)), replace(GQA, layers=3, more=(plain,))):
        yield from product(shape, "tp_size", (1, 2, 8), block_tokens=48)
        yield from product(replace(shape, tp_size=2), "block_tokens", BLOCKS)
    beside = replace(LATENT_SHAPE, layers=3, more=(scaled,), scales=SCALES["plane"])
    for number, (ours, theirs) in enumerate(itertools.product(LATENT, LATENT)):
        yield case(replace(beside, codec=ours), replace(beside, codec=theirs, tp_size=2, block_tokens=48), number)


def other_index_keys() -> Iterator[Case]:
    """Scales of every form, and one side that rotates: to and from each other, and plain rows."""
    scaled = More("index_key", width=128, codec="fp8_row_scale", page_tokens=16, layers=(0, 2))
    kinds = [replace(scaled, scale_codec=form) for form in ("fp32", "pow2_fp32", "ue8m0_x4")]
    kinds.append(replace(scaled, codec="bf16", page_tokens=0))
    kinds += [replace(each, part="rotated_index_key") for each in kinds]
    for number, (ours, theirs) in enumerate(itertools.permutations(kinds, 2)):
        sender, receiver = (replace(LATENT_SHAPE, layers=3, more=(each,)) for each in (ours, theirs))
        yield case(sender, replace(receiver, block_tokens=BLOCKS[number % 3], tp_size=1 + number % 2), number)


def latents() -> Iterator[Case]:
    for share in ((1, 1), (8, 3)):
        for number, (ours, theirs) in enumerate(itertools.product(LATENT, LATENT)):
            sender = replace(LATENT_SHAPE, codec=ours, scales=SCALES["plane"], cp_size=share[0], cp_interleave=share[1])
            yield case(sender, replace(LATENT_SHAPE, codec=theirs, tp_size=2), number)
            yield case(replace(LATENT_SHAPE, codec=theirs, tp_size=2), sender, number)


def packed_latents() -> Iterator[Case]:
    for codec, width in PACKED_LATENT.items():
        shape = replace(LATENT_SHAPE, codec=codec, key_width=width)
        yield case(shape, shape)
        yield case(replace(shape, tp_size=2), replace(shape, block_tokens=48, cp_size=3, cp_interleave=16), 1)


def other_packed_latents() -> Iterator[Case]:
    for codec, width in PACKED_LATENT.items():
        shape = replace(LATENT_SHAPE, codec=codec, key_width=width)
        yield case(shape, replace(shape, codec="bf16"))
        yield case(replace(shape, codec="bf16"), shape)


def shares(shape: Shape) -> Iterator[Case]:
    sizes = [{"cp_size": size, "cp_interleave": interleave} for size, interleave in SHARES]
    yield from product(shape, "", sizes, block_tokens=48)
    yield from product(replace(shape, tp_size=2), "", sizes)


def windows() -> Iterator[Case]:
    every: tuple[tuple[GroupKind, ...], ...] = (("sliding",), ("chunked",), HYBRID, ("chunked", "full"))
    for number, kinds in enumerate(every):
        for block in BLOCKS:
            receiver = replace(GQA, layers=4, block_tokens=block, kinds=kinds, window=WINDOW)
            yield case(replace(receiver, block_tokens=48), receiver, number + block)
            yield case(replace(GQA, layers=4, tp_size=2), receiver, number + block)  # the receiver keeps all tokens
            wide = replace(receiver, group_tokens={"sliding": 32, "chunked": 8})
            yield case(replace(receiver, block_tokens=16, cp_size=2), wide, number + block)
            yield case(
                replace(receiver, block_tokens=96, cp_interleave=16), replace(receiver, cp_size=2), number + block
            )


def odd_windows() -> Iterator[Case]:
    for kinds in WINDOWS:
        shape = replace(GQA, kinds=kinds, window=WINDOW)
        for receiver in (replace(shape, block_tokens=48), replace(shape, cp_size=3)):
            yield replace(case(shape, receiver), end=40)  # from the middle of a block of the receiver on


def states() -> Iterator[Case]:
    whole = replace(GQA, layers=3, kinds=STATE, window=WINDOW)
    for ranks, block in itertools.product((1, 2), BLOCKS):
        kept: tuple[CodecName, ...] = ("bf16", "fp32")
        for number, codec in enumerate(kept):
            receiver = replace(whole, tp_size=ranks, codec=codec, block_tokens=block)
            yield case(replace(receiver, codec="bf16", block_tokens=48, group_tokens={"state": 64}), receiver, number)
    for ours, theirs in itertools.permutations((1, 2, 4), 2):
        yield case(replace(whole, tp_size=ours), replace(whole, tp_size=theirs, layout="hnd"))
    beside = replace(whole, kinds=("full", "state"))
    for number, (one, other) in enumerate(itertools.permutations(SHARES, 2)):
        sender, receiver = (replace(beside, cp_size=size, cp_interleave=run) for size, run in (one, other))
        yield case(replace(sender, tp_size=1 + number % 2), replace(receiver, codec="fp32"), number)


def block_scales() -> Iterator[Case]:
    for codec in BLOCK_SCALED:
        yield from product(replace(GQA, codec=codec, layout="packed_hnd"), "tp_size", (1, 2, 4), layout="nhd")


def other_block_scales() -> Iterator[Case]:
    for codec in BLOCK_SCALED:
        yield case(replace(GQA, codec=codec), GQA)
        yield case(GQA, replace(GQA, codec=codec))


def drafts() -> Iterator[Case]:
    yield case(replace(GQA, layers=3), replace(GQA, tp_size=2))
    yield case(replace(GQA, layers=3, layout="cross_layer", pp_size=2), GQA, 1)


def more_drafts() -> Iterator[Case]:
    """One draft layer and two, beside every layout, rows with scales, windows, other ranks and blocks."""
    every: tuple[CodecName, ...] = ("bf16", "fp8_e4m3", "fp8_row_scale", "int4_row_scale")
    for number, (codec, layout, ranks) in enumerate(itertools.product(every, LAYOUTS[:3], (1, 2))):
        sender = replace(GQA, codec=codec, layout=LAYOUTS[number % 3], block_tokens=BLOCKS[number % 3])
        receiver = replace(sender, layers=3 + number % 2, drafts=1 + number % 2, layout=layout, tp_size=ranks)
        yield case(sender, replace(receiver, block_tokens=BLOCKS[number // 3 % 3]), number)
    some = replace(GQA, layers=2, kinds=("sliding", "full"), window=WINDOW, block_tokens=48)
    yield case(some, replace(some, layers=4, drafts=2, block_tokens=16))
    yield case(some, replace(some, layers=4, drafts=2, cp_size=2, block_tokens=8), 1)
    yield case(replace(GQA, pp_size=2), replace(GQA, layers=3, drafts=1, cp_size=3, cp_interleave=16), 2)
    yield case(replace(GQA, layers=3, drafts=1), replace(GQA, layers=4, drafts=2), 1)  # more modules of the same draft
    for latent in LATENT:
        sender = replace(LATENT_SHAPE, codec=latent, scales=SCALES["plane"])
        yield case(sender, replace(sender, layers=2, drafts=1, block_tokens=48, tp_size=2), 2)


AXES: dict[str, Sequence[Any]] = {
    "heads": (1, 2, 4),
    "first": FIRSTS,
    "slot_bytes": (1 << 12, 1 << 15),
    **{
        f"{side}_{axis}": values
        for side in ("sender", "receiver")
        for axis, values in {
            "layout": LAYOUTS,
            "block_tokens": BLOCKS,
            "tp_size": (1, 2, 8),
            "split": ((4,), (1, 2, 1)),
            "codec": tuple(PLAIN),
            "scales": tuple(SCALES),
        }.items()
    },
}
ALL_AXES: dict[str, Sequence[Any]] = {
    **AXES,
    "kinds": (("full",), ("sliding",), HYBRID, STATE),
    **{f"{side}_share": SHARES for side in ("sender", "receiver")},
    **{f"{side}_codec": (*PLAIN, *ROW_SCALED) for side in ("sender", "receiver")},
}


def mixed(axes: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """Cases in which any two values of two axes meet at least once, if they can."""
    for chosen in pairwise(axes):
        kinds = chosen.get("kinds", ("full",))
        sides = []
        for side in ("sender", "receiver"):
            split, share = chosen[f"{side}_split"], chosen.get(f"{side}_share", (1, 1))
            scales = "plane" if chosen["heads"] != 4 else chosen[f"{side}_scales"]
            layout, codec = chosen[f"{side}_layout"], chosen[f"{side}_codec"]
            shape = replace(
                GQA,
                layers=4,
                kv_heads=chosen["heads"],
                kinds=kinds,
                window=WINDOW if "sliding" in kinds else 0,
                layout="hnd" if layout == "cpu_vec" and codec in ROW_SCALED else layout,
                block_tokens=chosen[f"{side}_block_tokens"],
                tp_size=chosen[f"{side}_tp_size"],
                pp_size=len(split),
                pp_layers=split,
                codec=codec,
                scales=SCALES[scales],
                cp_size=share[0],
                cp_interleave=share[1],
            )
            sides.append(shape)
        sender, receiver = sides
        if "sliding" in kinds:  # the sender's block, of all its ranks, is a multiple of the receiver's
            whole = math.lcm(sender.block_tokens * sender.cp_size, receiver.block_tokens * receiver.cp_size)
            sender = replace(sender, block_tokens=whole // sender.cp_size)
        yield Case(sized(sender), sized(receiver), chosen["first"], END, chosen["slot_bytes"])


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Choices of one value for each axis, such that any two values of two axes meet in one choice."""
    dice, names = random.Random(0), list(axes)
    missing = {
        (one, i, other, j)
        for one, other in itertools.combinations(names, 2)
        for i in range(len(axes[one]))
        for j in range(len(axes[other]))
    }
    chosen: list[dict[str, Any]] = []
    while missing:
        tries = []
        for one, i, other, j in dice.sample(sorted(missing), min(8, len(missing))):
            attempt = {name: dice.randrange(len(axes[name])) for name in names} | {one: i, other: j}
            tries.append((len(missing & _pairs(names, attempt)), attempt))
        best = max(tries, key=lambda each: each[0])[1]
        missing -= _pairs(names, best)
        chosen.append({name: axes[name][best[name]] for name in names})
    return chosen


def _pairs(names: Sequence[str], attempt: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
    return {(one, attempt[one], other, attempt[other]) for one, other in itertools.combinations(names, 2)}


ROWS = (
    Row("equal", "Equal pools, any layout and any dtype", equal),
    Row("layouts", "Any layout to any other", lambda: product(GQA, "layout", LAYOUTS)),
    Row("blocks", "Any block size to any other", lambda: product(GQA, "block_tokens", BLOCKS, layout="hnd")),
    Row("prefixes", "From any token on: what the receiver has in its prefix cache is not sent", prefixes),
    Row("tensor parallel", "Any tensor parallel sizes, heads repeated on some ranks or not", tensor_parallel, True),
    Row("pipelines", "Any pipeline parallel sizes, split evenly or not", pipelines),
    Row("codecs", "bf16, fp16, fp32, fp8 e4m3, fp8 e5m2 and int8, each to each", codecs),
    Row("scales", "fp8 and int8 under no scale, one for each layer or one for each head, each to each", scales),
    Row(
        "row scales", "Rows with a scale of their own (fp8, int8 per token and head) to and from all those", row_scales
    ),
    Row(
        "row scales of equal sides",
        "Rows with scales of their own (fp8, int8, int4) to the same, other layouts, blocks and ranks",
        equal_row_scales,
    ),
    Row(
        "block scales",
        "MXFP8, MXFP4, NVFP4, fp4_mx_block16 and int4 rows to the same dtype, any tensor parallel sizes",
        block_scales,
    ),
    Row(
        "other block scales",
        "MXFP8, MXFP4, NVFP4, fp4_mx_block16 or int4 rows to or from another dtype",
        other_block_scales,
    ),
    Row("latent ranks", "MLA latents, any tensor parallel sizes", latent_ranks, True),
    Row(
        "index keys",
        "Index keys of sparse attention, which every rank has whole, beside latents or K and V",
        index_keys,
        True,
    ),
    Row(
        "other index keys",
        "Index keys that only one side multiplies by a Hadamard matrix, or whose scales have another form",
        other_index_keys,
    ),
    Row("latents", "MLA latents in bf16, fp8 or fp8_ds_mla, each to each, with context parallel ranks", latents),
    Row("packed latents", "MLA latents of 584, 528 or 352 bytes a token to the same dtype", packed_latents),
    Row("other packed latents", "MLA latents of 584, 528 or 352 bytes a token to or from bf16", other_packed_latents),
    Row("context parallel", "Any context parallel sizes and interleaves, keys and values", lambda: shares(GQA), True),
    Row(
        "context parallel latents",
        "Any context parallel sizes and interleaves, latents",
        lambda: shares(LATENT_SHAPE),
        True,
    ),
    Row("windows", "Sliding and chunked windows, alone or beside full attention; from full attention too", windows),
    Row("odd windows", "A window on the sending side in blocks that are no multiple of the receiver's", odd_windows),
    Row(
        "lost windows",
        "A window on the sending side, all tokens on the receiving side",
        lambda: [case(replace(GQA, kinds=kinds, window=WINDOW), GQA) for kinds in WINDOWS],
    ),
    Row("states", "Recurrent states, any tensor parallel sizes, block sizes, layouts and dtypes", states, True),
    Row("drafts", "A sender with a draft model that the receiver does not have", drafts),
    Row("more drafts", "A receiver with a draft model that the sender does not have: its rows are zeros", more_drafts),
    Row(
        "more layers",
        "A receiver with a layer of the model itself that the sender does not have",
        lambda: [case(GQA, replace(GQA, layers=3)), case(GQA, replace(GQA, layers=4, drafts=1))],
    ),
    Row("other heads", "Models with other numbers of heads", lambda: [case(GQA, replace(GQA, kv_heads=8))]),
    Row("other widths", "Models with heads of other widths", lambda: [case(GQA, replace(GQA, key_width=64))]),
    Row(
        "anything at once",
        "All of layout, block, ranks, pipeline, dtype, scales and prefix at once",
        lambda: mixed(AXES),
    ),
    Row(
        "everything at once",
        "The same with row scales, windows, states and context parallel ranks",
        lambda: mixed(ALL_AXES),
    ),
)
