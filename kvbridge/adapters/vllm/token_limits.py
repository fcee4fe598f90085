"""How long an answer may become that goes on from another engine: the model's generation config limits all of it.

vLLM's API server applies them to each call, and so would count anew. What a client asked for, its proxy counts itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.logger import init_logger

from ...oneline import OneLine
from .params import ANSWERED, HAS_LIMIT

log = init_logger("vllm.kvbridge.limits")
log.addFilter(OneLine())


class ConfiguredLimits(NamedTuple):
    """Tokens of an answer: of all, and of those whose clients name no limit."""

    of_all: int | None
    of_unlimited: int | None


class TokenLimits:
    """`model` is vLLM's ModelConfig. Its generation config is read at once: a hub may be slow, or away."""

    def __init__(self, model: Any) -> None:
        try:
            self._limits = _configured(model)
        except Exception as error:  # such as a hub that cannot be reached; vLLM's own server looks, too
            log.warning("the model's generation config cannot be read, so it limits no answer that goes on: %s", error)
            self._limits = ConfiguredLimits(None, None)

    def apply(self, request: Any) -> None:
        """Count what was answered before, if its parameters say so, and leave these as they would be without."""
        if not isinstance(params := request.kv_transfer_params, dict) or ANSWERED not in params:
            return
        rest = {name: value for name, value in params.items() if name not in (ANSWERED, HAS_LIMIT)}
        request.kv_transfer_params = rest or None
        limit = self._limits.of_all if params.get(HAS_LIMIT) else self._limits.of_unlimited
        if type(answered := params[ANSWERED]) is int and answered > 0 and limit is not None:
            request.max_tokens = min(request.max_tokens, max(1, limit - answered))


def _configured(model: Any) -> ConfiguredLimits:
    """As vLLM 0.32's API server has them."""
    given, source = model.override_generation_config.get("max_new_tokens"), model.generation_config
    unlimited = given if given or source == "vllm" else model.try_get_generation_config().get("max_new_tokens")
    return ConfiguredLimits(given if source in ("auto", "vllm") else unlimited, unlimited)
