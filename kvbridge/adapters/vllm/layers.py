"""The layers that own KV on a vLLM rank, with what vLLM says about each: its kind, widths, heads, number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from kvbridge_proto.pool import GroupKind, Layer, LayerKind, Model, Shard

from ...cache_kinds import INDEX_KEY, OPEN_4
from ...errors import OperatorError
from ..engine.codecs import INDEX_WIDTH
from ..engine.names import draft_name
from ..engine.records import WHOLE, Heads, State, model_record
from .backends import COMPRESSED, INDEX_KEYS, RING, check_backend, row_tokens, rows_of, spec_refusal
from .states import state_of
from .versions import is_split, pcp_size, transfer_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Which tokens a group of such layers keeps. A window that frees no blocks is in a FullAttentionSpec. A ring has no
# number of its own: those that the next row of several tokens will be made of (`_open_tokens`).
KINDS: dict[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "SlidingWindowMLASpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MambaSpec": "state",
    RING: "chunked",
}
LATENTS = ("MLAAttentionSpec", "SlidingWindowMLASpec", RING)  # without V, and the same on every rank
ROW_TOKENS = 128  # of DeepSeek V4's compressor that takes the tokens of no other row


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's tensor with what vLLM says about it. `layer` is its number in the model's record.

    Index keys, and what DeepSeek V4 keeps beside its windows, are layers of their own to vLLM. Here they are parts of
    the attention layer that they are for, whose name is then the `owner`.
    """

    name: str
    layer: int
    group: int
    tensor: torch.Tensor
    spec: Any
    attention: Any
    held: Heads
    said: str
    rope_width: int
    is_draft: bool = False
    owner: str = ""
    state: State | None = None
    open_tokens: int = 0  # of a ring: see `_open_tokens`

    @property
    def is_index(self) -> bool:
        return rows_of(self.attention) in INDEX_KEYS

    @property
    def is_beside(self) -> bool:
        return self.is_index or rows_of(self.attention) in COMPRESSED

    @property
    def part(self) -> str:
        """What its rows are, if there is no V."""
        rows = rows_of(self.attention)
        if rows == "compressor":
            return "index_compressor" if ".indexer." in self.name else rows
        return INDEX_KEY if self.is_index else rows if rows in COMPRESSED else "latent"

    @property
    def row_tokens(self) -> int:
        return max(1, int(row_tokens(self.spec)))

    @property
    def heads(self) -> int:
        return self.held.count

    @property
    def is_latent(self) -> bool:
        return type(self.spec).__name__ in LATENTS

    @property
    def quant_mode(self) -> str:
        return str(getattr(getattr(self.spec, "kv_quant_mode", None), "name", "NONE"))

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in a row of K and in a row of V; a latent has no V."""
        if self.is_index:
            return INDEX_WIDTH, 0
        key = int(self.spec.head_size)
        return key, 0 if self.is_latent else int(getattr(self.spec, "head_size_v", None) or key)

    @property
    def record(self) -> Layer:
        """What both engines must agree on: the model's own layer, whatever part of it this engine keeps."""
        if self.state is not None:
            return self.state.record
        sliding, chunk = (getattr(self.spec, n, None) or 0 for n in ("sliding_window", "attention_chunk_size"))
        kind: LayerKind = "mla" if self.is_latent else "sliding" if sliding else "chunked" if chunk else "full"
        return Layer(
            kind=kind,
            kv_heads=self.held.total,
            key_width=self.widths[0],
            value_width=self.widths[1],
            rope_width=self.rope_width,
            window=int(sliding or chunk),
        )


