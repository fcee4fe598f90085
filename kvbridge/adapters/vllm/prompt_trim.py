"""Ends a prompt one token early on the prefill side, for layers that keep only what comes next needs. Pure.

The decode side computes the prompt's last token itself (it needs something to sample from), and goes on from what was
there before it. A layer that keeps all rows still has that once the whole prompt is computed; one that keeps a window
may have given up the window's first block, and one that keeps a state has only the state after. So such a prompt is
computed without its last token, as vLLM's own connectors do for recurrent state (NixlConnector, 0.26 to 0.32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def can_be_short(request: Request) -> bool:
    """Whether nobody will miss what this engine says after the prompt, nor its logits of the prompt."""
    reads_all = getattr(request, "get_skip_reading_prefix_cache", None)
    has_embeds = getattr(request, "prompt_embeds", None) is not None
    is_plain = request.prompt_token_ids is not None and not has_embeds and request.num_prompt_tokens > 1
    return is_plain and request.max_tokens == 1 and not (reads_all and reads_all())


def shorten(request: Request) -> None:
    """Take the last token off a prompt that was not scheduled yet.

    The hash of its last block stays that of the whole prompt, but the block can never be full here, so never cached.
    """
    assert request.prompt_token_ids is not None and not request.num_computed_tokens
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # whoever asked may have handed this list to others
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
