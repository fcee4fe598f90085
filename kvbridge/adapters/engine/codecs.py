"""What both engines' adapters, and plans, say of numbers that are not plain. Pure."""

from __future__ import annotations

from kvbridge_proto.pool import HALVES, SCALE_BLOCK, Codec, CodecName

# Each (head, token) row has a scale of its own, stored behind it.
CODEC_PER_TOKEN_HEAD: dict[str, CodecName] = {
    "int8_per_token_head": "int8_row_scale",
    "fp8_per_token_head": "fp8_row_scale",
    "int4_per_token_head": "int4_row_scale",
}
# By an engine's --kv-cache-dtype: rows of K and V with a scale for every few numbers, behind them or in a tensor apart.
BLOCK_SCALED: dict[str, dict[str, CodecName]] = {
    "vllm": {"nvfp4": "nvfp4", "nvfp4_4over6": "nvfp4"},
    "sglang": {"mxfp8": "mxfp8_e4m3", "nvfp4": "nvfp4", "fp4_mx_block16": "fp4_mx_block16"},
}
# Index keys of sparse attention beside latents: fp8 numbers, and for each key one scale.
INDEX_WIDTH, INDEX_SCALE_BYTES = 128, 4
INDEX_KEYS = Codec(
    name="fp8_row_scale", width=INDEX_WIDTH, element_bytes=1, row_bytes=INDEX_WIDTH, scale_codec="pow2_fp32"
)
INDEX_SCALES = Codec(name="pow2_fp32", width=1, element_bytes=INDEX_SCALE_BYTES, row_bytes=INDEX_SCALE_BYTES)

# DeepSeek V4's latents: 448 fp8 and 64 bf16 numbers. Behind all rows of a block, the 7 exponents of each and a zero.
# Those of V4.1 are in other forms (`V4_FORMS`).
V4_ROWS = Codec(name="fp8_ds_v4", width=512, element_bytes=1, row_bytes=576)
V4_SCALES = Codec(name="opaque", width=8, element_bytes=1, row_bytes=8)


def scaled_rows(name: CodecName, width: int, scale: float = 1.0) -> tuple[Codec, Codec]:
    """Rows of `width` numbers with a scale for every few, and rows of these scales. NVFP4 has one more, for all."""
    row, scales = width // 2 if name in HALVES else width, width // SCALE_BLOCK[name]
    under = (scale,) if name == "nvfp4" else ()
    return (
        Codec(name=name, width=width, element_bytes=1, row_bytes=row, scales=under),
        Codec(name="opaque", width=scales, element_bytes=1, row_bytes=scales),
    )


# By the name of the form in SGLang (`KVLayout.encoding`): a latent's numbers and their scales.
V4_FORMS = {
    "v4": (V4_ROWS, V4_SCALES),
    "v41": scaled_rows("mxfp8_e4m3", V4_ROWS.width),
    "v41_fp4": scaled_rows("nvfp4", V4_ROWS.width),
}


def head_scaled_rows(dtype: str, width: int) -> tuple[Codec, Codec]:
    """Rows of such a `--kv-cache-dtype`, and rows of their scales. Those of 4 bits nobody reads as numbers."""
    name = CODEC_PER_TOKEN_HEAD[dtype]
    rows = Codec(name=name, width=width, element_bytes=1, row_bytes=width // 2 if name in HALVES else width)
    if name in HALVES:
        return rows, Codec(name="opaque", width=4, element_bytes=1, row_bytes=4)
    return rows, Codec(name="fp32", width=1, element_bytes=4, row_bytes=4)


def plain_rows(name: CodecName, width: int, element_bytes: int, scales: tuple[float, ...] = (1.0,)) -> Codec:
    """Rows of `width` numbers, side by side; those of fp8 are under one scale, or one for each head."""
    under = scales if name.startswith("fp8") else ()
    return Codec(name=name, width=width, element_bytes=element_bytes, row_bytes=width * element_bytes, scales=under)
