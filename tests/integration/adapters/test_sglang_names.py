"""What the adapter takes of SGLang, read from its own source: what moves fails here, not in somebody's server."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang import building, plugin
from kvbridge.adapters.sglang.stream_tokens import NEUTRAL

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("sglang")]

HERE = "kvbridge.adapters.sglang"
TREES = {path.stem: ast.parse(path.read_text()) for path in sorted(Path(plugin.__file__).parent.glob("*.py"))}
IMPORTED = [
    f"{node.module}.{name.name}"
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang.")
    for name in node.names
]
CLASSES = [
    f"{HERE}.{module}.{node.name}"
    for module, tree in TREES.items()
    for node in tree.body
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("CommonKV") for base in node.bases)
]
MANAGER = f"{HERE}.manager.KVBridgeManager"
OF_MANAGER = {"kept", "options", "owners", "queue", "rooms", "scores", "talk"}  # our own
OF_MANAGER |= {"weights_changes", "gives_up_at_once"}
# What else we read: of objects that SGLang hands us, and what we set for SGLang to read.
READ = {
    "sglang.srt.disaggregation.common.conn.CommonKVManager": "enable_deferred_decode_kv_release _kv_replica_factor",
    "sglang.srt.disaggregation.common.conn.CommonKVSender": "conclude_state trace_ctx",
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver": "conclude_state bootstrap_infos init_time",
    "sglang.srt.disaggregation.common.conn.PrefillServerInfo": (
        "attn_tp_size attn_cp_size dp_size pp_size page_size kv_cache_dtype follow_bootstrap_room target_tp_rank "
        "target_tp_ranks target_cp_ranks target_pp_ranks required_dst_info_num required_prefill_response_num"
    ),
    "sglang.srt.disaggregation.common.conn.AbortNotification": "room decode_ip decode_port",
    "sglang.srt.disaggregation.base.conn.KVArgs": "aux_data_ptrs aux_item_lens page_size state_types",
    "sglang.srt.disaggregation.base.conn.StateType": "SWA",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue": (
        "token_to_kv_pool draft_token_to_kv_pool scheduler metadata_buffers kv_manager"
    ),
    "sglang.srt.disaggregation.decode.DecodePreallocQueue": (
        "token_to_kv_pool draft_token_to_kv_pool scheduler metadata_buffers kv_manager transfer_queue "
        "_ensure_last_attempt_time _ensure_retry_interval tree_cache queue retracted_queue "
        "_prealloc_required_tokens _allocatable_token_budgets _required_alloc_tokens _pre_alloc_fill_len "
        "_required_admission_tokens"
    ),
    "sglang.srt.disaggregation.decode.DecodeTransferQueue": "enable_deferred_kv_release deferred_kv_release_timeout",
    "sglang.srt.mem_cache.memory_pool.KVCache": "page_size dtype layer_num start_layer device",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": (
        "k_buffer v_buffer head_num kv_cache_layout use_hnd quant_method _init_data_ptrs_and_strides"
    ),
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": "kv_buffer kv_lora_rank qk_rope_head_dim data_ptrs",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool": (
        "full_kv_pool swa_kv_pool full_layer_nums swa_layer_nums layers_mapping full_to_swa_index_mapping "
        "swa_req_ring_size page_size"
    ),
    "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator": "page_size translate_swa_indices_for_transfer",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool": "req_to_token",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache": (
        "req_to_token_pool token_to_kv_pool_allocator page_size match_prefix path_device_indices insert lock unlock "
        "evictable_size supports_prefix_sharing checkpoint"
    ),
    "sglang.srt.mem_cache.base_prefix_cache.MatchResult": "device_prefix_len last_device_node host_hit_length",
    "sglang.srt.mem_cache.base_prefix_cache.InsertParams": "key value prev_prefix_len",
    "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator": "size available_size alloc free",
    "sglang.srt.disaggregation.decode.DecodeRequest": "req waiting_for_input",
    "sglang.srt.managers.schedule_batch.ScheduleBatch": "reqs tree_cache",
    "sglang.srt.managers.schedule_batch.ReqKvInfo": "req_pool_idx cache_protected_len",
    "sglang.srt.layers.radix_attention.RadixAttention": (
        "layer_id k_scale v_scale k_scale_float v_scale_float sliding_window_size"
    ),
    "sglang.srt.disaggregation.utils.MetadataBuffers": (
        "output_ids cached_tokens output_token_logprobs_val output_token_logprobs_idx output_top_logprobs_val "
        "output_top_logprobs_idx bootstrap_room"
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager": "rid_to_state preferred_sampling_params",
    "sglang.srt.managers.tokenizer_manager.ReqState": "obj",
    "sglang.srt.managers.io_struct.GenerateReqInput": (
        "parallel_sample_num batch_size __getitem__ sampling_params stream return_prompt_token_ids"
    ),
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat": (
        "tokenizer_manager template_manager reasoning_parser _tool_call_parsing_active _encoding_output "
        "_requires_response_template_detokenization"
    ),
    "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest": "separate_reasoning input_ids",
    "sglang.srt.parser.template_manager.TemplateManager": "chat_template_name",
    "sglang.srt.managers.io_struct.TokenizedGenerateReqInput": "rid bootstrap_room",
    "sglang.srt.sampling.sampling_params.SamplingParams": "custom_params",
    "sglang.srt.configs.model_config.ModelConfig": "vocab_size is_hybrid_swa_compress attention_chunk_size",
    "sglang.srt.managers.scheduler.Scheduler": (
        "_sched_idled model_config tp_worker server_args weight_updater disagg_prefill_bootstrap_queue "
        "disagg_decode_prealloc_queue disagg_prefill_inflight_queue process_disagg_prefill_inflight_queue "
        "sliding_window_size token_to_kv_pool_allocator req_to_token_pool "
        "_engine_paused attn_tp_cpu_group flush_wrapper tree_cache enable_hisparse enable_hierarchical_cache "
        "running_batch decode_offload_manager"
    ),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": (
        "scheduler _session offload_tags is_fully_idle tp_cpu_group"
    ),
    "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper": (
        "_flush_cache _is_fully_idle _pending"
    ),
    "sglang.srt.managers.io_struct.FlushCacheReqInput": "timeout_s",
    "sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqInput": "tags",
    "sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqOutput": "rid",
    "sglang.srt.managers.schedule_batch.Req": (
        "origin_input_ids output_ids lora_id extra_key cache_salt input_embeds positional_embed_overrides "
        "token_type_ids multimodal_inputs disagg_kv_sender sampling_params return_logprob logprob return_sampling_mask "
        "kv bootstrap_room rid finished finished_reason beam_group last_node _compute_max_prefix_len"
    ),
    "sglang.srt.arg_groups.fields.disagg.Disagg": (
        "disaggregation_transfer_backend disaggregation_decode_enable_radix_cache"
    ),
    "sglang.srt.arg_groups.fields.parallel.Parallel": (
        "tp_rank pp_rank attn_tp_rank attn_tp_size attn_dp_rank attn_cp_rank attn_cp_size attn_dcp_size world_group "
        "tp_size pp_size dp_size nnodes enable_dp_attention dp_rank enable_kv_cache_sharding "
        "enable_dsa_cache_layer_split enable_cp_tp_group_sharing enable_dp_attention_local_control_broadcast"
    ),
}
BACKENDS = ("manager", "sender", "receiver", "bootstrap_server", "kvargs")
POLL = {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4}


def found(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{path}: SGLang has it no more, or somewhere else: {error}") from error


@cache
def names_of(kind: Any) -> frozenset[str]:
    """What SGLang's part of this class, or an object of it, has."""
    theirs = [base for base in kind.__mro__ if base.__module__.startswith("sglang")]
    said = {name for base in theirs for name in re.findall(r"\bself\.(\w+)", inspect.getsource(base))}
    return frozenset(said.union(*map(vars, theirs), *(getattr(base, "__annotations__", {}) for base in theirs)))


