"""Writes the tables of tests in docs/guarantees.md and docs/threat-model.md, from the markers `proves` at the tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.cited import ROOT, cited
from tests.unit.sim.mutations import PROVES

BEGIN, END = "<!-- written by tests.support.write_proofs -->\n", "<!-- end -->"
# Each page, and the first letter of what it numbers.
PAGES = {"docs/guarantees.md": "G", "docs/threat-model.md": "T"}
GIVEN = re.compile(r"pytest\.mark\.proves\(([^)]*)\)")


def proofs() -> dict[str, list[str]]:
    """Of each number, the tests that are marked with it: `path::test`, or `path` if the whole file is."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        for test, numbers in _marked(path.read_text()):
            for number in numbers:
                found[number].append(f"{name}::{test}" if test else name)
    return found


def written(page: str, text: str) -> str:
    """The page with its table as the markers are now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + _table(PAGES[page]) + END + rest.partition(END)[2]


def _table(letter: str) -> str:
    """A row of each number; of promises also the rules whose absence the simulator notices."""
    columns = ["", "tests", "rules"] if letter == "G" else ["", "tests"]
    known = {number: tests for number, tests in proofs().items() if number[0] == letter}
    rows = [
        [number, _tests(known[number]), " ".join(f"`{rule}`" for rule in PROVES.get(number, ()))][: len(columns)]
        for number in sorted(known, key=lambda number: int(number[1:]))
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [columns, ["---"] * len(columns), *rows])


def _tests(names: list[str]) -> str:
    needs = [cited(name)[0].needs for name in names]
    return " ".join(f"`{name}`" + (f" ({need})" if need else "") for name, need in zip(names, needs, strict=True))


def _marked(source: str) -> list[tuple[str, list[str]]]:
    """What a file's tests are marked with; under "" what the whole file is."""
    if "mark.proves(" not in source:
        return []
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, " ".join(map(ast.unparse, node.decorator_list))))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found.append(("", ast.unparse(node.value)))
    return [(name, re.findall(r"\w+", " ".join(GIVEN.findall(marks)))) for name, marks in found if "proves" in marks]


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(written(page, (ROOT / page).read_text()))
