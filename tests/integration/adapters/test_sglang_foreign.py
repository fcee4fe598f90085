"""What a router says about another engine's half of a request: checked before a scheduler acts on it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbridge.adapters.sglang.foreign import MOST_LOGPROBS, is_fetched_elsewhere, prefilled
from kvbridge.adapters.sglang.metadata import write
from kvbridge.errors import EngineError

VOCABULARY = 1024
TOLD = {"sender": "tcp://10.0.0.1:7700", "first_token": 5}
TOP = [[-0.25, 5], [-1.5, 9]]


def req(told: Any, top: int = -1) -> Any:
    """`top`: log probabilities that were asked for; none at all if negative."""
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params={"kvbridge": told, "another's": 1}),
        return_logprob=top >= 0,
        logprob=SimpleNamespace(top_logprobs_num=top),
        return_sampling_mask=False,
    )


def test_what_is_needed_is_read() -> None:
    said, top = prefilled(req(TOLD), VOCABULARY)
    assert (said.sender, said.first_token, said.rendezvous, top) == ("tcp://10.0.0.1:7700", 5, "", [])


def test_log_probabilities_of_the_first_token_come_with_it() -> None:
    told = TOLD | {"logprob": -0.25, "top_logprobs": json.dumps(TOP)}
    said, top = prefilled(req(told, top=2), VOCABULARY)
    assert said.logprob == -0.25 and top == [(-0.25, 5), (-1.5, 9)]


@pytest.mark.proves("T9")
@pytest.mark.parametrize(
    ("told", "top", "reason"),
    [
        (None, -1, "custom_params['kvbridge']: Expected `object`, got `null`"),
        ("all of it", -1, "Expected `object`, got `str`"),
        ({"sender": "tcp://10.0.0.1:7700"}, -1, "missing required field `first_token`"),
        (TOLD | {"first_tokem": 5}, -1, "unknown field `first_tokem`"),
        (TOLD | {"sender": ""}, -1, "length >= 1"),
        (TOLD | {"sender": "x" * 300}, -1, "length <= 256"),
        (TOLD | {"first_token": "5"}, -1, "Expected `int`"),
        (TOLD | {"first_token": -1}, -1, "token -1: must be in [0, 1024)"),
        (TOLD | {"first_token": 1024}, -1, "token 1024: must be in [0, 1024)"),
        (TOLD | {"logprob": math.nan}, 0, "must be finite"),
        (TOLD, 0, "logprob: log probabilities were asked for"),
        (TOLD | {"logprob": -1.0}, 2, "top_logprobs: 0 of the first token are told, 2 were asked for"),
        (TOLD | {"logprob": -1.0, "top_logprobs": "[[1]]"}, 1, "top_logprobs: "),
        (TOLD | {"logprob": -1.0, "top_logprobs": "["}, 1, "top_logprobs: "),
        (TOLD | {"logprob": -1.0, "top_logprobs": "[" * 60000}, 1, "top_logprobs: "),
        (TOLD | {"logprob": -1.0, "top_logprobs": "[" * 100000}, 1, "of length <= 65536 - at `$.top_logprobs`"),
        (TOLD | {"logprob": -1.0, "top_logprobs": json.dumps([[-1.0, 4096]])}, 1, "token 4096: "),
        (TOLD | {"top_logprobs": json.dumps(TOP * MOST_LOGPROBS)}, -1, f"limit {MOST_LOGPROBS}"),
    ],
    ids=range(18),
)
def test_what_makes_no_sense_is_refused_with_its_reason(told: Any, top: int, reason: str) -> None:
    with pytest.raises(EngineError) as caught:
        prefilled(req(told, top), VOCABULARY)
    assert caught.value.code == "bad_params" and reason in str(caught.value)


def test_a_mask_that_nobody_has_is_refused() -> None:
    asked = req(TOLD)
    asked.return_sampling_mask = True
    with pytest.raises(EngineError, match="return_sampling_mask"):
        prefilled(asked, VOCABULARY)


def test_the_prefill_side_is_told_that_nobody_will_ask() -> None:
    assert is_fetched_elsewhere(req({"fetched_by": "vllm"}))
    assert not is_fetched_elsewhere(req(None))
    assert not is_fetched_elsewhere(SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None)))
    with pytest.raises(EngineError, match="unknown field `sender`"):
        is_fetched_elsewhere(req(TOLD))


def test_the_row_is_what_a_prefill_server_would_have_sent() -> None:
    shapes = {
        **dict.fromkeys(("output_ids", "cached_tokens", "output_token_logprobs_idx"), ((2, 16), torch.int32)),
        "output_top_logprobs_idx": ((2, 128), torch.int32),
        "output_token_logprobs_val": ((2, 16), torch.float32),
        "output_top_logprobs_val": ((2, 128), torch.float32),
        "bootstrap_room": ((2, 8), torch.uint64),
    }
    buffers = SimpleNamespace(**{name: torch.full(shape, 9, dtype=dtype) for name, (shape, dtype) in shapes.items()})
    room = 2**63 - 1
    write(buffers, 1, room, 5, -0.25, [(-0.25, 5), (-1.5, 7)])
    assert buffers.output_ids[1][0] == 5 and not buffers.cached_tokens[1].any()
    assert buffers.output_token_logprobs_val[1][0] == -0.25 and buffers.output_token_logprobs_idx[1][0] == 5
    assert buffers.output_top_logprobs_val[1][:3].tolist() == [-0.25, -1.5, 9]
    assert buffers.output_top_logprobs_idx[1][:3].tolist() == [5, 7, 9]
    assert buffers.bootstrap_room[1][0].item() == room
    assert all((getattr(buffers, name)[0] == 9).all() for name in shapes), "another request's row"
