"""What the adapters refuse, and whether `kvbridge plan --model` says so before an engine is started.

Each function of the adapters that refuses has a line here, with how many refusals it has: what plan is asked, or why
plan cannot know. So who adds a refusal is asked what plan says of it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbridge.adapters
from kvbridge.errors import OperatorError
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse
from tests.support.families import DEEPSEEK_V4, FAMILIES, LLAMA, NVFP4_EXPERTS, STATES, config, windows

ADAPTERS = Path(kvbridge.adapters.__file__).parent
KV = "--kv-cache-dtype"
OF = {family.models: family.config for family in FAMILIES}
HYBRID, M3 = config("qwen3_next", 48, 16, 2, 256, **STATES), OF["MiniMax M3"]
WINDOWS = config("gpt_oss", 36, 64, 8, 64, sliding_window=128, layer_types=windows(36, 2))
NO_INDEX_VALUES = {"sparse_attention_config": {"sparse_attention_freq": [1] * 60}}

# By where it is raised: the config and the command of which plan says the same, and the first words of it.
SAID: dict[str, tuple[int, list[tuple[Any, str, str]]]] = {
    "sglang/block_scales.check": (
        2,
        [(LLAMA, f"sglang {KV} turboquant_4bit_nc", "kvbridge cannot carry rows of this")],
    ),
    "sglang/compressed.check": (5, [(DEEPSEEK_V4, "sglang --dsv4-attn-backend trtllm", "--dsv4-attn-backend trtllm")]),
    "sglang/drafts.runners": (
        1,
        [(LLAMA, "sglang --speculative-algorithm DFLASH", "cannot carry what it keeps beside rows")],
    ),
    "sglang/manager._check_parallel": (
        4,
        [
            (LLAMA, "sglang --dcp-size 2", "attn_dcp_size: 2, must be 1"),
            (LLAMA, "sglang --tp 2 --attn-cp-size 2", "attn_cp_size: 2, must be 1"),
            (LLAMA, "sglang --enable-kv-cache-sharding", "enable_kv_cache_sharding: on, must be off"),
            (LLAMA, "sglang --enable-dsa-cache-layer-split", "enable_dsa_cache_layer_split: on, must be off"),
            (LLAMA, "sglang --enable-cp-tp-group-sharing", "enable_cp_tp_group_sharing: on, must be off"),
        ],
    ),
    "sglang/pool._check_kind": (
        1,
        [
            (
                LLAMA,
                "sglang --enable-unified-memory",
                "rows whose place their numbers do not say; needs a server without",
            ),
            (OF["Qwen4-exp"], "sglang", "cannot carry recurrent or convolution states of this kind"),
            (M3 | {"quantization_config": NVFP4_EXPERTS}, "sglang", "cannot carry rows that SGLang packs in NVFP4"),
        ],
    ),
    "sglang/pool._check_minimax": (
        3,
        [
            (M3["text_config"] | NO_INDEX_VALUES, "sglang", "cannot carry index values beside index keys"),
        ],
    ),
    "sglang/pool._check_rows": (2, [(LLAMA, f"sglang {KV} int4", "cannot carry rows of this dtype or packing")]),
    "sglang/pool._check_index": (2, [(OF["GLM-5-Next"], "sglang", "caches of which a row stands for several tokens")]),
    "sglang/pool._groups": (
        1,
        [
            (
                WINDOWS,
                "sglang --disaggregation-decode-enable-radix-cache",
                "page_size: 1, must be larger beside layers wi",
            ),
        ],
    ),
    "sglang/pool.check": (
        7,
        [
            (LLAMA, "sglang --enable-hisparse", "cannot carry rows in host memory yet; needs a server without"),
            (
                OF["Step-3.5, Step-3.7"] | {"num_nextn_predict_layers": 1},
                "sglang --speculative-algorithm EAGLE",
                "draft model's KV pool: SWAKVPool, supported are",
            ),
        ],
    ),
    "sglang/states.check": (
        5,
        [
            (
                HYBRID,
                "sglang --disaggregation-decode-enable-radix-cache --enable-hierarchical-cache",
                "--enable-hierarchical-cache: kvbridge cannot carry recurrent",
            ),
            (HYBRID, "sglang --enable-linear-replayssm", "whose last tokens are in a ring; needs a server without"),
            (
                HYBRID,
                "sglang --enable-linear-replayssm-spec",
                "whose last tokens are in a ring; needs a server without",
            ),
        ],
    ),
    "vllm/backends.check_backend": (
        3,
        [
            (
                LLAMA,
                "vllm --attention-backend B12X",
                "attention backend B12X, whose order of rows kvbridge does not know",
            ),
            (LLAMA, "vllm --attention-backend TURBOQUANT", "cannot carry rows of this dtype or packing"),
            (
                OF["DeepSeek V3.2, other GLM-5.x"],
                "vllm --attention-backend FLASHINFER_MLA_SPARSE_SM120",
                "reads scales of deepseek_v32 as powers of two; needs another",
            ),
            (OF["Inkling"], "vllm", "cannot carry recurrent or convolution states of this kind"),
        ],
    ),
    "vllm/backends.spec_refusal": (
        3,
        [
            (OF["Whisper"], "vllm", "cannot carry the KV of an encoder"),
            (OF["Step5"], "vllm", "cannot carry caches of which a row stands for several tokens"),
            (OF["Step5"], "vllm", "cannot carry ring buffers"),
        ],
    ),
    "vllm/dtypes.cell_of": (
        1,
        [(LLAMA, f"vllm {KV} turboquant_4bit_nc", "cannot carry rows of this dtype or packing")],
    ),
    "vllm/dtypes._plain_index_form": (
        2,
        [
            (M3, "vllm --attention-config.indexer_kv_dtype nvfp4", "kvbridge carries index keys in bf16 and fp8"),
        ],
    ),
    "vllm/layers._check": (
        3,
        [
            (HYBRID, "vllm -tp 2 -pcp 2", "recurrent states, prefill_context_parallel_size 2; needs 1"),
            (DEEPSEEK_V4, "vllm -tp 2 -dcp 2", "rows of several tokens, decode_context_parallel_size 2; needs 1"),
        ],
    ),
    "vllm/pool.describe": (
        3,
        [
            (LLAMA, "vllm --enable-sleep-mode", "enable_sleep_mode: True, must be off"),
            (
                M3,
                """vllm -ac '{"hisparse_config": {}}'""",
                "hisparse: kvbridge cannot carry rows in host memory yet; needs an",
            ),
        ],
    ),
    "vllm/states.state_of": (
        4,
        [
            (OF["Qwen4-exp"], "vllm", "cannot carry recurrent or convolution states of this kind"),
            (HYBRID, "vllm --mamba-cache-mode all", "cannot carry recurrent states of every block; needs"),
            (HYBRID, "vllm --use-replayssm", "whose last tokens are in a ring; needs no --use-replayssm"),
            (
                OF["Jamba"],
                """vllm --speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'""",
                "cannot carry these recurrent states beside drafts yet; needs no --speculative-config",
            ),
        ],
    ),
    "vllm/versions.shard_of": (
        1,
        [(LLAMA, "vllm -tp 2 -pcp 2 -dcp 2", "decode_context_parallel_size 2; needs one of them 1")],
    ),
}
# What only a started engine knows.
VERSION, ENVIRONMENT, OBJECTS = "its version", "its environment or platform", "its objects, whatever the command"
UNSAID = {
    "engine/client.reconnect": (1, ENVIRONMENT),
    "engine/client._check_uid": (1, ENVIRONMENT),
    "engine/memory.of": (1, OBJECTS),
    "engine/options.checked": (2, "the connector's own options"),
    "sglang/compressed.check_draft": (1, OBJECTS),
    "sglang/manager.__init__": (1, VERSION),
    "sglang/manager._begin": (1, ENVIRONMENT),
    "sglang/manager._check_prefix_cache": (2, "whether its role is to change"),
    "sglang/pool._check_halves": (3, OBJECTS),
    "sglang/pool._heads": (1, OBJECTS),
    "sglang/pool._index_part": (1, OBJECTS),
    "sglang/pool._window": (1, OBJECTS),
    "sglang/states._check_draft": (1, "the draft model's layers"),
    "sglang/states._check_shapes": (1, OBJECTS),
    "sglang/states._state": (1, OBJECTS),
    "vllm/cpu.halves": (1, ENVIRONMENT),
    "vllm/dtypes._index_form": (1, OBJECTS),
    "vllm/dtypes._scales": (1, OBJECTS),
    "vllm/layers._heads": (1, "drafts and models that share a head among ranks"),
    "vllm/layers._numbered": (1, OBJECTS),
    "vllm/layers._open_tokens": (1, OBJECTS),
    "vllm/layers.members_of": (1, OBJECTS),
    "vllm/nvfp4.planes": (2, ENVIRONMENT),
    "vllm/pool._cpu": (1, ENVIRONMENT),
    "vllm/pool._planes": (1, OBJECTS),
    "vllm/shapes.views_of": (2, OBJECTS),
    "vllm/states._check_page": (1, OBJECTS),
    "vllm/versions.check_groups": (2, VERSION),
}


