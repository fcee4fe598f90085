"""Kinds of KV cache that engines have and that are not carried: what is missing, and what would help. Pure.

An adapter finds the kind by its engine's own name (a spec or a backend of vLLM, a pool of SGLang); `kvbridge plan` by
the model's config.json. So both say the same. To carry a kind, delete its line.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OperatorError
from ...values import Value

OTHER = {
    "vllm": "another connector until then: vLLM's NixlConnector carries most of these",
    "sglang": "another backend until then: SGLang's nixl and mooncake carry most of these",
}
NO_DRAFTS = {"vllm": "no --speculative-config", "sglang": "a server without --speculative-algorithm"}
ANOTHER_DTYPE = "--kv-cache-dtype auto, bfloat16 or fp8"
# Classes of SGLang's pools that may hold a draft model's rows.
DRAFT_POOLS = ("MHATokenToKVPool", "MHATokenToKVPoolMXFP8", "MLATokenToKVPool", "DSATokenToKVPool")


class Unsupported(Value):
    """`missing` ends the sentence "kvbridge cannot carry ...". `helps` is by engine; where it is not, nothing helps."""

    missing: str
    helps: dict[str, str]


UNSUPPORTED: dict[str, Unsupported] = {
    "index values": Unsupported("index values beside index keys, nor do SGLang's own backends", {}),
    "state": Unsupported("recurrent or convolution states of this kind yet", OTHER),
    "cached state": Unsupported("recurrent states of every block", {"vllm": "--mamba-cache-mode align"}),
    "replayed state": Unsupported(
        "recurrent states whose last tokens are in a ring",
        {"vllm": "no --use-replayssm", "sglang": "a server without --enable-linear-replayssm"},
    ),
    "drafted state": Unsupported("these recurrent states beside drafts yet", NO_DRAFTS),
    "compressed": Unsupported("caches of which a row stands for several tokens yet", OTHER),
    "ring": Unsupported("ring buffers of a request's last tokens yet", OTHER),
    "cross": Unsupported("the KV of an encoder", {}),
    "sink": Unsupported("attention sinks that are kept as KV rows", {}),
    "padded": Unsupported("latents that are padded to the width of those with a window yet", {}),
    "packed": Unsupported("rows of this dtype or packing", {"vllm": ANOTHER_DTYPE, "sglang": ANOTHER_DTYPE}),
    "packed checkpoint": Unsupported(
        "rows that SGLang packs in NVFP4 for such a checkpoint on Blackwell",
        {"sglang": "a checkpoint whose experts are not in NVFP4, or Hopper (--attention-backend fa3)"},
    ),
    "beside rows": Unsupported(
        "what it keeps beside rows", {"sglang": "EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM or none"}
    ),
    "host rows": Unsupported(
        "rows in host memory yet",
        {"vllm": "an --attention-config without hisparse_config", "sglang": "a server without --enable-hisparse"},
    ),
    "unified": Unsupported(
        "rows whose place their numbers do not say", {"sglang": "a server without --enable-unified-memory"}
    ),
}


def refusal(code: str, engine: str, kind: str, found: str) -> OperatorError:
    """The error for a cache of this kind. `found` is what the engine or the model's config calls it."""
    each = UNSUPPORTED[kind]
    helps = f"; needs {each.helps[engine]}" if engine in each.helps else "; no setting of the engine helps"
    return OperatorError(code, f"{found}: kvbridge cannot carry {each.missing}{helps}")


def draft_refusal(kind: str, supported: Sequence[str] = DRAFT_POOLS) -> OperatorError:
    """The error for a draft model's KV pool of a class that is not supported beside the model's."""
    reason = f"draft model's KV pool: {kind}, supported are {', '.join(supported)}"
    return OperatorError("cache_unsupported", f"{reason}; needs a server without --speculative-algorithm")
