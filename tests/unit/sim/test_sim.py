"""Simulated schedules: those that failed once, a fixed slice of all, and that a seed determines a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer

from testing.sim.__main__ import search
from testing.sim.minimise import minimised, told
from testing.sim.run import PART, SimListener, outcomes, play, prepared
from testing.sim.scenario import DRAFTED, MUTUAL, PULLED, SHARED, STATED, Scenario, as_text, from_text, make
from testing.sim.world import TOLD
from tests.unit.sim.mutations import switched_off
from tests.unit.sim.noticed import noticed

SLICE = 1200
PULLED_SLICE = 400
DRAFTED_SLICE = STATED_SLICE = 200
MUTUAL_SLICE = SHARED_SLICE = 150


@pytest.fixture(scope="module")
def listener() -> Iterator[SimListener]:
    with prepared() as heard:
        yield heard


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A scenario that failed once, or fails without a rule: what it is about, without which rule it fails, and how.

    It is kept whole, for what a seed makes changes with testing/sim/scenario.py. Its delays are drawn in the run: if
    another order of these hides the failure, take another seed's (`python -m tests.unit.sim.noticed`).
    """

    why: str
    without: str
    how: str
    scenario: Scenario


CORPUS = [msgspec.json.decode(line, type=Kept) for line in Path(__file__).with_name("corpus.jsonl").open()]


@pytest.mark.parametrize("kept", CORPUS, ids=lambda kept: str(kept.scenario.seed))
def test_what_failed_once_does_not_fail_again(listener: SimListener, kept: Kept) -> None:
    """And would without the rule: it is still about what it was kept for."""
    assert not play(kept.scenario, listener).failure
    with switched_off(kept.without):
        assert re.search(kept.how, play(kept.scenario, listener).failure, re.DOTALL)


def test_a_scenario_is_kept_as_text() -> None:
    for seed in range(100):
        assert from_text(as_text(make(seed))) == make(seed)


def assert_most_are_done(first: int, seeds: int) -> None:
    """No schedule fails, most wants are served, and much goes wrong: else these would test little."""
    ends: Counter[str] = Counter()
    for seed, outcome in outcomes(first, seeds):
        assert not outcome.failure, f"python -m testing.sim --first {seed} --seeds 1"
        ends.update(end for _, end in outcome.ends.values())
    assert ends["done"] > seeds and len(ends) > 8, ends


