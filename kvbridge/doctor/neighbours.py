"""Starts neighbour processes, with a time limit, and always ends them."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import OperatorError

COMMAND = (sys.executable, "-m", "kvbridge.doctor.neighbour")
NEIGHBOUR_ANSWER_S = 30.0


def told(*words: str) -> str:
    """The output of a neighbour that ends by itself. Raises OperatorError (`neighbour_failed`) with its last line."""
    try:
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=NEIGHBOUR_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise OperatorError("neighbour_failed", f"{words[0]}: no answer in {NEIGHBOUR_ANSWER_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise OperatorError("neighbour_failed", lines[-1])
    return done.stdout.strip()


@contextmanager
def lender(*words: str) -> Iterator[tuple[int, str]]:
    """Run a neighbour that lends something. Yields its PID and what it printed. Raises as `told` does."""
    with subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            ready, _, _ = select.select([process.stdout], [], [], NEIGHBOUR_ANSWER_S)
            line = process.stdout.readline().strip() if ready else ""
            if not line:
                process.kill()
                lines = process.stderr.read().strip().splitlines() or [
                    f"{words[0]}: no answer in {NEIGHBOUR_ANSWER_S:g} s"
                ]
                raise OperatorError("neighbour_failed", lines[-1])
            yield process.pid, line
        finally:
            process.kill()
