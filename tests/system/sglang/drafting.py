"""Stand-ins that let SGLang draft (EAGLE) on a CPU: attention for drafts, and what has kernels for GPUs only.

One token is drafted in a step there, so a tree of drafts is a chain of two tokens. On a GPU whose SGLang has come
without the source of its two kernels for trees, those that SGLang has for other GPUs take their place.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

VARIABLE = "KVBRIDGE_TEST_DRAFTS"  # set in the environment of servers that draft
SPECULATIVE = "sglang.srt.speculative"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for path, stand_in in {
        f"{SPECULATIVE}.draft_utils.DraftBackendFactory._create_backend": _draft_backend,
        f"{SPECULATIVE}.eagle_utils.build_tree_kernel_efficient_func": _build_chain,
        f"{SPECULATIVE}.eagle_utils.verify_tree_greedy_func": _verify_chain,
        f"{SPECULATIVE}.eagle_worker_common.assign_draft_cache_locs_contiguous_func": _draft_slots,
        f"{SPECULATIVE}.eagle_worker_common.fill_bonus_tokens_func": _bonus_tokens,
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func": _verified_slots,
    }.items():
        HookRegistry.register(path, stand_in, HookType.AROUND)


def register_for_gpus() -> None:
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (Path(sglang.__file__).parent / "kernels/jit/csrc/speculative").exists():
        return
    trees = f"{SPECULATIVE}.eagle_utils"
    HookRegistry.register(f"{trees}.build_tree_kernel_efficient_func", _build_by_triton, HookType.AROUND)
    HookRegistry.register(f"{trees}.verify_tree_greedy_func", _verify_by_triton, HookType.AROUND)


def _build_by_triton(original: Any, *args: Any) -> None:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def _verify_by_triton(original: Any, *, topk: int, **named: Any) -> Any:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(**named)
    return named["predicts"], named["accept_index"], named["accept_token_num"]


def as_chunk(batch: Any) -> Any:
    """Tokens to verify, one after the other behind the request's, as if they were a chunk of its prompt."""
    count = batch.spec_info.draft_token_num
    return SimpleNamespace(
        out_cache_loc=batch.out_cache_loc,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens + count,
        extend_prefix_lens=batch.seq_lens,
        extend_seq_lens=batch.seq_lens * 0 + count,
        encoder_lens=batch.encoder_lens,
    )


def _draft_backend(original: Any, factory: Any, name: str, known: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def native() -> tuple[str, Any]:
        return "torch_native", TorchNativeAttnBackend(factory.draft_model_runner)

    return original(factory, name, known | {"torch_native": native}, *args, **kwargs)


def _build_chain(
    original: Any,
    parents: Any,
    chosen: Any,
    seq_lens: Any,
    mask: Any,
    positions: Any,
    index: Any,
    following: Any,
    sibling: Any,
    topk: int,
    steps: int,
    width: int,
    mode: Any,
) -> None:
    import torch

    assert topk == 1
    places = torch.arange(width, device=seq_lens.device)
    positions.copy_((seq_lens[:, None] + places).flatten())
    index.copy_(torch.arange(len(seq_lens), device=seq_lens.device)[:, None] * width + places)
    following[:, :-1] = places[1:]


def _verify_chain(original: Any, *args: Any, **named: Any) -> Any:
    predicts, accepted, counts = named["predicts"], named["accept_index"], named["accept_token_num"]
    candidates, target = named["candidates"], named["target_predict"].flatten()
    width = candidates.shape[1]
    for row in range(len(candidates)):
        last, count = row * width, 0
        accepted[row, 0] = last
        while count + 1 < accepted.shape[1] and count + 1 < width and candidates[row, count + 1] == target[last]:
            predicts[last] = target[last]
            count, last = count + 1, last + 1
            accepted[row, count] = last
        counts[row], predicts[last] = count, target[last]
    return predicts, accepted, counts


def _draft_slots(
    original: Any, requests: Any, tokens: Any, seq_lens: Any, slots: Any, topk: int, steps: int, **named: Any
) -> None:
    assert topk == 1 and not any(each is not None for each in named.values())
    slots.copy_(_behind(tokens, requests, seq_lens, steps))


def _verified_slots(original: Any, **named: Any) -> Any:
    return _behind(named["req_to_token"], named["req_pool_indices"], named["start_offset"], named["draft_token_num"])


def _behind(tokens: Any, requests: Any, start: Any, count: int) -> Any:
    """The slots of the next tokens of these requests."""
    import torch

    places = start.long()[:, None] + torch.arange(count, device=start.device)
    return tokens[requests.long()[:, None], places].long().flatten()


def _bonus_tokens(original: Any, accepted: Any, lens: Any, bonus: Any, stride: int, size: int) -> None:
    import torch

    bonus.copy_(accepted.flatten()[torch.arange(size, device=lens.device) * stride + lens.long() - 1])
