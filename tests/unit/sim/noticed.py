"""Whether, and how, the simulator notices that a rule is switched off: `python -m tests.unit.sim.noticed [SEEDS]`."""

from __future__ import annotations

import re
import sys
import time

from testing.sim.run import play, prepared
from testing.sim.scenario import KINDS, make
from tests.unit.sim.mutations import MUTATIONS, switched_off

BROKEN = re.compile(r"\b(Type|Attribute|Name)Error\(")


class Broken(AssertionError):
    """A rule is not switched off: the code that should do so does not fit the code that it is put into."""


def noticed(name: str, most: int, first: int = 0, how: str = "") -> tuple[int, str] | None:
    """The first seed that fails in this way without this rule, and the failure; None if none of `most` does."""
    with switched_off(name), prepared() as listener:
        for seed in range(first, first + most):
            failure = play(MUTATIONS[name].shape(make(seed)), listener).failure
            if BROKEN.search(failure):
                raise Broken(f"{name}: {failure}")
            if failure and re.search(how, failure, re.DOTALL):
                return seed, failure
    return None


def found(name: str, most: int) -> tuple[int, str] | None:
    """A seed that fails without this rule, and how: the known one, or else the first of `most` of its kind."""
    rule = MUTATIONS[name]
    return noticed(name, 1, rule.seed, rule.how) or noticed(name, most, rule.seed & KINDS, rule.how)


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for name in MUTATIONS:
        began = time.perf_counter()
        seed = found(name, most)
        print(f"{name}: {seed or 'NOT FOUND'} ({time.perf_counter() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
