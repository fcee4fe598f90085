"""One prompt sent to two engines: their adapters give it the same name if and only if its KV is the same."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.adapters.engine.prompts import is_in, rendezvous
from kvbridge.adapters.sglang import prompts as sglang
from kvbridge.adapters.vllm import rendezvous as vllm

# tokens, (adapter's name, its folder), salt
PROMPTS: dict[str, tuple[list[int], tuple[str, str] | None, str]] = {
    "plain": ([1, 2, 3], None, ""),
    "shorter": ([1, 2], None, ""),
    "other": ([1, 2, 4], None, ""),
    "adapter": ([1, 2, 3], ("sql", "sql-v1"), ""),
    "another adapter": ([1, 2, 3], ("sql", "sql-v2"), ""),
    "salt": ([1, 2, 3], None, "tenant"),
    "salt of an adapter's name": ([1, 2, 3], None, "sql"),
    "both": ([1, 2, 3], ("sql", "sql-v1"), "tenant"),
}


def of_vllm(tokens: list[int], adapter: tuple[str, str] | None, salt: str) -> str:
    lora = SimpleNamespace(lora_name=adapter[0], lora_path=f"/models/{adapter[1]}/") if adapter else None
    return vllm.prompt_digest(
        SimpleNamespace(prompt_token_ids=tokens, mm_features=[], lora_request=lora, cache_salt=salt or None)
    )


def of_sglang(tokens: list[int], adapter: tuple[str, str] | None, salt: str) -> str:
    number = "8c6f" if adapter else None  # SGLang's own, and part of what its cache goes by
    req: Any = SimpleNamespace(
        origin_input_ids=tokens,
        output_ids=[],
        multimodal_inputs=None,
        lora_id=number,
        extra_key=number,
        cache_salt=salt or None,
        token_type_ids=None,
    )
    name, folder = adapter or ("", "")
    return sglang.prompt_digest(req, (name, f"/srv/adapters/{folder}"))


@pytest.mark.proves("G9")
@pytest.mark.parametrize(("one", "other"), list(itertools.product(PROMPTS, repeat=2)))
def test_a_prompt_has_one_name_in_both_engines_if_its_kv_is_the_same(one: str, other: str) -> None:
    left, right = rendezvous(7, of_vllm(*PROMPTS[one])), rendezvous(7, of_sglang(*PROMPTS[other]))
    assert (left == right) == (one == other)


def test_a_room_is_part_of_the_name() -> None:
    name = rendezvous(7, "ab" * 20)
    assert name != rendezvous(8, "ab" * 20) and is_in(name, 7) and not is_in(name, 8)
    assert not any(is_in(other, 7) for other in ("", "room/7/", "room/7/ab", name + "a", name.upper(), f"x{name}"))
