"""Recurrent states between engines of other dtypes and another order of the convolution, and of a long prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.states import ONE_GROUP, of_one_rank, writer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LONG = 4608


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Of the small engine: bf16, and rows of all channels. Of the large one: fp32, and channels of all rows."""
    more = {"num_gpu_blocks_override": 128, "max_model_len": LONG, "max_num_batched_tokens": LONG}
    more |= {"enable_prefix_caching": False}
    own: dict[str, dict[str, Any]] = {
        "small": {"mamba_ssm_cache_dtype": "bfloat16", "VLLM_SSM_CONV_STATE_LAYOUT": "SD"},
        "large": {"mamba_ssm_cache_dtype": "float32", "VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
    }
    with ExitStack() as stack:
        where, start = tmp_path_factory.mktemp("fleet"), ("small", "large")
        yield Fleet(where, stack, dtype="float32", write=writer(ONE_GROUP), more=more, start=start, own=own)


@pytest.mark.parametrize("length", [2, 4, 5, 257, 4000])
@pytest.mark.parametrize(("sender", "receiver"), [("small", "large"), ("large", "small")])
def test_a_state_comes_in_the_receivers_dtype_and_order(states: Fleet, sender: str, receiver: str, length: int) -> None:
    tokens = prompt(length, seed=length + (sender == "large"))
    request, prefilled = states.prefill(sender, tokens)
    ours = of_one_rank(states[sender].states(request, length - 1, states.folder / "ours.npz"))
    wanted = states.name(f"d-{receiver}")
    answer = states[receiver].run(wanted, tokens, 12, prefilled.params)
    assert answer.cached == length - 1
    theirs = of_one_rank(states[receiver].states(wanted, length - 1, states.folder / "theirs.npz"))
    assert ours.keys() == theirs.keys() and ours
    for key, sent in ours.items():
        size = theirs[key].shape[-1]
        assert size == (2 if key.endswith("state") and receiver == "small" else 4), "not the dtype that was asked for"
        assert sent.any() and np.array_equal(rounded(sent, size), theirs[key]), key


def rounded(raw: np.ndarray, size: int) -> np.ndarray:
    """bf16 or fp32 bytes of so many bytes a number; to the nearest, and of two the even one."""
    if raw.shape[-1] == size:
        return raw
    if size == 4:
        return np.concatenate([np.zeros_like(raw), raw], axis=-1)
    whole = np.ascontiguousarray(raw).view(np.uint32)[..., 0].astype(np.uint64)
    kept = ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)
    return kept[..., None].view(np.uint8)
