"""What an engine's KV memory looks like: pools of planes, planes of strides. Pure.

A pool never names a layout. NHD, HND, cross-layer, K|V packed in a row, a column-major K cache, AMX tiles:
all are the same `Plane` record with other numbers. Units are bytes unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

MOST_COUNT = 1 << 40
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(max_length=256)]
PartName = Annotated[str, Meta(max_length=32)]

CodecName = Literal[
    "bf16",
    "fp16",
    "fp32",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8_row_scale",
    "fp8_row_scale",
    "int4_row_scale",
    "mxfp8_e4m3",
    "nvfp4",
    "fp4_mx_block16",
    "mxfp4",
    "fp8_ds_mla",
    "fp8_ds_v4",
    "nvfp4_ds_mla",
    "pow2_fp32",
    "ue8m0_x4",
    "opaque",
]


class Form(NamedTuple):
    """What a codec's rows are. Rows that are neither plain nor `numbers` with a scale are copied, never converted.

    `element_bytes`: of one number, or of what the element axis of a packed row counts. `is_plain`: a number for each
    element, with one scale at most for the plane or for each head; any plain codec can become any other. `numbers`: of
    a row with one scale beside it, the plain codec of its numbers. `scale_block`: a scale of one byte for so many
    numbers. `has_scale_rows`: its scales are rows of another plane, part `<part>_scale`. `is_halved`: two numbers in a
    byte. `is_plane_scaled`: it may have scales of the plane, too. `row_bytes`: of a row that has all it needs or is
    packed otherwise, and its `width` if only one is known. `is_power`: it is itself the codec of a row's scale, a power
    of two.
    """

    element_bytes: int = 1
    is_plain: bool = False
    numbers: CodecName | None = None
    scale_block: int = 0
    has_scale_rows: bool = False
    is_halved: bool = False
    is_plane_scaled: bool = False
    row_bytes: int = 0
    width: int = 0
    is_power: bool = False


CODECS: dict[CodecName, Form] = {
    "bf16": Form(2, is_plain=True),
    "fp16": Form(2, is_plain=True),
    "fp32": Form(4, is_plain=True),
    "fp8_e4m3": Form(is_plain=True, is_plane_scaled=True),
    "fp8_e5m2": Form(is_plain=True, is_plane_scaled=True),
    "int8": Form(is_plain=True, is_plane_scaled=True),
    "int8_row_scale": Form(numbers="int8", has_scale_rows=True),
    "fp8_row_scale": Form(numbers="fp8_e4m3", has_scale_rows=True),
    "int4_row_scale": Form(has_scale_rows=True, is_halved=True),
    "mxfp8_e4m3": Form(scale_block=32, has_scale_rows=True),
    "nvfp4": Form(scale_block=16, has_scale_rows=True, is_halved=True, is_plane_scaled=True),  # equal on both sides
    "fp4_mx_block16": Form(scale_block=16, has_scale_rows=True, is_halved=True),
    "mxfp4": Form(scale_block=32, has_scale_rows=True, is_halved=True),
    "fp8_ds_mla": Form(row_bytes=656, width=576),  # cut into two codecs, and so converted: geometry/latent_parts.py
    "fp8_ds_v4": Form(row_bytes=576, has_scale_rows=True),
    "nvfp4_ds_mla": Form(row_bytes=352),
    # Called so it is any fp32 where SGLang's fused writer made it: rows are converted by value, never by looking at
    # exponents alone. We write powers of two.
    "pow2_fp32": Form(4, is_power=True),
    "ue8m0_x4": Form(4, is_power=True),
    "opaque": Form(),
}
SCALE_BLOCK = {name: form.scale_block for name, form in CODECS.items() if form.scale_block}
HALVES = tuple(name for name, form in CODECS.items() if form.is_halved)
LayerKind = Literal["full", "sliding", "chunked", "mla", "state"]
GroupKind = Literal["full", "sliding", "chunked", "state"]
HandleKind = Literal["shm_fd", "cuda_ipc", "vmm_fd"]


class Step(Struct, frozen=True, array_like=True):
    """One step of an axis: `count` places, `stride` bytes apart."""

    count: Positive
    stride: Bytes


class Codec(Struct, frozen=True, kw_only=True):
    """How `width` numbers become one row of `row_bytes` bytes.

    scales: empty (none), one for the plane, or one per head of the plane; value = stored * scale.
    A codec whose scales lie in memory, one or more for each row (`*_row_scale`, `mxfp8_e4m3`, `mxfp4`,
    `fp4_mx_block16`, `nvfp4`, `fp8_ds_v4`), keeps them in another plane of the layer, part `<part>_scale`, and
    `row_bytes` excludes them; value = stored * scale in memory * scale. `mxfp8_e4m3` has an exponent for 32 numbers,
    `mxfp4` one for 32 of E2M1, `fp4_mx_block16` for 16, `nvfp4` an e4m3 number for 16. The plane of scales' rows have
    the codec `scale_codec`, where rows have one scale each (`fp8_row_scale`, `int8_row_scale`): fp32, or a power of two
    as an fp32 (`pow2_fp32`, read as any fp32) or as its exponent in each of four bytes (`ue8m0_x4`). In two codecs
    the row contains all it needs: `fp8_ds_mla` (656 bytes), `nvfp4_ds_mla` (352).
    `element_bytes` is the unit that the plane's element axis counts; a packed row (`fp8_ds_mla`, `opaque`) counts
    single bytes.
    """

    name: CodecName
    width: Positive
    element_bytes: Positive
    row_bytes: Positive
    scales: Annotated[tuple[float, ...], Meta(max_length=4096)] = ()
    scale_codec: CodecName = "fp32"


class Plane(Struct, frozen=True, kw_only=True):
    """One (layer, part) of a pool: a strided field of rows, block x token x head x element.

    The byte of (block b, token t, head h, element e) is at
    `offset + b*block_stride + at(token_axis, t) + h*head_stride + at(element_axis, e)` of the region.
    `at(axis, i)` splits i into digits by the steps' counts, the first step the most significant, and sums digit x
    stride. Most axes have one step, those of tiled caches two.
    The token axis counts to the group's `block_tokens / row_tokens`, the element axis to `row_bytes / element_bytes`.
    A row stands for `row_tokens` tokens, more than one in compressed caches. It is there once all of them are computed:
    of n tokens there are n // row_tokens rows.

    Each part has its own heads, width and codec. In a part `rotated_x`, rows of the part `x` are multiplied by the
    orthonormal Walsh-Hadamard matrix in Sylvester's order. In a part `raw_x` the second half of each row, its scores,
    lacks a weight of the model that depends on the token's place (DeepSeek V4's `ape`); in `x` it is added, if
    the model has one. The rank holds heads [first_head, first_head + heads) of `total_heads`; a part that every
    tensor-parallel rank holds whole has all of them on each.
    """

    layer: Annotated[int, Meta(ge=0, lt=1 << 16)]
    part: PartName
    group: Annotated[int, Meta(ge=0, lt=256)] = 0
    region: Annotated[int, Meta(ge=0, lt=4096)] = 0
    offset: Bytes
    block_stride: Bytes
    token_axis: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=4)]
    head_stride: Bytes
    element_axis: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=4)]
    first_head: Count
    heads: Positive
    total_heads: Positive
    codec: Codec
    name: Name = ""
    row_tokens: Positive = 1


class Group(Struct, frozen=True, kw_only=True):
    """Planes that share a block table. `window` is in tokens, 0 for none.

    `kind` says which tokens are kept; a layer of kind `mla` may have parts in several groups, but in no `state` one. In
    a `state` group a block is one row (a plane's `token_axis` counts one place) and the state after t tokens lies in
    entry `(t - 1) // block_tokens`. `begins_inside`: a window that is received may begin inside its first block, as
    the engine gives that block to no other request; else the whole block is needed. `never_cached`: the same, and no
    prefix cache of the engine has such rows: a window is received whole, whatever else the request has already.

    A ring of `block_tokens` tokens is one block, of which a request needs those since the last multiple of `window`
    (`chunked`, and `window` divides it): so it is named as the one entry that holds these.
    """

    kind: GroupKind
    block_tokens: Positive
    blocks: Positive
    window: Count = 0
    begins_inside: bool = False
    never_cached: bool = False


class Shard(Struct, frozen=True, kw_only=True):
    """Which rank of its engine this is. The planes say which layers and heads it holds, this says which tokens.

    With `cp_size` > 1, token i belongs to rank `(i // cp_interleave) % cp_size`. `tp_rank` counts all ranks of a
    pipeline stage, those of prefill context parallelism one after another (`pcp_rank * tp + tp_rank`); `cp_rank` and
    `cp_size` say only which tokens a rank holds.
    """

    tp_rank: Count = 0
    tp_size: Positive = 1
    pp_rank: Count = 0
    pp_size: Positive = 1
    cp_rank: Count = 0
    cp_size: Positive = 1
    cp_interleave: Positive = 1


class Layer(Struct, frozen=True, kw_only=True):
    """What must be the same on both sides for one layer; widths are in numbers, not bytes.

    Heads and widths are those of K and V, of the latent, or of the state. What other parts have, only their planes say.
    """

    kind: LayerKind
    kv_heads: Positive
    key_width: Positive
    value_width: Count
    rope_width: Count = 0
    window: Count = 0


class Model(Struct, frozen=True, kw_only=True):
    """The identity of a cache: two pools are of one model when these are equal.

    A layer is None if this rank does not know it because it is on another pipeline rank. `depth` counts the model's own
    layers, without those of a draft model, which only one side may have; 0 if it is not known. `weights` names the
    weights that rows are computed with (see Weights); "" if they may have changed since they were named, and then they
    equal no others. `drafts` are the layers of this rank that are the draft model's, and `draft` is its name: "" if it
    is not known, or there is none. A receiver's draft layer that no sender has is filled with zeros.
    """

    name: Name
    layers: Annotated[tuple[Layer | None, ...], Meta(max_length=4096)]
    depth: Count = 0
    weights: Name = "default"
    drafts: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 16)], ...], Meta(max_length=4096)] = ()
    draft: Name = ""


class Engine(Struct, frozen=True, kw_only=True):
    """Who attached. All ranks of an engine have the same `id`, and no other engine has it; the rest is for people.

    With data parallelism each replica is an engine, and `replica` its number.
    """

    kind: Name
    version: Name
    id: Name
    replica: Count = 0


class Region(Struct, frozen=True):
    """One contiguous allocation."""

    size_bytes: Positive


class Pool(Struct, frozen=True, kw_only=True):
    """All KV memory of one engine rank. It has no handles, so it may be sent to anyone.

    `finishes_scores`: of rows that come with scores in the other form (`raw_x` for `x`, or the reverse), the engine
    adds the weight itself, or takes it off, before it reads them: see `Done.other_scores`.
    """

    engine: Engine
    model: Model
    shard: Shard
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=256)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1, max_length=4096)]
    planes: Annotated[tuple[Plane, ...], Meta(min_length=1, max_length=65536)]
    finishes_scores: bool = False


class Handle(Struct, frozen=True, kw_only=True):
    """How to open one region; never leaves the host. fds come beside the message, in the order of `fd`.

    shm_fd: `fd` indexes the passed descriptors. cuda_ipc: `payload` is the 64-byte handle of an allocation on `device`
    (a UUID), which begins `offset` bytes before the region. vmm_fd: `fd` and `device`.
    """

    region: Annotated[int, Meta(ge=0, lt=4096)]
    kind: HandleKind
    device: Name = "cpu"
    payload: Annotated[bytes, Meta(max_length=4096)] = b""
    offset: Bytes = 0
    fd: Annotated[int, Meta(ge=0, lt=1024)] | None = None
