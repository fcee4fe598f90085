"""Each alert fires in a case of its own and in no other, and does not just below its threshold, by promtool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring import ALERTS, SCRAPE, TESTS, cases, job, promtool, rules
from tests.support.promql import labels, parsed, selectors

RULES = rules()
WELL, *OTHERS = cases()
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
NUMBER = re.compile(r'(?<![\w."\[])\d+(\.\d+)?(e\d+)?(?![\w"])')  # not in [5m], nor in a label's value


def of(name: str) -> list[dict[str, Any]]:
    return [case for case in OTHERS if case["name"].split()[0] == name]


def told(folder: Path, rule: dict[str, Any], *groups: dict[str, Any]) -> str:
    """What promtool has against these cases if this rule takes the place of the one of its name."""
    put = [rule if each["alert"] == rule["alert"] else each for each in RULES.values()]
    (folder / "alerts.yml").write_text(yaml.safe_dump({"groups": [{"name": "kvbridge", "rules": put}]}))
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": list(groups)}
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    return promtool("test", "rules", folder / "tests.yml")


def test_alerts_are_rules_and_pass_their_cases() -> None:
    assert promtool("check", "rules", ALERTS) == ""
    assert promtool("test", "rules", TESTS) == ""


def test_the_scrape_configuration_is_one() -> None:
    assert promtool("check", "config", SCRAPE) == ""


def test_every_case_is_one_of_an_alert() -> None:
    assert {case["name"].split()[0] for case in OTHERS} == RULES.keys()
    assert WELL["promql_expr_test"] == [{"expr": FIRING, "eval_time": "50m", "exp_samples": []}]


def series(case: dict[str, Any]) -> list[str]:
    return [each["series"] for each in case["input_series"]]


@pytest.mark.parametrize("name", RULES)
def test_every_alert_has_a_case_in_which_it_alone_fires_and_one_in_which_it_does_not(name: str) -> None:
    fires, quiet = of(name)
    assert fires["name"].startswith(f"{name} fires: ") and quiet["name"].startswith(f"{name} does not fire: ")
    assert series(fires) == series(quiet), "the cases differ in more than values"
    asked = [*fires["promql_expr_test"], *quiet["promql_expr_test"]]
    assert {each["expr"] for each in asked} == {FIRING}
    alone = [{"labels": f'{{alertname="{name}"}}', "value": 1}]
    assert [each["exp_samples"] for each in asked] == [*([[]] if "for" in RULES[name] else []), alone, []]


@pytest.mark.parametrize("name", RULES)
def test_nothing_else_fires_beside_a_fleet_that_is_well(name: str, tmp_path: Path) -> None:
    assert {selector.name for selector in selectors(parsed(RULES[name]["expr"]))} <= {
        parsed(each).name for each in [*series(WELL), *(each for case in of(name) for each in series(case))]
    }
    beside = [{**case, "input_series": case["input_series"] + WELL["input_series"]} for case in of(name)]
    assert told(tmp_path, RULES[name], *beside) == ""


@pytest.mark.parametrize("name", RULES)
def test_a_threshold_that_is_a_tenth_off_is_seen(name: str, tmp_path: Path) -> None:
    expr = RULES[name]["expr"]
    for number in NUMBER.finditer(expr):
        value = float(number[0])
        for other in (value * 1.1, value * 0.9) if value else (2, -1):
            changed = f"{expr[: number.start()]}{other}{expr[number.end() :]}"
            assert "got:" in told(tmp_path, RULES[name] | {"expr": changed}, WELL, *of(name)), changed


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if "for" in rule])
def test_a_time_that_is_off_is_seen(name: str, tmp_path: Path) -> None:
    minutes = int(RULES[name]["for"].removesuffix("m"))
    for other in (minutes - 1, minutes + 1):
        assert "got:" in told(tmp_path, RULES[name] | {"for": f"{other}m"}, *of(name)), other


def test_the_cases_are_about_series_that_agents_have() -> None:
    for each in {each for case in [WELL, *OTHERS] for each in series(case)}:
        selector = re.sub(r'instance="\w+"', 'instance=~"$instance"', each)
        assert labels(parsed(selector), frozenset({"instance"}), job())
