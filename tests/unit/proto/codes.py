"""Finds every error code that kvbridge can send, by reading its source. Pure."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
# Calls whose first text is a code; and names that hold one.
SAYS = re.compile(
    r"(__init__|\w*Error|BadFrame|Rejected|Lost|_?fail|_?failed|_?failure\w*|_?refuse\w*|_?reject\w*|_?lose|_?lost|_?drop\w*|_?end\w*|_?stop|unreachable|_computed_here)"
)
WORDS = ROOT / "kvbridge/agent/record.py"  # of the journal, with a text each
NO_CODES = {"served", "declined"}  # labels of a metric, for offers that ended well


@functools.cache
def used() -> dict[str, str]:
    """Code -> where it is said."""
    found: dict[str, str] = {}
    for folder in ("kvbridge", "proto/kvbridge_proto", "demo"):
        for path in sorted({*(ROOT / folder).rglob("*.py")} - {WORDS}):
            for code, line in _codes(ast.parse(path.read_text())):
                found.setdefault(code, f"{path.relative_to(ROOT)}:{line}")
    return found


def _codes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if SAYS.fullmatch(name):
                for code in (found for arg in node.args for found in _code(arg)):
                    yield code
                    break
            for keyword in node.keywords:
                if keyword.arg == "code":
                    yield from _code(keyword.value)
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and _is_reason(ast.unparse(node.elts[1])):
            yield from _code(node.elts[0])  # ("code", f"..."), ("code", reason) or ("code", that.reason)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
            yield from _code(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LATE":
            yield from _code(node.value.elts[0]) if isinstance(node.value, ast.Tuple) else ()  # LATE = code, reason
        elif isinstance(node, ast.BoolOp) and ast.unparse(node.values[0]).endswith("code"):
            yield from _code(node.values[-1])


def _is_reason(text: str) -> bool:
    return text.startswith(("f'", "reason")) or text.endswith(".reason")


def _code(node: ast.expr) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.IfExp):
        yield from _code(node.body)
        yield from _code(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
        yield from [] if node.value in NO_CODES else [(node.value, node.lineno)]