def theirs_of(path: str) -> Iterator[tuple[Any, str, ast.Call | None]]:
    """What this class of ours reads or calls of SGLang's class below it or of its manager, and how it is called."""
    kind, manager = found(path), found(MANAGER)
    (node,) = (each for each in TREES[path.split(".")[-2]].body if getattr(each, "name", "") == kind.__name__)
    calls = {id(call.func): call for call in ast.walk(node) if isinstance(call, ast.Call)}
    uses = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    ours = set(vars(kind)) | {use.attr for use in uses if isinstance(use.ctx, ast.Store)}
    for use in uses:
        of = ast.unparse(use.value)
        if of == "super()" or (of == "self" and use.attr not in ours):
            yield kind.__mro__[1], use.attr, calls.get(id(use))
        elif of in ("self.kv_mgr", "manager", "mgr") and use.attr not in OF_MANAGER | vars(manager).keys():
            yield manager.__mro__[1], use.attr, calls.get(id(use))


@pytest.mark.parametrize("path", IMPORTED)
def test_what_we_import_is_there(path: str) -> None:
    found(path)


@pytest.mark.parametrize("path", CLASSES)
def test_what_our_classes_use_of_theirs_is_there_and_takes_what_we_give(path: str) -> None:
    for base, name, call in theirs_of(path):
        assert name in names_of(base), f"{base.__name__}: has no {name} any more"
        if call is not None and inspect.isfunction(called := getattr(base, name, None)):
            given = {str(keyword.arg): None for keyword in call.keywords}
            inspect.signature(called).bind(None, *call.args, **given)


