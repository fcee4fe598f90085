"""How soon, and how, the simulator notices that a rule is switched off: `python -m tests.unit.sim.missed [SEEDS]`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sim.run import play, prepared
from sim.scenario import PULLED, Fault, FaultKind, Scenario, SimRequest, from_text, make
from tests.unit.sim.mutations import MUTATIONS, switched_off

LENT_TWICE = "a slot that is free, .* was written"
FOREIGN = "waste .* where prompt .* belongs"
UNWANTED = "was written while nobody wanted it"
FORGED = "a forged notice counted: .*"
NO_OTHER_END = "a session over the link with .* that is none at its other end"
READ_WRONG = "is done, but has"
LATE = "when all was well again: failed"
MEANWHILE = "while another agent stood still: failed"
# The seed to look at first, which showed it when this was written, and how; the rest is looked through if it does not.
KNOWN = {
    "a lease's generation is not looked at": (42, FORGED + "generation=1073741824"),
    "doubtful slots are free at once": (5, LENT_TWICE),
    "no digest": (8, FOREIGN),
    "a notice's token is not looked at": (249, FORGED + "token=b'forged"),
    "a notice's sender incarnation is not looked at": (685, FORGED + "sender_incarnation='feed"),
    "a notice's receiver incarnation is not looked at": (109, FORGED + "receiver_incarnation='feed"),
    "a notice's sender epoch is not looked at": (109, FORGED + "sender_epoch=99"),
    "a notice's receiver epoch is not looked at": (54, FORGED + "receiver_epoch=99"),
    "a notice's size is not looked at": (449, FORGED + "chunk_bytes=1,"),
    "blocks are released while they are read": (11, FOREIGN),
    "tokens before an offer are given": (135, "(waste .*|nothing) where prompt .* belongs"),
    "the fence is not waited for": (18, FOREIGN),
    "what was read while nobody listened counts": (560, FOREIGN),
    "what the engine has said is not waited for": (560, FOREIGN),
    "drained is said while writes are under way": (1, LENT_TWICE),
    "drained is said of a lost session whatever it writes": (5, LENT_TWICE),
    "a lost link counts as a dead sender": (140, LENT_TWICE),
    "failed is said while rows are scattered": (3, UNWANTED),
    "an engine is let go while its memory is used": (121, UNWANTED),
    "an engine that has given its agent up waits for no reader": (3120, FOREIGN),
    "a killed agent's socket and its kernels end together": (2434, UNWANTED),
    "an agent lets go without a word": (6, "has closed its end without a word"),
    "done is said one chunk too soon": (5, "is done, but has waste"),
    "a lost transfer's slots are forgotten": (36, LATE),
    "a sender that refuses is not asked": (201, r"slots: .*quarantined=[1-9]"),
    "an agent without an engine dials": (399, "a session with .* that is NEW"),
    "slots in doubt are freed where they are": (140, LENT_TWICE),
    "whoever says Hello last has the session": (125, LATE),
    "what a want that has ended was to receive is scattered": (3, UNWANTED),
    "what has ended waits for a fence": (41, "which is over, waits for a fence"),
    "what is to stop is sent": (19, LENT_TWICE),
    "blocks are said to be read no more while they are": (11, FOREIGN),
    "offers that have ended are forgotten": (18, "waited .* for an offer that had ended"),
    "a route outlives its session": (5, "targets .*, sessions"),
    "a probe's lane is kept": (0, "lanes that are out"),
    "memory of an engine that left stays mapped": (2, "the memory of .* is mapped"),
    "slots in doubt stay so while their sender stands still": (97, MEANWHILE),
    "slots to gather into stay stuck while their receiver stands still": (3601, MEANWHILE),
    "messages are not counted": (3611, LATE),
    "a session is given up without a word": (2, NO_OTHER_END),
    "a successor is not believed": (255, r"slots: .*quarantined=[1-9]"),
    "of two addresses the slower does not wait": (2189, NO_OTHER_END),
    "a chunk is written before it is gathered": (2, "nothing where prompt .* belongs"),
    "a slot to gather into is used again before its write has ended": (
        7,
        "a digest was wrong, and nothing had spoiled",
    ),
    "what was read after its lease counts": (PULLED + 11, READ_WRONG),
    "a lease begins when it is answered": (PULLED + 3, READ_WRONG),
    "a renewal counts that nobody answered": (PULLED + 3, READ_WRONG),
    "the clock is looked at before the read ends": (PULLED + 85, READ_WRONG),
    "a sender promises what it has not listened for": (PULLED + 20, READ_WRONG),
    "a promise is not waited for": (PULLED + 0, READ_WRONG),
    "an engine detaches while it is read": (PULLED + 3, READ_WRONG),
    "an engine whose agent died waits for no reader": (PULLED + 4, READ_WRONG),
    "an engine takes back sooner than it may": (PULLED + 6, READ_WRONG),
    "readers do not wait for the fence": (PULLED + 2, READ_WRONG),
    "memory is unmapped while it is read": (PULLED + 3, "through a mapping that is closed"),
    "what was read is not compared": (PULLED, READ_WRONG),
    "blocks are released while they are digested": (PULLED + 7, "and nothing had spoiled what was read"),
    "scattered is said before rows are": (110, UNWANTED),
}
BROKEN = re.compile(r"\b(Type|Attribute|Name)Error\(")


class Broken(AssertionError):
    """A rule is not switched off: the code that should do so does not fit the code that it is put into."""


def _left_soon(scenario: Scenario) -> Scenario:
    """Every decoding engine leaves soon after each want, while rows are scattered."""
    faults = [Fault(request.want_at + 0.004, "detach", (request.decode,)) for request in scenario.requests]
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _as_once(name: str) -> Callable[[Scenario], Scenario]:
    """The scenario that is kept of this rule, with other delays."""
    lines = map(json.loads, Path(__file__).with_name("corpus.jsonl").open())
    kept = from_text(json.dumps(next(line["scenario"] for line in lines if line["without"] == name)))
    return lambda scenario: replace(kept, salt=scenario.seed)


Shape = Callable[[Scenario], Scenario]


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
    return _uncompared(scenario)


def _uncompared(scenario: Scenario) -> Scenario:
    """Or a digest finds what a lease is against."""
    return replace(scenario, verify="never")


def _pairs(scenario: Scenario, request: SimRequest) -> list[tuple[str, str]]:
    senders, receivers = scenario.engines[request.prefill], scenario.engines[request.decode]
    return [(sender, receiver) for sender in senders for receiver in receivers]


def _unheard(kind: FaultKind | None, is_impatient: bool = False) -> Shape:
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


def _answered_late(scenario: Scenario) -> Scenario:
    """Answers come when the lease is over. Renewals do not arrive, nor what is said then of what is withdrawn."""
    requests, faults = _asked(scenario, 0.3, 0.76), []
    for each in requests[1:]:  # the first opens the sessions
        at = each.want_at
        for sender, receiver in _pairs(scenario, each):
            faults += [Fault(at - 0.002, "half-open", (sender, receiver), 0.44)]
            faults += [Fault(at + 0.445, "half-open", (sender, receiver), 0.5)]
            faults += [Fault(at + 0.1, "half-open", (receiver, sender), 0.85)]
    return _troubled(scenario, requests, faults, is_impatient=False)


def _asked_unheard(scenario: Scenario) -> Scenario:
    """Senders' loops stand still while their engines withdraw what is offered, take it back, and it is claimed."""
    requests = _asked(scenario, 1.2, 0.06)
    faults = [
        Fault(each.at + 0.05, "freeze loop", (name,), 1.25)
        for each in requests[1:]  # the first opens the sessions
        for name in scenario.engines[each.prefill]
    ]
    return _troubled(scenario, requests, faults, is_impatient=True)


