"""Options of the SGLang adapter, read once from the environment of SGLang's processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from ..engine.options import EngineOptions

PREFIX = "KVBRIDGE_ENGINE_"
# Variables that Kubernetes sets in every pod for services whose names begin with kvbridge-engine.
SERVICE = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_\w+)?")


class SGLangOptions(EngineOptions, frozen=True, kw_only=True):
    """Those of `EngineOptions`. In the environment: `KVBRIDGE_ENGINE_` and the name in capitals.

    Users have commas between them, and true is 1, false 0. All other timeouts are SGLang's own.
    """

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SGLangOptions:
        """Raises OperatorError for an unknown name or a bad value."""
        ours = {
            variable: text
            for variable, text in environment.items()
            if variable.startswith(PREFIX) and not SERVICE.fullmatch(variable)
        }
        return cls.checked(ours, lambda name: PREFIX + name.upper(), _read)


def _read(text: str, default: object) -> object:
    match default:
        case bool():
            if text not in ("0", "1"):
                raise ValueError("0 or 1")
            return text == "1"
        case float():
            with suppress(ValueError):
                return float(text)
        case tuple():
            uids = [part.strip() for part in text.split(",") if part.strip()]
            if not all(uid.isdecimal() for uid in uids):
                raise ValueError("users' numbers with commas between them")
            return [int(uid) for uid in uids]
    return text
