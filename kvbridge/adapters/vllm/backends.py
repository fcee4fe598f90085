"""vLLM's attention backends: what kind of rows each writes, and where in vLLM's source that was read. Pure.

A name that is not here is refused: a tensor of the same shape may still hold its rows in another order. To carry
another backend, read its writer (`do_kv_cache_update`), add its line, and its case to
tests/integration/adapters/test_vllm_backends.py.

| rows | means |
|---|---|
| kv | [B, H, N, K|V]: a row of K and then a row of V in each cell |
| cpu | as cpu.py says |
| latent | [B, N, W]: one row a token, which the layer's kv_cache_dtype describes; every rank has it whole |
| compressed_latent | as latent, but a row stands for several tokens, which the spec's tokens_per_state says |
| compressor | [B, N, W] fp32: one row a token, of which such a row will be made; every rank has it whole |
| index_key | [B, N, 132] bytes: in each page of the kernel all keys of 128, then scales of 4; every rank has it whole |
| plain_index_key | [B, N, 128] numbers, all blocks one after another: one row a token; every rank has it whole |
| gated_delta | a page of bytes for each state: q, k and v of the convolution, then [heads, V, K] (states.py) |
| mamba2 | the same of x, B and C of the convolution, and [heads, P, S] |
| mamba1 | the same of x alone, and [channels, S] |
| short_conv | a convolution alone |
| lightning | [heads, D, D] alone |
| others | a kind that is not carried: adapters/engine/unsupported.py |

Sources are paths below vllm/ in 0.33.0, read there and in 0.32.0. `concat_and_cache_mla` is the writer of latents that
`MLAAttentionImpl.do_kv_cache_update` (v1/attention/backend.py:1108) calls; backends with `MLA` have no other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import KVBridgeError, OperatorError
from ..engine.unsupported import UNSUPPORTED, refusal


@dataclass(frozen=True, slots=True)
class RowWriter:
    """`source` is the file whose class writes the rows."""

    rows: str
    source: str


V1, MLA = "v1/attention/backends/", "v1/attention/backends/mla/"
BACKENDS: dict[str, RowWriter] = {
    # reshape_and_cache_flash, on the two halves of the last dimension
    "FLASH_ATTN": RowWriter("kv", f"{V1}flash_attn.py:1432"),
    "TRITON_ATTN": RowWriter("kv", f"{V1}triton_attn.py:798"),
    "FLASHINFER": RowWriter("kv", f"{V1}flashinfer.py:2806"),
    # Of models whose images see each other (Gemma): two backends in one, the first of which writes for both
    "TRITON_FLASH_ATTN": RowWriter("kv", f"{V1}triton_attn.py:798"),
    "TRITON_FLASHINFER": RowWriter("kv", f"{V1}triton_attn.py:798"),
    "FLEX_ATTENTION": RowWriter("kv", f"{V1}flex_attention.py:1221"),
    # triton_reshape_and_cache_flash_diffkv: V begins head_size elements after K, whatever its own width
    "FLASH_ATTN_DIFFKV": RowWriter("kv", f"{V1}flash_attn_diffkv.py:91"),
    "TRITON_ATTN_DIFFKV": RowWriter("kv", f"{V1}triton_attn_diffkv.py:128"),
    "CPU_ATTN": RowWriter("cpu", f"{V1}cpu_attn.py:472"),
    # concat_and_cache_mla
    "TRITON_MLA": RowWriter("latent", f"{MLA}triton_mla.py"),
    "FLASHMLA": RowWriter("latent", f"{MLA}flashmla.py"),
    "FLASH_ATTN_MLA": RowWriter("latent", f"{MLA}flashattn_mla.py"),
    "FLASHINFER_MLA": RowWriter("latent", f"{MLA}flashinfer_mla.py"),
    "CUTLASS_MLA": RowWriter("latent", f"{MLA}cutlass_mla.py"),
    "TOKENSPEED_MLA": RowWriter("latent", f"{MLA}tokenspeed_mla.py"),
    "FLASHMLA_SPARSE": RowWriter("latent", f"{MLA}flashmla_sparse.py"),
    "FLASH_ATTN_MLA_SPARSE": RowWriter("latent", f"{MLA}flashattn_mla_sparse.py"),
    "FLASH_ATTN_MLA_SPARSE_FA4": RowWriter("latent", f"{MLA}flashattn_mla_sparse.py"),
    "FLASHINFER_MLA_SPARSE": RowWriter("latent", f"{MLA}flashinfer_mla_sparse.py"),
    "FLASHINFER_MLA_SPARSE_SM90": RowWriter("latent", f"{MLA}flashinfer_mla_sparse_sm90.py"),
    "FLASHINFER_MLA_SPARSE_SM120": RowWriter("latent", f"{MLA}flashinfer_mla_sparse.py"),
    # concat_and_cache_mla_cpu and amx_mla_concat_and_cache: the same rows
    "CPU_MLA": RowWriter("latent", f"{MLA}cpu_mla.py:195"),
    "AMX_MLA": RowWriter("latent", f"{MLA}amx_mla.py:306"),
    # DeepSeek V4: 448 fp8 and 64 bf16 numbers, the scales of a block behind its rows; or plain rows. Of windows, and
    # of 4 or 128 tokens each; `_save_partial_states_kernel` writes what these will be made of, with the position's bias
    "DEEPSEEK_SPARSE_SWA": RowWriter("latent", "models/deepseek_v4/common/ops/cache_utils.py:44"),
    **dict.fromkeys(
        ("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "CPU_V4_MLA_SPARSE"),
        RowWriter("compressed_latent", "models/deepseek_v4/common/ops/fused_compress_quant_cache.py:180"),
    ),
    "CompressorBackend": RowWriter("compressor", "models/deepseek_v4/common/ops/save_partial_states.py:64"),
    **dict.fromkeys(
        ("DEEPSEEK_V4_INDEXER", "CPU_V4_INDEXER"),
        RowWriter("index_key", "models/deepseek_v4/common/ops/fused_compress_quant_cache.py:740"),
    ),
    # DeepSeek V4.1: the same, or 512 numbers under 16 exponents, or in NVFP4. What rows of 2 tokens will be made of is
    # in a ring, and its backend has the same name (`fused_save_compress_norm`)
    **dict.fromkeys(
        ("FLASHMLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHINFER_MLA_SPARSE_DSV41"),
        RowWriter("compressed_latent", "models/deepseek_v41/common/ops/fused_compress_quant_cache.py:221"),
    ),
    **dict.fromkeys(
        ("DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER"),
        RowWriter("index_key", "models/deepseek_v41/common/ops/indexer_k_store.py:29"),
    ),
    # indexer_k_quant_and_cache (csrc/libtorch_stable/cache_kernels.cu) and _fp8_quant_and_cache_write: key at byte
    # token * 128 of the page, scale at page tokens * 128 + token * 4
    "DEEPSEEK_V32_INDEXER": RowWriter("index_key", "models/deepseek_v32/common/kernels.py:81"),
    # fused_minimax_m3_qknorm_rope_kv_insert (csrc/libtorch_stable/fused_minimax_m3_qknorm_rope_kv_insert_kernel.cu):
    # K and V by the strides of the cache, V 128 numbers after K; index keys at slot * 128, whatever the strides. The
    # last two names choose a kernel that reads.
    "MINIMAX_M3_SPARSE": RowWriter("kv", "models/minimax_m3/common/sparse_attention.py"),
    "CUTLASS_MSA": RowWriter("kv", "models/minimax_m3/nvidia/sparse_attention_msa.py"),
    "TRITON_MSA": RowWriter("kv", "models/minimax_m3/nvidia/sparse_attention_msa.py"),
    "MINIMAX_M3_SPARSE_INDEXER": RowWriter("plain_index_key", "models/minimax_m3/common/indexer.py"),
    # States, which the layer's `kv_cache` splits by `get_state_shape`
    "GDN_ATTN": RowWriter("gated_delta", "model_executor/layers/mamba/gdn/base.py"),
    "KIMI_K3_KDA": RowWriter("gated_delta", "models/kimi_k3/nvidia/kda.py"),
    "MAMBA2_ATTN": RowWriter("mamba2", "model_executor/layers/mamba/mamba_mixer2.py"),
    "MAMBA1_ATTN": RowWriter("mamba1", "model_executor/layers/mamba/mamba_mixer.py"),
    "SHORT_CONV_ATTN": RowWriter("short_conv", "model_executor/layers/mamba/short_conv.py"),
    "LINEAR_ATTN": RowWriter("lightning", "model_executor/layers/mamba/linear/base.py"),
    "BAILING_LINEAR_ATTN": RowWriter("lightning", "model_executor/layers/mamba/linear/bailing_linear_attn.py"),
    "DOTS3_NOTE_PADDED_MLA_SPARSE": RowWriter("padded", "models/dots3_note/nvidia/attention.py"),
    "STEP5_CSA_SUMMARY": RowWriter("compressed", "models/step5/nvidia/sparse_summary_cache.py"),
    "KPOOL_TAIL": RowWriter("ring", "models/glm5next/nvidia/ops/kpool_compress.py:422"),
    "STEP5_CSA_TAIL_RING": RowWriter("ring", "models/step5/nvidia/csa_tail_ring.py"),
    "QWEN4_EXP_EXP_QSA_STATE": RowWriter("ring", "models/qwen4_exp/common/qsa_cache.py"),
    "INKLING_SCONV_SWA": RowWriter("state", "models/inkling/nvidia/sconv_swa_attn.py"),
    "TURBOQUANT": RowWriter("packed", f"{V1}turboquant_attn.py"),
    "ULTRAQUANT": RowWriter("packed", f"{V1}ultraquant_attn.py"),
}
INDEX_KEYS = ("index_key", "plain_index_key")
COMPRESSED = ("compressed_latent", "compressor")  # beside another cache of the same layer, as index keys are
# What a spec is alone, whatever its backend.
SPECS: dict[str, str] = {
    "CrossAttentionSpec": "cross",
    "SinkFullAttentionSpec": "sink",
}


RING = "CircularBufferSpec"


def backend_of(layer: Any) -> str:
    """vLLM's name for a layer's backend. A layer with a state has no attribute for it."""
    found = getattr(layer, "attn_backend", None)
    return str((layer.get_attn_backend() if found is None else found).get_name())


def rows_of(layer: Any) -> str:
    """What kind of rows a layer's backend writes; "" if it is not known."""
    found = BACKENDS.get(backend_of(layer))
    return found.rows if found else ""


