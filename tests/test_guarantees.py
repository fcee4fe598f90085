"""GUARANTEES.md: every promise names tests, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "GUARANTEES.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_promise_names_a_test() -> None:
    promises = PAGE.read_text().partition("## Not promised")[0].split("\n### ")[1:]
    assert len(promises) > 10
    for promise in promises:
        assert NAMED.search(promise), f"no test: {promise.splitlines()[0]}"


def test_every_test_that_is_named_is_there() -> None:
    for path, name in NAMED.findall(PAGE.read_text()):
        tree = ast.parse((ROOT / path).read_text())
        names = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert not name or name in names, f"{path} has no {name}"
