"""Starts SGLang as `demo.sglang_cpu` does, with attention that is parallel over data (`--enable-dp-attention`).

SGLang has its way for CPUs, which it takes in its engine for CPUs alone.
"""

from __future__ import annotations

from .sglang_cpu import MAINS, main, stand_in


def spread_attention() -> None:
    """Have the plain engine take that way. Called in each of SGLang's processes."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    parallel_state._is_cpu = forward_batch_info._is_cpu = True
    group = parallel_state.GroupCoordinator
    group.all_to_all_single = group._all_to_all_single
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


if __name__ in MAINS:
    stand_in()
    spread_attention()

if __name__ == "__main__":
    main()
