"""SGLang's first token: the decode side needs it beside the KV, with its logprobs and drafts (a *metadata buffer*).

If SGLang prefilled: once the prompt is computed, the last pipeline stage reads its buffer (`read`) and sends it over
SGLang's own sockets (`_send_metadata` in sender.py). The decode side keeps it in the request's room (`put` in rooms.py)
until the KV is in its pages, and then takes it (`take`); so a request never goes on with one of the two.

If another engine prefilled: its answer has the token, and the router passes it on (`Prefilled` in foreign.py). The
decode side writes its buffer itself (`write`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from . import drafts
from .messages import Text

LIKELY = drafts.PROBABILITIES  # zeros where nobody has drafted: the likeliest tokens' never are


class Metadata(msgspec.Struct, frozen=True, array_like=True, tag="row"):
    """Prefill to decode: the metadata buffer of this prompt, a byte string for each of SGLang's fields."""

    room: int
    prompt: Text
    fields: Annotated[tuple[bytes, ...], Meta(max_length=256)]


def read(args: Any, index: int, room: int, prompt: str) -> Metadata:
    """What the prefill engine has written at this index of its buffers. `args` are SGLang's."""
    places = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    return Metadata(room, prompt, tuple(ctypes.string_at(start + index * size, size) for start, size in places))


def take(said: Metadata, args: Any, buffers: Any, index: int) -> str:
    """Copy it into our buffers. The drafts only if the prefill side has drafted, with a model like ours.

    Returns why not, or "".
    """
    theirs, ours = [len(field) for field in said.fields], list(args.aux_item_lens)
    of_drafts = drafts.fields(buffers, args.aux_data_ptrs)
    is_drafted = theirs == ours and all(any(said.fields[i]) for i, name in of_drafts.items() if name == LIKELY)
    others = [i for i in range(len(ours)) if i not in of_drafts]
    if len(theirs) != len(ours) or any(theirs[i] != ours[i] for i in others):
        return f"metadata buffer: bytes of its fields: prefill {theirs}, decode {ours}"
    for i in range(len(ours)) if is_drafted else others:
        ctypes.memmove(args.aux_data_ptrs[i] + index * ours[i], said.fields[i], ours[i])
    if not is_drafted:
        drafts.unknown(buffers, index)
    return ""


def write(
    buffers: Any, index: int, room: int, token: int, logprob: float | None, top: Sequence[tuple[float, int]]
) -> None:
    """Write what an SGLang prefill server would have sent (`MetadataBuffers.set_buf`), of a token that is told."""
    buffers.output_ids[index][0] = token
    buffers.cached_tokens[index].zero_()
    buffers.output_token_logprobs_val[index][0] = logprob or 0.0
    buffers.output_token_logprobs_idx[index][0] = token
    for place, (value, other) in enumerate(top):
        buffers.output_top_logprobs_val[index][place] = value
        buffers.output_top_logprobs_idx[index][place] = other
    drafts.unknown(buffers, index)
    buffers.bootstrap_room[index][0] = room  # the scheduler takes the buffer once it finds the room here