def members_of(
    kv_caches: Mapping[str, torch.Tensor], config: VllmConfig, cache: KVCacheConfig, shard: Shard
) -> list[KVLayer]:
    """The layers, in the order of the groups that travel. Raises OperatorError naming what we do not know.

    A kind that we do not know, of whatever layer, is named before what another layer's lacks.
    """
    layers = config.compilation_config.static_forward_context
    parallel = config.parallel_config
    rank = tp_rank_of(parallel, shard)
    owners, found = [], []
    for index, group in enumerate(transfer_groups(cache)):
        for name in group.layer_names:
            attention = layers[name]
            if getattr(attention, "kv_sharing_target_layer_name", None):
                continue  # reads another layer's KV
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
            _check(name, spec, attention, shard, pcp_size(parallel))
            owners.append((name, index, spec, attention))
    for name, index, spec, attention in owners:
        tensor = kv_caches[name]
        if not isinstance(tensor, torch.Tensor):
            raise OperatorError("shape_unknown", f"{name}: KV cache {type(tensor).__name__}, expected a tensor")
        is_latent = type(spec).__name__ in LATENTS
        state = state_of(name, spec, attention) if kind_of(spec) == "state" else None
        said = str(getattr(attention, "kv_cache_dtype", config.cache_config.cache_dtype))
        rope = _rope(attention, config) if is_latent else 0
        held = WHOLE if is_latent or state else _heads(name, spec, config, *rank)
        of_draft = is_draft(name, spec, config)
        tokens = _open_tokens(name, spec, layers) if is_ring(spec) else 0
        of_vllm = name, -1, index, tensor, spec, attention
        found.append(KVLayer(*of_vllm, held, said, rope, of_draft, state=state, open_tokens=tokens))
    return _numbered(found, config)


def _open_tokens(name: str, spec: Any, layers: Mapping[str, Any]) -> int:
    """How many tokens make a row of the cache that a ring is for: it is needed from the last multiple of these on.

    That of DeepSeek V4.1, "P.compressor.state_cache", is for the rows of the layer P.
    """
    tokens, ring = int(getattr(layers.get(name.rsplit(".", 2)[0]), "compress_ratio", 0)), int(spec.block_size)
    if tokens < 1 or ring % tokens:
        reason = f"{name}: a ring of {ring} tokens for rows of {tokens or 'unknown'}, which must divide it"
        raise OperatorError("layer_unsupported", f"{reason}; no setting of the engine helps")
    return tokens


def tp_rank_of(parallel: Any, shard: Shard) -> tuple[int, int]:
    """A rank's number among those that split heads, and how many these are."""
    size = shard.tp_size // pcp_size(parallel)
    return shard.tp_rank % size, size


def _heads(name: str, spec: Any, config: VllmConfig, tp_rank: int, tp_size: int) -> Heads:
    """The heads of a layer on this rank. Their total may differ between layers, and for drafts.

    A single head may be shared by several ranks: then the models' totals decide.
    """
    count = int(spec.num_kv_heads)
    if count > 1 or tp_size == 1:
        return Heads.of(count * tp_size, tp_rank, tp_size)
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    totals = {_total_heads(name, spec, model) for model in (config.model_config, draft) if model is not None}
    fitting = [heads for heads in (Heads.of(total, tp_rank, tp_size) for total in sorted(totals)) if heads.count == 1]
    if len(fitting) != 1:
        raise OperatorError(
            "heads_unknown",
            f"{name}: 1 KV head on each of {tp_size} tensor-parallel ranks, of {' or '.join(map(str, sorted(totals)))} "
            "in all as the models say; needs a tensor_parallel_size that shares no head between ranks",
        )
    return fitting[0]


def _total_heads(name: str, spec: Any, model: Any) -> int:
    """All KV heads of this layer, as the model's config says. Gemma 4's full layers have fewer than those with windows.

    MiMo V2 names those of its windows apart, and vLLM's record of layers does not (0.33).
    """
    from vllm.model_executor.models.utils import extract_layer_index

    windowed = getattr(getattr(model, "hf_text_config", None), "swa_num_key_value_heads", None)
    if windowed and getattr(spec, "sliding_window", None):
        return int(windowed)
    arch: Any = getattr(model, "model_arch_config", None)
    layer = extract_layer_index(name)
    if hasattr(arch, "per_layer_overrides") and layer < int(arch.total_num_hidden_layers):
        return int(arch[layer].total_num_kv_heads)
    return int(model.get_total_num_kv_heads())


