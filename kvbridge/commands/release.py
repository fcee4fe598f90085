"""`kvbridge release`: has agents give back the prompts that nobody has claimed yet."""

from __future__ import annotations

from collections.abc import Sequence

from ..local_agents import ask_release, found, raise_any, tried
from ..oneline import plain
from .console import stdout


def release(named: Sequence[str]) -> None:
    """Release the offers of the agents at these sockets, or of all on this host, and print how many.

    Raises OperatorError if one of them does not answer, after the others have.
    """
    raise_any(tried(_release, named or found()).values())


def _release(path: str) -> None:
    stdout().print(plain(f"{path}: {ask_release(path)} prompts released"), soft_wrap=True)
