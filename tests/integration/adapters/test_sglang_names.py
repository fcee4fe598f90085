"""Every name in SGLang that the adapter uses: a name that moves fails here, not in somebody's server."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from demo.sglang_cpu import ENVIRONMENT, stand_in

pytestmark = pytest.mark.sglang

CONN = "sglang.srt.disaggregation.common.conn"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"
# What is called, replaced or hooked: with the parameters that we rely on, in order.
CALLED = {
    "sglang.srt.disaggregation.utils.get_kv_class": ["transfer_backend", "class_type"],
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": ["self"],
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender": ["self", "req"],
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": ["self"],
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata": ["self", "decode_req", "kv_indices"],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_contiguous_buf_infos": ["self"],
    f"{TOKENIZER}.TokenizerManager._handle_batch_request": ["self", "obj"],
    f"{TOKENIZER}.TokenizerManager._send_one_request": ["self", "tokenized_obj"],
    "sglang.srt.managers.io_struct.GenerateReqInput.__getitem__": ["self", "i"],
    "sglang.srt.runtime_context.get_disagg": [],
    f"{CONN}.CommonKVManager.__init__": ["self", "args", "disaggregation_mode", "server_args", "is_mla_backend"],
    f"{CONN}.CommonKVManager.update_status": ["self", "bootstrap_room", "status"],
    f"{CONN}.CommonKVManager.record_failure": ["self", "bootstrap_room", "failure_reason"],
    f"{CONN}.CommonKVManager.conclude_failure": ["self", "bootstrap_room", "failure_reason", "targets"],
    f"{CONN}.CommonKVManager.send_kv_status_message": [
        *("self", "targets", "bootstrap_room", "status", "failure_reason"),
    ],
    f"{CONN}.CommonKVManager.parse_kv_status_message": ["self", "msg"],
    f"{CONN}.CommonKVManager.apply_prefill_status": [
        *("self", "bootstrap_room", "status", "prefill_rank", "failure_reason"),
    ],
    f"{CONN}.CommonKVManager.is_abort_release_safe": ["self", "bootstrap_room", "required_acks"],
    f"{CONN}.CommonKVManager.try_ensure_parallel_info": ["self", "bootstrap_addr"],
    f"{CONN}.CommonKVManager._resolve_rank_mapping": ["self", "info"],
    f"{CONN}.CommonKVManager._register_topology_row": ["self", "url", "payload"],
    f"{CONN}.CommonKVManager.register_to_bootstrap": ["self"],
    f"{CONN}.CommonKVManager._connect": ["self", "endpoint", "is_ipv6"],
    f"{CONN}.CommonKVManager._send_multipart_locked": ["self", "endpoint", "parts", "is_ipv6"],
    f"{CONN}.CommonKVManager._start_heartbeat_checker_thread": ["self"],
    f"{CONN}.CommonKVSender.__init__": [
        *("self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank"),
    ],
    f"{CONN}.CommonKVSender.send": ["self", "kv_indices", "state_indices", "num_kv_tokens", "indices_event"],
    f"{CONN}.CommonKVSender.pop_decode_prefix_len": ["self"],
    f"{CONN}.CommonKVSender._prepare_send_indices": ["self", "kv_indices", "state_indices"],
    f"{CONN}.CommonKVSender._record_transfer_indices": ["self", "kv_indices", "state_indices"],
    f"{CONN}.CommonKVSender.poll": ["self"],
    f"{CONN}.CommonKVSender.poll_pp_consensus": ["self"],
    f"{CONN}.CommonKVSender.abort": ["self"],
    f"{CONN}.CommonKVSender.clear": ["self"],
    f"{CONN}.CommonKVSender.failure_exception": ["self"],
    f"{CONN}.CommonKVReceiver.__init__": ["self", "mgr", "bootstrap_addr", "bootstrap_room"],
    f"{CONN}.CommonKVReceiver.init": ["self", "prefill_dp_rank"],
    f"{CONN}.CommonKVReceiver.send_metadata": [
        *("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices"),
    ],
    f"{CONN}.CommonKVReceiver._get_bootstrap_info_from_server": [
        *("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    ],
    f"{CONN}.CommonKVReceiver._register_kv_args": ["self"],
    f"{CONN}.CommonKVReceiver._setup_bootstrap_infos": ["self"],
    f"{CONN}.CommonKVReceiver._send_bootstrap_message": ["self", "bootstrap_info", "message", "operation"],
    f"{CONN}.CommonKVReceiver._poll": ["self"],
    f"{CONN}.CommonKVReceiver.invalidate_cached_bootstrap_infos": ["self"],
    f"{CONN}.CommonKVReceiver.abort": ["self"],
    f"{CONN}.CommonKVReceiver.clear": ["self"],
    f"{CONN}.CommonKVReceiver.failure_exception": ["self"],
    f"{CONN}.CommonKVBootstrapServer.__init__": ["self", "host", "port"],
    f"{CONN}.CommonKVBootstrapServer._setup_routes": ["self"],
    f"{CONN}.CommonKVBootstrapServer._handle_route_put": ["self", "request"],
    f"{CONN}.CommonKVBootstrapServer._handle_route_get": ["self", "request"],
    f"{CONN}.AbortNotification.from_zmq": ["msg"],
    f"{CONN}.KVTransferError.__init__": ["self", "bootstrap_room", "failure_reason"],
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ["target", "hook", "hook_type"],
    "sglang.srt.utils.network.NetworkAddress.to_tcp": ["self"],
}
# What an instance has once it is made: as its class's sender, or its bases', says.
HELD = {
    f"{CONN}.CommonKVManager": (
        *("request_status", "transfer_infos", "req_to_decode_prefix_len", "failure_records", "prefill_info_table"),
        *("server_socket", "local_ip", "rank_port", "kv_args", "pp_group", "pp_size", "disaggregation_mode"),
        *("attn_tp_rank", "attn_tp_size", "waiting_timeout", "enable_deferred_decode_kv_release"),
        *("_socket_lock", "_socket_cache", "_socket_send_locks", "_zmq_ctx", "failure_lock", "_kv_replica_factor"),
        *("attn_cp_size", "enable_all_cp_ranks_for_transfer"),
    ),
    f"{CONN}.CommonKVSender": (
        *("kv_mgr", "bootstrap_room", "aux_index", "conclude_state"),
        *("_early_send_wait_event", "_transfer_start_time"),
    ),
    f"{CONN}.CommonKVReceiver": (
        *("kv_mgr", "bootstrap_room", "bootstrap_addr", "bootstrap_infos", "conclude_state", "init_time"),
        *("prefill_info", "target_tp_ranks"),
    ),
    f"{CONN}.CommonKVBootstrapServer": ("app",),
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue": (
        *("token_to_kv_pool", "draft_token_to_kv_pool", "scheduler", "metadata_buffers"),
    ),
    "sglang.srt.disaggregation.decode.DecodePreallocQueue": (
        *("token_to_kv_pool", "draft_token_to_kv_pool", "scheduler", "metadata_buffers", "transfer_queue"),
    ),
    "sglang.srt.disaggregation.decode.DecodeTransferQueue": (
        *("enable_deferred_kv_release", "deferred_kv_release_timeout"),
    ),
    "sglang.srt.mem_cache.memory_pool.KVCache": ("page_size", "dtype", "layer_num", "start_layer", "device"),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": (
        *(
            "k_buffer",
            "v_buffer",
            "head_num",
            "kv_cache_layout",
            "use_hnd",
            "quant_method",
            "_init_data_ptrs_and_strides",
        ),
    ),
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": (
        *("kv_buffer", "kv_lora_rank", "qk_rope_head_dim", "data_ptrs"),
    ),
    "sglang.srt.layers.radix_attention.RadixAttention": (
        *("layer_id", "k_scale", "v_scale", "k_scale_float", "v_scale_float", "sliding_window_size"),
    ),
    "sglang.srt.disaggregation.utils.MetadataBuffers": (
        *("output_ids", "cached_tokens", "output_token_logprobs_val", "output_token_logprobs_idx"),
        *("output_top_logprobs_val", "output_top_logprobs_idx", "bootstrap_room"),
    ),
    f"{TOKENIZER}.TokenizerManager": ("rid_to_state",),
    "sglang.srt.managers.io_struct.GenerateReqInput": ("parallel_sample_num", "batch_size"),
    "sglang.srt.sampling.sampling_params.SamplingParams": ("custom_params",),
    "sglang.srt.configs.model_config.ModelConfig": ("vocab_size",),
    "sglang.srt.managers.scheduler.Scheduler": ("_sched_idled", "model_config", "tp_worker", "server_args"),
    "sglang.srt.managers.schedule_batch.Req": (
        *("origin_input_ids", "output_ids", "lora_id", "extra_key", "cache_salt", "input_embeds"),
        *("positional_embed_overrides", "token_type_ids"),
        *("multimodal_inputs", "disagg_kv_sender", "sampling_params", "return_logprob", "logprob"),
        *("return_sampling_mask",),
    ),
}
# Fields of records and configurations.
FIELDS = {
    f"{CONN}.PrefillServerInfo": (
        *("attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype"),
        *("follow_bootstrap_room", "target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks"),
        *("required_dst_info_num", "required_prefill_response_num"),
    ),
    f"{TOKENIZER}.ReqState": ("obj",),
    "sglang.srt.managers.io_struct.TokenizedGenerateReqInput": ("rid", "bootstrap_room"),
    "sglang.srt.arg_groups.fields.disagg.Disagg": ("disaggregation_transfer_backend",),
    f"{CONN}.AbortNotification": ("room", "decode_ip", "decode_port"),
    "sglang.srt.disaggregation.base.conn.KVArgs": ("aux_data_ptrs", "aux_item_lens", "page_size"),
    "sglang.srt.arg_groups.fields.parallel.Parallel": (
        *("tp_rank", "pp_rank", "attn_tp_rank", "attn_tp_size", "attn_dp_rank", "attn_cp_rank", "attn_cp_size"),
        *("attn_dcp_size", "world_group", "tp_size", "pp_size", "dp_size", "nnodes", "enable_dp_attention"),
        *("dp_rank", "enable_kv_cache_sharding", "enable_dsa_cache_layer_split", "enable_cp_tp_group_sharing"),
    ),
}
BACKENDS = ("manager", "sender", "receiver", "bootstrap_server", "kvargs")
POLL = {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4}


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        stand_in()
        _found("sglang.srt.disaggregation.decode")


def _found(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{path}: SGLang has it no more, or somewhere else: {error}") from error


@pytest.mark.parametrize("path", CALLED)
def test_what_we_call_is_there_and_takes_what_we_give(path: str) -> None:
    parameters = list(inspect.signature(_found(path)).parameters)
    assert parameters[: len(CALLED[path])] == CALLED[path], f"{path}: takes {parameters} now"


@pytest.mark.parametrize("path", HELD)
def test_what_we_read_of_an_object_is_there(path: str) -> None:
    kind = _found(path)
    said = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("sglang"))
    missing = [name for name in HELD[path] if not re.search(rf"\bself\.{name}\b|\bdef {name}\b", said)]
    assert not missing, f"{path}: has no {', '.join(missing)} any more"


@pytest.mark.parametrize("path", FIELDS)
def test_what_we_read_of_a_record_is_there(path: str) -> None:
    kind = _found(path)
    known = {*dir(kind), *(name for base in kind.__mro__ for name in getattr(base, "__annotations__", {}))}
    assert not [name for name in FIELDS[path] if name not in known]


def test_polls_mean_what_they_meant() -> None:
    """Schedulers take the least of all ranks."""
    poll = _found("sglang.srt.disaggregation.base.conn.KVPoll")
    assert {name: getattr(poll, name) for name in POLL} == POLL


def test_a_backend_is_made_of_these_classes() -> None:
    kinds = _found("sglang.srt.disaggregation.utils.KVClassType")
    assert sorted(kind.value for kind in kinds) == sorted(BACKENDS)


def test_the_plugin_adds_its_name_to_the_choices_and_the_enum() -> None:
    from kvbridge.adapters.sglang.plugin import NAME, register

    register()
    register()
    choices = _found("sglang.srt.arg_groups.choices.DISAGG_TRANSFER_BACKEND_CHOICES")
    backends = _found("sglang.srt.disaggregation.utils.TransferBackend")
    assert choices.count(NAME) == 1
    assert backends(NAME) is backends["KVBRIDGE"] is backends.KVBRIDGE
    assert backends(NAME) in list(backends) and backends(NAME) != backends.NIXL