def kind_of(spec: Any) -> GroupKind:
    """Which tokens a group with this spec keeps, as far as they are read again."""
    return "chunked" if open_rows(spec) == ROW_TOKENS else KINDS.get(type(one_of(spec)).__name__, "full")


def open_rows(spec: Any) -> int:
    """Of how many tokens, 4 or 128, DeepSeek V4 will make rows of what the group keeps. 0 for other groups.

    vLLM keeps the last 8 or 128 tokens. A prefix that its cache hands out ends between two rows of 128, so that nothing
    of these is read again; and of rows of 4 nothing but the last whole one.
    """
    one = one_of(spec)
    # A window of latents names the dtype that was asked for, and may be in fp32, too.
    if type(one).__name__ != "SlidingWindowMLASpec" or one.dtype != torch.float32 or one.cache_dtype_str is not None:
        return 0
    return {8: 4, ROW_TOKENS: ROW_TOKENS}.get(one.sliding_window, 0)


def is_ring(spec: Any) -> bool:
    """Whether a request has one block of this spec's group, for its life, with position p in row `p % block_size`."""
    return type(one_of(spec)).__name__ == RING


def is_never_cached(spec: Any) -> bool:
    """Whether vLLM's prefix cache leaves the group out: a ring, or a window that is computed again after a hit."""
    return not getattr(spec, "prefix_cacheable", True)


def has_unequal_rows(specs: Iterable[Any]) -> bool:
    """Whether vLLM's prefix cache looks for rows of all tokens by several specs: it may have more of the first's."""
    full = [each for each in specs if kind_of(each) == "full" and not is_never_cached(each)]
    return any(each != full[0] for each in full[1:])