@pytest.mark.proves("G1", "G20")
@pytest.mark.parametrize("part", range(6))
def test_nothing_is_lost_corrupted_or_stuck(part: int) -> None:
    """A fixed slice; `python -m testing.sim` plays more."""
    assert_most_are_done(part * SLICE // 6, SLICE // 6)


@pytest.mark.proves("G3")
@pytest.mark.parametrize("part", range(2))
def test_what_is_pulled_is_not_lost_corrupted_or_stuck_either(part: int) -> None:
    assert_most_are_done(PULLED + part * PULLED_SLICE // 2, PULLED_SLICE // 2)


@pytest.mark.proves("G7", "G15")
@pytest.mark.parametrize("first", [DRAFTED, DRAFTED + PULLED], ids=["sent", "pulled"])
def test_layers_that_only_the_receiver_has_are_zeros_once_all_is_done(first: int) -> None:
    """Zeros are written behind the fence, before Done, into blocks that are still wanted; and all end."""
    assert_most_are_done(first, DRAFTED_SLICE)


@pytest.mark.proves("G7", "G13")
@pytest.mark.parametrize("first", [STATED, STATED + PULLED], ids=["sent", "pulled"])
def test_a_state_comes_as_it_was_when_it_was_offered_though_the_engine_goes_on(first: int) -> None:
    assert_most_are_done(first, STATED_SLICE)


@pytest.mark.proves("G1", "G20")
@pytest.mark.parametrize("first", [MUTUAL, MUTUAL + PULLED, MUTUAL + PULLED + STATED], ids=["sent", "pulled", "states"])
def test_engines_fetch_from_each_other_and_hear_what_is_kept_and_when_no_longer(first: int) -> None:
    """Each agent is sender and receiver at once, of the same other agents."""
    assert_most_are_done(first, MUTUAL_SLICE)


@pytest.mark.proves("G1", "G7", "G13", "G20")
@pytest.mark.parametrize("first", [SHARED, SHARED + PULLED], ids=["sent", "pulled"])
def test_answers_move_and_several_fetch_at_once_what_an_engine_keeps_or_one_fetches(first: int) -> None:
    assert_most_are_done(first, SHARED_SLICE)


def test_several_processes_play_what_one_plays_and_add_their_figures_to_a_file(tmp_path: Path) -> None:
    kept = tmp_path / "sim.json"
    for jobs in ("1", "3"):
        done = subprocess.run(
            [sys.executable, "-m", "testing.sim", "--seeds", "7", "--jobs", jobs, "--out", str(kept)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert re.fullmatch(r"7 schedules, \d+ events in .* a process; 0 failed\n", done.stdout)
    found = msgspec.json.decode(kept.read_bytes())
    one, several = found["runs"]
    for field in ("commit", "cpu", "seeds", "schedules", "events", "failures", "wants_ended", "faults"):
        assert one[field] == several[field]
    assert one["seeds"] == [[0, 7]] and found["total"] == {
        "schedules": 14,
        "failed": 0,
        "schedules_by_commit": {one["commit"]: 14},
    }


def test_a_finding_is_told_kept_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "free_quarantined_at_once"
    failing = noticed(rule, 500)
    assert failing is not None
    with switched_off(rule), pytest.raises(typer.Exit) as ended:
        search(failing[0], 2, out=tmp_path / "sim.json")
    assert ended.value.exit_code == 1
    (run,) = msgspec.json.decode((tmp_path / "sim.json").read_bytes())["runs"]
    assert {"seed": failing[0], "failure": failing[1]} in run["failures"] and run["failed"] == len(run["failures"])
    said = capsys.readouterr()
    assert f"seed {failing[0]} failed: {failing[1]}" in said.err and "to keep: " in said.err
    assert said.out.endswith(f"{run['failed']} failed\n")


def test_a_search_ends_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    search(0, 10**9, seconds=0.0)
    assert capsys.readouterr().out.startswith(f"{PART} schedules")


def test_a_seed_is_all_there_is_to_a_run() -> None:
    """Another process, with other hashes and another clock, tells the same story to the last word."""
    stories = []
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "testing.sim", "--story", "11"],
            env=os.environ | {"PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        )
        stories.append(done.stdout)
    assert stories[0] == stories[1] and "Claim" in stories[0]


def test_a_story_tells_the_block_tables_of_what_is_pulled(listener: SimListener) -> None:
    scenario = make(PULLED)
    story = told(scenario, play(scenario, listener, is_told=True))
    assert re.search(r"p\d\d +-> d\d\d: BlockTables transfer=\w+ .*blocks=\[group 0 from 0: \d+", story), story
    fields = {kind: set(kind.__struct_fields__) for kind in TOLD}
    assert all(set(names) <= fields[kind] for kind, names in TOLD.items())


def test_a_failure_is_made_small_and_told(listener: SimListener) -> None:
    rule = "free_quarantined_at_once"
    failing = noticed(rule, 500)
    assert failing is not None
    scenario = make(failing[0])
    with switched_off(rule):
        smaller, outcome = minimised(scenario, listener)
    assert outcome.failure and len(smaller.requests) <= len(scenario.requests)
    assert len(smaller.requests) <= 2 and len(smaller.faults) <= 1
    story = told(smaller, outcome)
    assert re.search(r"d\d\d +-> p\d\d: Claim", story) and story.endswith(f"FAILED: {outcome.failure}")
