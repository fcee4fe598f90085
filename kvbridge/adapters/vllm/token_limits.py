"""How long an answer may become that goes on from another engine: the model's generation config limits all of it.

vLLM's API server applies them to each call, and so would count anew. What a client asked for, its proxy counts itself.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from .params import ANSWERED, HAS_LIMIT


class ConfiguredLimits(NamedTuple):
    """Tokens of an answer: of all, and of those whose clients name no limit."""

    of_all: int | None
    of_unlimited: int | None


class TokenLimits:
    """`model` is vLLM's ModelConfig."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def _limits(self) -> ConfiguredLimits:
        """As vLLM 0.32's API server has them. Read when it is needed: most engines never get such an answer."""
        given = self._model.override_generation_config.get("max_new_tokens")
        source = self._model.generation_config
        unlimited = (
            given if given or source == "vllm" else self._model.try_get_generation_config().get("max_new_tokens")
        )
        return ConfiguredLimits(given if source in ("auto", "vllm") else unlimited, unlimited)

    def apply(self, request: Any) -> None:
        """Count what was answered before, if its parameters say so, and leave these as they would be without."""
        if not isinstance(params := request.kv_transfer_params, dict) or ANSWERED not in params:
            return
        rest = {name: value for name, value in params.items() if name not in (ANSWERED, HAS_LIMIT)}
        request.kv_transfer_params = rest or None
        limit = self._limits.of_all if params.get(HAS_LIMIT) else self._limits.of_unlimited
        if type(answered := params[ANSWERED]) is int and answered > 0 and limit is not None:
            request.max_tokens = min(request.max_tokens, max(1, limit - answered))