def _spoiled(scenario: Scenario) -> Scenario:
    """Something of each request is read wrong, and all of it is compared."""
    requests = _asked(scenario, 0.3, None)
    faults = [Fault(each.want_at, "spoil", ()) for each in requests]
    return replace(_troubled(scenario, requests, faults, is_impatient=False), verify="always")


def _withdrawn_while_compared(scenario: Scenario) -> Scenario:
    requests = _asked(scenario, 0.3, 0.303)
    return replace(_troubled(scenario, requests, [], is_impatient=False), verify="always")


# What shows too rarely in any schedule shows soon in these.
SHAPED = {
    "an engine is let go while its memory is used": _left_soon,
    "a lease begins when it is answered": _answered_late,
    "a renewal counts that nobody answered": _answered_late,
    "a promise is not waited for": _unheard(None),
    "an engine detaches while it is read": _unheard("detach"),
    "an engine whose agent died waits for no reader": _unheard("kill agent"),
    "an engine takes back sooner than it may": _unheard("freeze loop", is_impatient=True),
    "a sender promises what it has not listened for": _asked_unheard,
    "what was read after its lease counts": _uncompared,
    "the clock is looked at before the read ends": _uncompared,
    "readers do not wait for the fence": _uncompared,
    "what was read is not compared": _spoiled,
    "blocks are released while they are digested": _withdrawn_while_compared,
    "a session is given up without a word": _as_once("a session is given up without a word"),
}


def missed(name: str, most: int, first: int = 0, how: str = "") -> tuple[int, str] | None:
    """The first seed that fails in this way without this rule, and the failure; None if none of `most` does."""
    shape = SHAPED.get(name, lambda scenario: scenario)
    with switched_off(name), prepared() as listener:
        for seed in range(first, first + most):
            failure = play(shape(make(seed)), listener).failure
            if BROKEN.search(failure):
                raise Broken(f"{name}: {failure}")
            if failure and re.search(how, failure, re.DOTALL):
                return seed, failure
    return None


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for name in MUTATIONS:
        began = time.perf_counter()
        seed = missed(name, most, how=KNOWN[name][1] if name in KNOWN else "")
        print(f"{name}: {seed or 'NOT FOUND'} ({time.perf_counter() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
