"""Starts SGLang on a CPU, as `kvbridge up --cpu` does, with attention parallel over data (`--enable-dp-attention`).

SGLang has its way for CPUs, which it takes in its engine for CPUs alone.
"""

from __future__ import annotations

from typing import Any

from kvbridge.adapters.sglang.on_cpu import MAINS, main, stand_in


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


def rest_between_requests() -> None:
    """Have the process that hands requests to replicas wait for them. SGLang's asks for them over and over."""
    from sglang.srt.managers import data_parallel_controller as controller

    def hand_on(self: Any) -> None:
        while True:
            self.soft_watchdog.feed()
            if self.recv_from_tokenizer.poll(1000):  # ms
                self._request_dispatcher(controller.sock_recv(self.recv_from_tokenizer))

    controller.DataParallelController.event_loop = hand_on


if __name__ in MAINS:
    stand_in()
    spread_attention()
    rest_between_requests()

if __name__ == "__main__":
    main()
