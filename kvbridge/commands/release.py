"""`kvbridge release`: has agents give back the prompts that nobody has claimed yet."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OperatorError
from ..local_agents import ask_release, found
from ..oneline import plain
from .console import stdout


def release(named: Sequence[str]) -> None:
    """Release the offers of the agents at these sockets, or of all on this host, and print how many.

    Raises OperatorError if one of them does not answer, after the others have.
    """
    failures: list[OperatorError] = []
    for path in named or found():
        try:
            stdout().print(plain(f"{path}: {ask_release(path)} prompts released"), markup=False, soft_wrap=True)
        except OperatorError as error:
            failures.append(error)
    if failures:
        raise failures[0] if len(failures) == 1 else OperatorError(failures[0].code, *map(str, failures))
