"""Finds the tests that pages name (`tests/path.py::test`, or a whole file), whether they exist, and what they need."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# How pages write a marker of pyproject.toml, in parentheses after the test.
NEEDS = {
    "gpu": "GPU",
    "multi_gpu": "GPUs",
    "vllm": "vLLM",
    "routers": "vLLM",
    "sglang": "SGLang",
    "cross": "both",
}
# Also finds a bare file name, which then is not the path of any file.
NAMED = re.compile(
    r"(?P<path>\b(?:\w[\w/]*/)?test_\w+\.py)(?:::(?P<test>\w+))?"
    rf"(?:`\s+\((?P<said>{'|'.join(NEEDS.values())}))?"
)


@dataclass(frozen=True, slots=True)
class Cited:
    """A test that a page names. `test` is empty for a whole file. `said` is the need that the page states, or empty."""

    path: str
    test: str
    said: str

    @property
    def exists(self) -> bool:
        tests = needs_of(self.path) if self.path in _files() else {}
        return self.test in tests if self.test else bool(tests)

    @property
    def needs(self) -> str:
        """What all of its tests need that not every machine has. Empty if one of them needs nothing."""
        needed = needs_of(self.path)
        all_of = {needed[self.test]} if self.test else set(needed.values())
        return all_of.pop() if len(all_of) == 1 else ""


def cited(text: str) -> list[Cited]:
    return [Cited(found["path"], found["test"] or "", found["said"] or "") for found in NAMED.finditer(text)]


@cache
def needs_of(path: str) -> dict[str, str]:
    """The tests of a file, and what each needs, as pages write it."""
    tree = ast.parse((ROOT / path).read_text())
    of_all = [ast.unparse(node) for node in tree.body if _is_mark(node)]
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name: _need([*of_all, *map(ast.unparse, node.decorator_list)])
        for node in tests
        if node.name.startswith("test_")
    }


def _need(marks: list[str]) -> str:
    found = (said for mark in marks for marker, said in NEEDS.items() if re.search(rf"pytest\.mark\.{marker}\b", mark))
    return next(found, "")


def _is_mark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


@cache
def _files() -> frozenset[str]:
    return frozenset(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