def raised() -> Iterator[str]:
    """Where the adapters' source makes an error for the operator, once for each."""
    makers = {"OperatorError", "refusal", "draft_refusal", "_unsupported"}
    for path in ADAPTERS.glob("*/*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in makers:
                calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
                made = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in makers]
                yield from [f"{path.parent.name}/{path.stem}.{function.name}"] * len(made)


def test_every_refusal_of_the_adapters_is_known_to_plan_or_says_why_it_cannot_be() -> None:
    assert Counter(raised()) == {where: count for where, (count, _) in (SAID | UNSAID).items()}
    assert not set(SAID) & set(UNSAID)


@pytest.mark.parametrize(
    ("where", "given", "command", "text"),
    [(where, *each) for where, (_, cases) in SAID.items() for each in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_says_what_the_adapter_will(where: str, given: Any, command: str, text: str) -> None:
    with pytest.raises(OperatorError, match=text):
        pools_of(read(given), parse(command), "m", "e", is_decoder=True)


def test_ranks_of_prefill_context_parallelism_each_have_what_their_tensor_parallel_one_has() -> None:
    pools = pools_of(read(LLAMA), parse("vllm -tp 2 -pcp 2"), "m", "e")
    assert [(pool.shard.tp_rank, pool.shard.tp_size) for pool in pools] == [(rank, 4) for rank in range(4)]
    assert [{(plane.first_head, plane.heads, plane.total_heads) for plane in pool.planes} for pool in pools] == [
        *[{(0, 4, 8)}, {(4, 4, 8)}] * 2
    ]
