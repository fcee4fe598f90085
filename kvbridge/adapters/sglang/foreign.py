"""Requests whose other half runs in another kind of engine: reads what the router says in `custom_params["kvbridge"]`.

Two SGLang servers talk over SGLang's own sockets. Another engine has no such sockets. So the router that pairs it with
SGLang writes here what that engine has answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from kvbridge_proto.common import Address
from msgspec import Meta

from ...errors import EngineError
from .messages import Text

HOST = "kvbridge"  # the `bootstrap_host` of a request whose prompt another engine has prefilled
KEY = "kvbridge"  # in `custom_params`
MOST_LOGPROBS = 128  # as many as SGLang's buffers have room for


class Prefilled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For the decode side: where the prompt's KV is, and the token that follows it.

    `sender` is the address of one of the other engine's agents, `rendezvous` the id under which it offers the prompt,
    if it has told one. `top_logprobs` is JSON text, [[log probability, token], ...], best first, because SGLang passes
    on only numbers and text.
    """

    sender: Address
    first_token: int
    rendezvous: Text = ""
    logprob: float | None = None
    top_logprobs: Annotated[str, Meta(max_length=1 << 16)] = ""


class Fetched(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For the prefill side: another engine fetches the prompt. Its agent asks ours; no decode server asks first."""

    fetched_by: Text


def prefilled(req: Any, vocabulary: int) -> tuple[Prefilled, list[tuple[float, int]]]:
    """Read a decode request's `Prefilled` and its `top_logprobs`. Raises EngineError `bad_params`."""
    said: Prefilled = _read(req, Prefilled)
    top: list[tuple[float, int]] = []
    if said.top_logprobs:
        top = _convert("top_logprobs", lambda: msgspec.json.decode(said.top_logprobs, type=list[tuple[float, int]]))
    if len(top) > MOST_LOGPROBS:
        raise _bad(f"top_logprobs: {len(top)}, limit {MOST_LOGPROBS}")
    for token in (said.first_token, *(token for _, token in top)):  # other ids are outside of the model's embeddings
        if not 0 <= token < vocabulary:
            raise _bad(f"token {token}: must be in [0, {vocabulary})")
    if not all(map(math.isfinite, [said.logprob or 0.0, *(value for value, _ in top)])):
        raise _bad("log probabilities must be finite")
    if req.return_logprob:
        if said.logprob is None:
            raise _bad("logprob: log probabilities were asked for, and the first token's is not told")
        if (asked := req.logprob.top_logprobs_num) > len(top):
            raise _bad(f"top_logprobs: {len(top)} of the first token are told, {asked} were asked for")
    if getattr(req, "return_sampling_mask", False):
        raise _bad("return_sampling_mask: another engine's prefill has none")
    return said, top


def is_fetched_elsewhere(req: Any) -> bool:
    """Whether another engine fetches what this prefill side computes. Raises EngineError `bad_params`."""
    if _said(req) is None:
        return False
    _read(req, Fetched)
    return True


def shorten(req: Any) -> None:
    """Have a prompt computed without its last token, before it is scheduled, as the other engine wants its state.

    vLLM computes that token itself, from the state before it, and a state cannot go back. Who sent the request uses
    nothing of SGLang's answer. One token alone stays: nobody fetches it.
    """
    if len(req.origin_input_ids) > 1:
        req.origin_input_ids = req.origin_input_ids[:-1]
        req.logprob_start_len = min(req.logprob_start_len, len(req.origin_input_ids))


def custom_params(req: Any) -> Any:
    """The client's own parameters, unchecked: they may be anything."""
    return getattr(getattr(req, "sampling_params", None), "custom_params", None)


def _said(req: Any) -> Any:
    params = custom_params(req)
    return params.get(KEY) if isinstance(params, dict) else None


def _read(req: Any, kind: Any) -> Any:
    return _convert(f"custom_params[{KEY!r}]", lambda: msgspec.convert(_said(req), kind))


def _convert(name: str, convert: Callable[[], Any]) -> Any:
    try:
        return convert()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _bad(f"{name}: {error}") from None


def _bad(reason: str) -> EngineError:
    return EngineError("bad_params", reason)
