"""Ends a prompt one token early on the prefill side, for layers that keep only what the next token needs. Pure.

The decode side computes the prompt's last token itself, to have something to sample from, so it needs the KV as it was
before that token. A layer that keeps all rows still has it once the whole prompt is computed. A layer with a window may
have given up the window's first block, and a layer with a state has only the state after the last token. So such a
prompt is computed without its last token, as vLLM's own connectors do for recurrent state (NixlConnector, 0.26 to
0.33).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def can_be_short(request: Request) -> bool:
    """Whether nobody needs the token that this engine would sample after the prompt, nor its logits of the prompt."""
    reads_all = getattr(request, "get_skip_reading_prefix_cache", None)
    has_embeds = getattr(request, "prompt_embeds", None) is not None
    is_plain = request.prompt_token_ids is not None and not has_embeds and request.num_prompt_tokens > 1
    return is_plain and request.max_tokens == 1 and not (reads_all and reads_all())


def shorten(request: Request) -> None:
    """Remove the last token of a prompt that has not been scheduled yet.

    Its last block keeps the hash of the whole prompt. But that block can never be full here, so it is never cached.
    """
    assert request.prompt_token_ids is not None and not request.num_computed_tokens
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # a new list: the caller may share the old one
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
