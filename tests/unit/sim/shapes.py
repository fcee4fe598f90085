"""Scenarios in which something shows soon that shows too rarely in any schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from testing.sim.scenario import Fault, FaultKind, Scenario, SimRequest, from_text

Shape = Callable[[Scenario], Scenario]


def same(scenario: Scenario) -> Scenario:
    return scenario


def left_soon(scenario: Scenario) -> Scenario:
    """Every decoding engine leaves soon after each want, while rows are scattered."""
    faults = [Fault(request.want_at + 0.004, "detach", (request.decode,)) for request in scenario.requests]
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def as_once(name: str) -> Callable[[Scenario], Scenario]:
    """The scenario that is kept of this rule, with other delays."""
    lines = map(json.loads, Path(__file__).with_name("corpus.jsonl").open())
    kept = from_text(json.dumps(next(line["scenario"] for line in lines if line["without"] == name)))
    return lambda scenario: replace(kept, salt=scenario.seed)


def _asked(scenario: Scenario, after_s: float, withdraw_s: float | None) -> tuple[SimRequest, ...]:
    """Its requests far from each other: each offered whole, wanted so long after that, and withdrawn."""
    return tuple(
        replace(
            each,
            at=0.2 + 1.6 * i,
            want_at=0.2 + 1.6 * i + after_s,
            tokens=8,
            piece_tokens=8,
            first_token=0,
            offered_from=0,
            queued_s=0.0,
            deadline_s=2.0,
            hold_s=3.0,
            withdraw_s=withdraw_s,
            abandon_s=None,
            twin=0,
        )
        for i, each in enumerate(scenario.requests)
    )


def _troubled(
    scenario: Scenario, requests: tuple[SimRequest, ...], faults: list[Fault], is_impatient: bool
) -> Scenario:
    faults = sorted(faults, key=lambda fault: fault.at)
    scenario = replace(scenario, requests=requests, faults=tuple(faults), is_impatient=is_impatient)
    return uncompared(scenario)


def uncompared(scenario: Scenario) -> Scenario:
    """Or a digest finds what a lease is against."""
    return replace(scenario, verify="never")


def _pairs(scenario: Scenario, request: SimRequest) -> list[tuple[str, str]]:
    senders, receivers = scenario.engines[request.prefill], scenario.engines[request.decode]
    return [(sender, receiver) for sender in senders for receiver in receivers]


def unheard(kind: FaultKind | None, is_impatient: bool = False) -> Shape:
    """Soon after each answer its receiver hears nothing more. Meanwhile what it reads is withdrawn, or this happens."""

    def shaped(scenario: Scenario) -> Scenario:
        requests = _asked(scenario, 0.3, 0.35 if kind in (None, "freeze loop") else None)
        faults = []
        for each in requests:
            faults += [Fault(each.want_at + 0.002, "half-open", pair, 0.6) for pair in _pairs(scenario, each)]
            who = [each.prefill] if kind == "detach" else scenario.engines[each.prefill]
            faults += [Fault(each.want_at + 0.02, kind, (name,), 1.2) for name in who if kind is not None]
        return _troubled(scenario, requests, faults, is_impatient)

    return shaped


def answered_late(scenario: Scenario) -> Scenario:
    """Answers come when the lease is over. Renewals do not arrive, nor what is said then of what is withdrawn."""
    requests, faults = _asked(scenario, 0.3, 0.76), []
    for each in requests[1:]:  # the first opens the sessions
        at = each.want_at
        for sender, receiver in _pairs(scenario, each):
            faults += [Fault(at - 0.002, "half-open", (sender, receiver), 0.44)]
            faults += [Fault(at + 0.445, "half-open", (sender, receiver), 0.5)]
            faults += [Fault(at + 0.1, "half-open", (receiver, sender), 0.85)]
    return _troubled(scenario, requests, faults, is_impatient=False)


def asked_unheard(scenario: Scenario) -> Scenario:
    """Senders' loops stand still while their engines withdraw what is offered, take it back, and it is claimed."""
    requests = _asked(scenario, 1.2, 0.06)
    faults = [
        Fault(each.at + 0.05, "freeze loop", (name,), 1.25)
        for each in requests[1:]  # the first opens the sessions
        for name in scenario.engines[each.prefill]
    ]
    return _troubled(scenario, requests, faults, is_impatient=True)


def offered_again(scenario: Scenario) -> Scenario:
    """Prompts are offered, taken back, wanted once another has their blocks, and only then offered again."""
    first, *others = _asked(scenario, 0.3, None)
    requests = [first]  # opens the sessions
    for i, (gone, other, again) in enumerate(zip(*(others[each::3] for each in range(3)), strict=False)):
        at, pair = 2.0 + 1.6 * i, {"prefill": first.prefill, "decode": first.decode, "sender": first.sender}
        requests += [
            replace(gone, **pair, at=at, withdraw_s=0.1, want_at=at + 0.4),
            replace(other, **pair, at=at + 0.2, want_at=at + 1.2),
            replace(again, **pair, at=at + 0.7, want_at=at + 1.2, twin=gone.number),
        ]
    return _troubled(scenario, tuple(requests), [], is_impatient=False)


def spoiled(scenario: Scenario) -> Scenario:
    """Something of each request is read wrong, and all of it is compared."""
    requests = _asked(scenario, 0.3, None)
    faults = [Fault(each.want_at, "spoil", ()) for each in requests]
    return replace(_troubled(scenario, requests, faults, is_impatient=False), verify="always")


def withdrawn_while_compared(scenario: Scenario) -> Scenario:
    requests = _asked(scenario, 0.3, 0.303)
    return replace(_troubled(scenario, requests, [], is_impatient=False), verify="always")


def kept_until_read(scenario: Scenario) -> Scenario:
    """All is kept, and taken back while it is read."""
    requests = tuple(replace(each, is_kept=True) for each in _asked(_unmoved(scenario), 0.3, None))
    faults = [
        Fault(each.want_at - 0.001, "preempt", (name,), 0.3)
        for each in requests
        for name in scenario.engines[each.prefill]
    ]
    return _troubled(scenario, requests, faults, is_impatient=False)


def kept_at_once(scenario: Scenario) -> Scenario:
    """All is kept, and wanted already when it is offered."""
    requests = tuple(replace(each, is_kept=True) for each in _asked(_unmoved(scenario), 0.0, None))
    return replace(_troubled(scenario, requests, [], is_impatient=False), has_fences=True)


def _unmoved(scenario: Scenario) -> Scenario:
    return scenario.without(frozenset(each.number for each in scenario.requests if each.begins_as or each.joins))
