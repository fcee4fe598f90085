"""Options of the SGLang adapter, read once from the environment of SGLang's processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..engine.options import EngineOptions

PREFIX = "KVBRIDGE_ENGINE_"
# Variables that Kubernetes sets in every pod for services whose names begin with kvbridge-engine.
SERVICE = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_\w+)?")


class SGLangOptions(EngineOptions, frozen=True, kw_only=True):
    """In the environment: `KVBRIDGE_ENGINE_` and the name in capitals; users with commas between them, 1 or 0.

    All other timeouts are SGLang's own.
    """

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SGLangOptions:
        """Raises OperatorError for an unknown name or a bad value."""
        ours = {
            variable.removeprefix(PREFIX).lower(): text
            for variable, text in environment.items()
            if variable.startswith(PREFIX) and not SERVICE.fullmatch(variable)
        }
        return cls.checked(ours, lambda name: PREFIX + name.upper(), is_text=True)
