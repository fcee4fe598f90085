"""The engine's own span, as a request carries it (W3C Trace Context). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


def traceparent(*told: object) -> str:
    """The first valid `traceparent` in these mappings, or "". A client may have put anything there."""
    for each in told:
        said = each.get("traceparent") if isinstance(each, Mapping) else None
        if isinstance(said, str) and _TRACEPARENT.fullmatch(said):
            return said
    return ""
