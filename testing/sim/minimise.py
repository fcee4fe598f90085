"""Makes a failing scenario smaller by leaving out what it does not need in order to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .run import SimListener, play
from .scenario import Scenario
from .world import ScenarioOutcome

MOST_RUNS = 2000
PLAINER: tuple[dict[str, Any], ...] = (
    {"withdraw_s": None},
    {"abandon_s": None},
    {"piece_tokens": 8},
    {"first_token": 0},
    {"twin": 0},
    {"queued_s": 0.0},
)


def minimised(scenario: Scenario, listener: SimListener) -> tuple[Scenario, ScenarioOutcome]:
    """A smaller scenario that fails too, perhaps in another way, with its story. It becomes smaller until none fails.

    Leaving something out changes the random delays, so each smaller scenario is tried with several salts.
    """
    left = MOST_RUNS

    def fails(smaller: Scenario) -> bool:
        nonlocal left
        left -= 1
        return left > 0 and bool(play(smaller, listener).failure)

    assert fails(scenario), "it does not fail"
    is_smaller = True
    while is_smaller and left > 0:
        is_smaller = False
        for smaller in _smaller(scenario):
            if (failing := _with_some_luck(smaller, fails)) is not None:
                scenario, is_smaller = failing, True
                break
    return scenario, play(scenario, listener, is_told=True)


def _with_some_luck(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario | None:
    for salt in range(6):
        salted = replace(scenario, salt=scenario.salt + salt)
        if fails(salted):
            return salted
    return None


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for fault in scenario.faults:
        yield scenario.without(faults=frozenset((fault,)))
    if len(scenario.requests) > 1:
        for request in scenario.requests:
            yield scenario.without(requests=frozenset((request.number,)))
    for sides in ("prefills", "decodes"):
        sizes: tuple[int, ...] = getattr(scenario, sides)
        if max(sizes) > 1:
            senders = tuple(replace(each, sender=each.sender[:-1] + "0") for each in scenario.requests)
            gone = frozenset(f for f in scenario.faults if any(w[0] in "pd" and w[-1] != "0" for w in f.who))
            kept = scenario.without(faults=gone)
            fewer: dict[str, Any] = {sides: (1,) * len(sizes)}
            yield replace(kept, requests=senders, **fewer)
    for request in scenario.requests:
        for changes in PLAINER:
            plainer = replace(request, **changes)
            if plainer != request:
                others = (plainer if each is request else each for each in scenario.requests)
                yield replace(scenario, requests=tuple(others))


def told(scenario: Scenario, outcome: ScenarioOutcome) -> str:
    """The story of a run, for people."""
    engines = ", ".join(f"{name} with {' and '.join(agents)}" for name, agents in scenario.engines.items())
    lines = [
        f"seed {scenario.seed}" + (f", salt {scenario.salt}" if scenario.salt else ""),
        f"engines and their agents: {engines}; {scenario.slots} slots in, {scenario.local} out, {scenario.digest}"
        + (", fences" if scenario.has_fences else "")
        + (f", {scenario.addresses} addresses each" if scenario.addresses > 1 else ""),
    ]
    for request in scenario.requests:
        extra = "".join(
            f", {what} after {seconds} s"
            for what, seconds in (("withdrawn", request.withdraw_s), ("abandoned", request.abandon_s))
            if seconds is not None
        )
        lines.append(
            f"{request.name}: tokens {request.first_token} to {request.tokens} of prompt {request.prompt}, "
            f"offered by {request.prefill} at {request.at} in pieces of {request.piece_tokens}, "
            f"wanted by {request.decode} from {request.sender} at {request.want_at}, "
            f"deadline {request.deadline_s} s, hold {request.hold_s} s{extra}"
        )
    return "\n".join(
        [*lines, "", *outcome.story, "", f"FAILED: {outcome.failure}" if outcome.failure else "all is well"]
    )