def check_backend(name: str, layer: Any, is_latent: bool) -> None:
    """Raises OperatorError for rows that are not carried, or whose order we do not know."""
    backend, rows = backend_of(layer), rows_of(layer)
    if rows in UNSUPPORTED:
        raise refusal("layer_unsupported", "vllm", rows, f"{name}: attention backend {backend}")
    fitting = ("latent", *COMPRESSED, *INDEX_KEYS) if is_latent else ("kv", "cpu")
    if rows not in fitting:
        # Those in a model's own folder are no choice for another model.
        choices = {each: listed.rows for each, listed in BACKENDS.items() if listed.source.startswith(V1)}
        known = ", ".join(each for each, its_rows in choices.items() if its_rows in fitting)
        raise OperatorError(
            "backend_unsupported",
            f"{name}: attention backend {backend}, whose order of rows kvbridge does not know; "
            f"needs --attention-backend {known}",
        )
    if getattr(getattr(layer, "impl", None), "kv_scale_format", "") == "pow2_fp32":
        # FLASHINFER_MLA_SPARSE_SM120 for other models than GLM reads only the exponents of the scales in a row of
        # fp8_ds_mla. vLLM's own concat_and_cache_mla, SGLang and our conversions write scales with a mantissa.
        raise OperatorError(
            "scales_unknown",
            f"{name}: attention backend {backend} reads scales as powers of two, which those of the other side are not "
            "always; no setting of the engine helps",
        )


def row_tokens(spec: Any) -> Any:
    """How many tokens a row stands for. -1: all; a fraction: a token has several rows."""
    return getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))


def spec_refusal(name: str, spec: Any, rows: str) -> KVBridgeError | None:
    """Why a layer with this spec, whose backend writes `rows`, is not carried, if its spec says so."""
    kind = type(spec).__name__
    if kind in SPECS:
        return refusal("layer_unsupported", "vllm", SPECS[kind], f"{name}: {kind}")
    if kind == RING and rows != "compressor":
        return refusal("layer_unsupported", "vllm", "ring", f"{name}: {kind}")
    states = row_tokens(spec)
    if states not in (1, -1) and (rows not in ("compressed_latent", "index_key") or states != int(states)):
        return refusal("layer_unsupported", "vllm", "compressed", f"{name}: {kind} with tokens_per_state {states}")
    return None
