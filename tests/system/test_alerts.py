"""Each alert fires in a case of its own and in no other, and does not just below its threshold, by promtool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring import ALERTS, ROOT, SCRAPE, TESTS, cases, jobs, promtool, rules
from tests.support.promql import labels, parsed, selectors
from tests.unit.test_documents import anchors

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


def is_absent(name: str) -> bool:
    """Whether the alert fires where there is nothing at all, and so not beside a fleet that is well."""
    return str(RULES[name]["expr"]).startswith("absent(")


def series(case: dict[str, Any]) -> list[str]:
    return [each["series"] for each in case["input_series"]]


@pytest.mark.parametrize("name", RULES)
def test_every_alert_has_a_case_in_which_it_alone_fires_and_one_in_which_it_does_not(name: str) -> None:
    fires = [case for case in of(name) if case["name"].startswith(f"{name} fires: ")]
    quiet = [case for case in of(name) if case not in fires]
    assert fires and quiet
    alone = [{"labels": f'{{alertname="{name}"}}', "value": 1}]
    expected = [*([[]] if "for" in RULES[name] else []), alone]
    for each in fires:
        assert [asked["exp_samples"] for asked in each["promql_expr_test"]] == expected
    for each in quiet:
        assert each["name"].startswith(f"{name} does not fire: ")
        assert series(each) in map(series, fires), "the cases differ in more than values"
        assert [asked["exp_samples"] for asked in each["promql_expr_test"]] == [[]]
    assert {asked["expr"] for each in of(name) for asked in each["promql_expr_test"]} == {FIRING}


@pytest.mark.parametrize("name", RULES)
def test_nothing_else_fires_beside_a_fleet_that_is_well(name: str, tmp_path: Path) -> None:
    assert {selector.name for selector in selectors(parsed(RULES[name]["expr"]))} <= {
        parsed(each).name for each in [*series(WELL), *(each for case in of(name) for each in series(case))]
    }
    absent = {selector.prettify() for selector in selectors(parsed(RULES[name]["expr"])) if is_absent(name)}
    others = [each for each in WELL["input_series"] if not any(text[:-1] in each["series"] for text in absent)]
    beside = [{**case, "input_series": case["input_series"] + others} for case in of(name)]
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
        selector = re.sub(r'(instance|engine)="\w+"', r'\1=~"$\1"', each)
        assert labels(parsed(selector), frozenset({"instance", "engine"}), jobs())


@pytest.mark.parametrize("name", RULES)
def test_the_runbook_of_an_alert_is_a_place_of_a_page(name: str) -> None:
    page, _, anchor = RULES[name]["annotations"]["runbook_url"].partition("#")
    assert anchor == name.lower() and anchor in anchors((ROOT / page).read_text())
