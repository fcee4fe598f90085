"""What index keys of one engine are in another: by the definitions of their writers, in numpy, without kvbridge.

A key is 128 numbers in fp8 and a scale in four bytes, whose form is "pow2_fp32" (an fp32; both engines read any) or
"ue8m0_x4" (its exponent in each byte). vLLM's writers round scales up to a power of two (`_fp8_ue8m0_quantize` in
vllm/models/deepseek_v32/common/kernels.py), and so does the one that SGLang falls back to (`act_quant` in
sglang/kernels/ops/quantization/act_quant_triton.py).
"""

from __future__ import annotations

import numpy as np

from tests.unit.kernels.slow_codecs import decode, encode

WIDTH, SCALE = 128, 4
LARGEST, LEAST = np.float32(448), np.float32(1e-4)


def rotated(rows: np.ndarray) -> np.ndarray:
    """fp32 [..., n] times the Walsh-Hadamard matrix: its element (i, j) is -1 for each bit that i and j have in common.

    Neighbours are added and subtracted first, each sum rounded: as `hadamard_mult_thread` in SGLang's
    fast_hadamard_transform_common.h.
    """
    return (_sums(rows) * np.float32(rows.shape[-1] ** -0.5)).astype(np.float32)


def _sums(rows: np.ndarray) -> np.ndarray:
    if rows.shape[-1] == 1:
        return rows
    found = np.empty_like(rows)
    found[..., 0::2] = _sums(rows[..., 0::2] + rows[..., 1::2])
    found[..., 1::2] = _sums(rows[..., 0::2] - rows[..., 1::2])
    return found


def numbers(keys: np.ndarray, scales: np.ndarray, form: str) -> np.ndarray:
    """fp32 [..., 128] of keys, bytes [..., 128], and their scales, bytes [..., 4]."""
    words = np.ascontiguousarray(scales).view("<u4")
    if form == "ue8m0_x4":
        assert (scales == scales[..., :1]).all(), "four equal exponents"
        words = (words & 0xFF) << 23
    return decode(keys.astype(np.int64), "fp8_e4m3") * words.view("<f4")


def stored(values: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Keys and their scales as bytes, as the receiving engine's writer makes them of fp32 [..., 128]."""
    amax = np.maximum(np.abs(values).max(axis=-1, keepdims=True), LEAST)
    scale = np.exp2(np.ceil(np.log2((amax / LARGEST).astype(np.float64)))).astype("<f4")
    words = scale.view("<u4")
    if form == "ue8m0_x4":
        words = words >> 23 << np.arange(0, 32, 8, dtype=np.uint32)
        words = words.sum(axis=-1, keepdims=True).astype("<u4")
    return encode(values, "fp8_e4m3", scale).astype(np.uint8), words.view(np.uint8)


def received(
    keys: np.ndarray, scales: np.ndarray, form: str, theirs: str, rotates: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and scales of a sender as a receiver of the form `theirs` must have them. `rotates`: only one side does."""
    if form == theirs and not rotates:
        return keys, scales
    values = numbers(keys, scales, form)
    return stored(rotated(values) if rotates else values, theirs)