def window_of(spec: Any) -> int:
    """Tokens that this spec's group keeps, 0 for all: the model's window, plus what drafts need before it (0.32).

    Of a ring all that it may hold; its pool says how many of these are needed.
    """
    if is_ring(spec):
        return int(spec.block_size)
    if rows := open_rows(spec):
        return {4: OPEN_4}.get(rows, rows)
    one, name = one_of(spec), {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.get(kind_of(spec))
    return int(getattr(one, name)) + int(getattr(one, "extra_retained_tokens", 0)) if name else 0


def span_of(spec: Any) -> int:
    """The window that vLLM itself keeps of what DeepSeek V4's rows will be made of, 0 for other groups."""
    return int(one_of(spec).sliding_window) if open_rows(spec) else 0


def one_of(spec: Any) -> Any:
    """One spec of a group. Its layers may have specs of their own, all of one kind."""
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


def model_of(members: list[KVLayer], config: VllmConfig, shard: Shard, name: str, weights: str, draft: str) -> Model:
    """`draft` is what the operator calls the draft model, "" for the last part of its path."""
    drafting: Any = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    drafts = {member.layer for member in members if member.is_draft and drafting is not None}
    if drafts and not draft:
        draft = draft_name(name, str(config.model_config.model), str(drafting.model))
    layers = {member.layer: member.record for member in members if not member.is_beside}
    sizes = {"depth": depth(config), "pp_size": shard.pp_size}
    return model_record(name, layers, **sizes, weights=weights, drafts=drafts, draft=draft)


def _check(name: str, spec: Any, attention: Any, shard: Shard, pcp: int) -> None:
    kind = type(spec).__name__
    if (error := spec_refusal(name, spec, rows_of(attention))) is not None:
        raise error
    if kind not in KINDS:
        raise OperatorError(
            "layer_unsupported",
            f"{name}: {kind}, of which kvbridge does not know which rows it keeps; known are {', '.join(KINDS)}",
        )
    if kind != "MambaSpec":
        check_backend(name, attention, kind in LATENTS)
    elif pcp > 1:  # vLLM does not start then (`check_attention_cp_compatibility`, 0.30 to 0.33)
        raise OperatorError(
            "context_parallel_unsupported",
            f"{name}: {kind}, prefill_context_parallel_size {pcp}: nothing says which of these ranks has the state; "
            "needs --prefill-context-parallel-size 1",
        )
    if shard.cp_size == 1:
        return
    why = "rows of several tokens" if rows_of(attention) in COMPRESSED else ""
    if is_split(spec) == (kind == "MambaSpec"):
        why = f"dcp_sharded {is_split(spec)}"
    if why:
        raise OperatorError(
            "context_parallel_unsupported",
            f"{name}: {kind}, {why}, decode_context_parallel_size {shard.cp_size}, so its ranks do not split this "
            "layer's tokens as kvbridge does; needs --decode-context-parallel-size 1",
        )


def _rope(attention: Any, config: VllmConfig) -> int:
    """How many numbers at the end of a latent row are the rotated key."""
    width = getattr(attention, "qk_rope_head_dim", None)
    return int(width or getattr(config.model_config.hf_text_config, "qk_rope_head_dim", None) or 0)


def depth(config: VllmConfig) -> int:
    """How many layers the model itself has, without drafts."""
    return int(config.model_config.hf_text_config.num_hidden_layers)


def is_draft(name: str, spec: Any, config: VllmConfig) -> bool:
    """Whether a layer is one of the draft model's. Only vLLM 0.33's specs say so, not those of all draft models.

    Modules of the model (MTP) and EAGLE heads are numbered on from the model's layers, or count from 0 again in a
    module "mtp" (Qwen3-Next, Qwen3.5, Nemotron 3). So does a draft model that is loaded as a whole, under a prefix.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    if getattr(config, "speculative_config", None) is None:
        return False
    is_said = bool(getattr(spec, "is_draft", False))
    is_apart = name.startswith("draft_model.") or "mtp" in name.split(".")
    return is_said or is_apart or extract_layer_index(name) >= depth(config)


def _numbered(members: list[KVLayer], config: VllmConfig) -> list[KVLayer]:
    """Each under vLLM's own number. A draft model that counts from 0 again gets the numbers after the model's, and so
    does a state in a layer of attention.

    What is beside an attention layer has that one's number: of "P.attn", or in DeepSeek V4 "P.swa_cache". It is in the
    same module P, or is P: "P.indexer.k_cache", "P.attn.index_cache", "P.indexer.compressor.state_cache".
    """
    from vllm.model_executor.models.utils import extract_layer_index

    seen: set[int] = set()
    found, again = [], []
    for member in sorted(members, key=lambda member: (member.is_draft, member.state is not None)):
        if member.is_beside:
            continue
        index = extract_layer_index(member.name)
        if member.state is not None and index in seen:  # beside attention, in one layer (Falcon-H1)
            index += depth(config)
        if index in seen or (member.is_draft and index < depth(config)):
            again.append(member)
        else:
            seen.add(index)
            found.append(replace(member, layer=index))
    first = max([*seen, depth(config) - 1]) + 1 if again else 0
    numbers = {member.name: member for member in found}
    numbers |= {member.name: replace(member, layer=first + place) for place, member in enumerate(again)}
    owners = {member.name.rpartition(".")[0]: member for member in numbers.values() if member.state is None}
    for member in members:
        if member.is_beside:
            modules = (member.name.rsplit(".", inner)[0] for inner in range(4))
            owner = next((owners[module] for module in modules if module in owners), None)
            if owner is None:
                raise OperatorError("layer_unsupported", f"{member.name}: {member.part}, and no attention layer beside")
            numbers[member.name] = replace(member, layer=owner.layer, owner=owner.name)
    return [numbers[member.name] for member in members]
