"""How vLLM's CPU attention lays K and V inside one (block, head) of N tokens and D elements. Pure.

The cache has shape [B, H, N, 2D], but the kernels treat each (block, head) as 2N x D numbers: first the K half, then
the V half (`CPUAttentionBackendImpl.forward`: view, then chunk along dim 2). The axes are from csrc/cpu of vLLM 0.32.0:
cpu_attn_vec.hpp, cpu_attn_vec16.hpp, cpu_attn_amx.hpp, cpu_attn_amx_fp8.hpp and cpu_attn_fp8.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.pool import Step

from ...errors import OperatorError

Axis = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Half:
    """K or V of one (block, head): where token t and element e lie, in bytes from the half's start."""

    tokens: Axis
    elements: Axis


def halves(isa: str, tokens: int, width: int, element_bytes: int) -> tuple[Half, Half]:
    """K and V for the instruction set that vLLM picked. Raises OperatorError for one we cannot describe."""
    match isa, element_bytes:
        case (("vec" | "vec16"), _):
            return _column_major_k(tokens, width, element_bytes)
        case "amx", (1 | 2):
            return _amx_tiles(tokens, width, element_bytes)
        case "amx_fp8", 2:
            return _amx_tiles(tokens, width, element_bytes)
        case "amx_fp8", 1:
            # Heads whose width is not a multiple of a 64-byte tile row use the plain AMX kernel.
            return _amx_fp8_tiles(tokens, width) if width % 64 == 0 else _amx_tiles(tokens, width, 1)
    raise OperatorError(
        "layout_unknown",
        f"isa: vLLM's CPU attention uses {isa!r} with {element_bytes}-byte elements, "
        "we can describe vec and vec16 (all), amx and amx_fp8 (bf16, fp8)",
    )


def _column_major_k(tokens: int, width: int, size: int) -> tuple[Half, Half]:
    k = Half((Step(tokens, size),), (Step(width, tokens * size),))
    v = Half((Step(tokens, width * size),), (Step(width, size),))
    return k, v


def _amx_tiles(tokens: int, width: int, size: int) -> tuple[Half, Half]:
    """K: groups of 16 tokens. In a group, the first two elements of all 16 tokens, then the next two, and so on.

    V: groups of 16 elements. In a group, two tokens with their elements interleaved, then the next two, and so on.
    fp8 has the same order with half the bytes.
    """
    pair = 2 * size
    k = Half(
        (Step(tokens // 16, 16 * width * size), Step(16, pair)),
        (Step(width // 2, 16 * pair), Step(2, size)),
    )
    v = Half(
        (Step(tokens // 2, 16 * pair), Step(2, size)),
        (Step(width // 16, 16 * tokens * size), Step(16, pair)),
    )
    return k, v


def _amx_fp8_tiles(tokens: int, width: int) -> tuple[Half, Half]:
    """Native fp8 tiles: groups of four instead of pairs, and K in slices of 64 elements."""
    k = Half(
        (Step(tokens // 16, 16 * width), Step(16, 4)),
        (Step(width // 64, 16 * 64), Step(16, 64), Step(4, 1)),
    )
    v = Half(
        (Step(tokens // 4, 64), Step(4, 1)),
        (Step(width // 16, 16 * tokens), Step(16, 4)),
    )
    return k, v