@pytest.mark.parametrize("path", CLASSES)
def test_what_we_override_is_there_and_is_called_as_we_expect(path: str) -> None:
    kind = found(path)
    replaced = [(name, ours, getattr(kind.__mro__[1], name, None)) for name, ours in vars(kind).items()]
    checked = 0
    for name, ours, theirs in replaced:
        if inspect.isfunction(ours) and inspect.isfunction(theirs):
            checked += 1
            taken, given = (list(inspect.signature(each).parameters) for each in (ours, theirs))
            assert taken == given, f"{kind.__name__}.{name}"
    assert checked > 3


@pytest.mark.parametrize("path", READ)
def test_what_we_read_of_an_object_is_there(path: str) -> None:
    assert not set(READ[path].split()) - names_of(found(path))


def test_polls_mean_what_they_meant() -> None:
    """Schedulers take the least of all ranks."""
    poll = found("sglang.srt.disaggregation.base.conn.KVPoll")
    assert {name: getattr(poll, name) for name in POLL} == POLL


def test_a_backend_is_made_of_these_classes() -> None:
    kinds = found("sglang.srt.disaggregation.utils.KVClassType")
    assert sorted(kind.value for kind in kinds) == sorted(BACKENDS)


def test_the_plugin_adds_its_name_and_hooks_what_takes_what_its_hooks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: dict[str, Any] = {}
    registry = found("sglang.srt.plugins.hook_registry.HookRegistry")
    assert list(inspect.signature(registry.register).parameters)[:3] == ["target", "hook", "hook_type"]
    monkeypatch.setattr(registry, "register", lambda target, hook, kind: hooked.update({target: hook}))
    choices = found("sglang.srt.arg_groups.choices.DISAGG_TRANSFER_BACKEND_CHOICES")
    plugin.register()
    plugin.register()
    backends = found("sglang.srt.disaggregation.utils.TransferBackend")
    assert choices.count(building.NAME) == 1
    assert backends(building.NAME) is backends["KVBRIDGE"] is backends.KVBRIDGE
    assert backends(building.NAME) in list(backends) and backends(building.NAME) != backends.NIXL
    assert len(hooked) == 34
    for target, hook in hooked.items():
        _, *taken = inspect.signature(hook).parameters.values()
        named = [each for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
        theirs = inspect.signature(found(target))
        theirs.bind_partial(*named)
        if named == taken:
            theirs.bind(*named)


def test_completions_give_every_penalty_themselves() -> None:
    """So none of `--preferred-sampling-params` counts for them: an answer may move."""
    asked = found("sglang.srt.entrypoints.openai.protocol.CompletionRequest")(model="m", prompt="a")
    serving = found("sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion")
    given = serving._build_sampling_params(None, asked)
    assert {name: given[name] for name in NEUTRAL} == NEUTRAL
