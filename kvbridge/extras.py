"""Says which extra of the wheel has a package that is not installed."""

from __future__ import annotations

EXTRAS = {"aiohttp": "proxy", "opentelemetry": "otel"}
EXTRA = "this needs the packages of the {0}: pip install 'kvbridge[{0}]' (missing: {1})"


def missing(error: ModuleNotFoundError) -> str:
    """The message for the operator. Raises the error again if a module of ours is missing: that is a bug."""
    if error.name is None or error.name.partition(".")[0].startswith("kvbridge"):
        raise error
    extra = EXTRAS.get(error.name.partition(".")[0], "agent")
    return f"kvbridge: {EXTRA.format(extra, error.name)}"
