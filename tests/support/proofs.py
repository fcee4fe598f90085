"""Which tests prove a promise (G1 to G25) or answer a threat (T1 to T41): `python -m tests.support.proofs G5 T8`.

They carry the marker `proves`. Of promises it also prints the rules whose absence the simulator notices.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict

from tests.support.cited import ROOT, cited
from tests.unit.sim.mutations import PROVES

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


def lines(number: str) -> list[str]:
    """What is printed of one promise or threat. Raises KeyError for a number that no test is marked with."""
    tests = dict(proofs())[number]
    needs = [cited(name)[0].needs for name in tests]
    told = [f"  {name}" + (f" ({need})" if need else "") for name, need in zip(tests, needs, strict=True)]
    return [number, *told, *(f"  rule {rule}" for rule in PROVES.get(number, ()))]


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
    for each in sys.argv[1:] or sorted(proofs(), key=lambda number: (number[0], int(number[1:]))):
        print("\n".join(lines(each)))
