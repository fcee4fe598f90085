"""Measures kvbridge. `python -m bench` lists the scenarios; `python -m bench SCENARIO --help` tells of one."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.goals import of_results, printed
from bench.record import RESULTS, ROOT
from bench.scenario import Bench, Problem

SCENARIOS = {path.stem: path for path in sorted(Path(__file__).with_name("scenarios").glob("[a-z]*.py"))}
AGENTS_PYTHON = ROOT / ".venv" / "bin" / "python"  # of agents beside engines that have an environment of their own


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    if name not in SCENARIOS:
        print(__doc__, *(f"  {each:13} {_about(path)}" for each, path in SCENARIOS.items()), sep="\n")
        return 0 if name in ("", "-h", "--help") else 2
    if AGENTS_PYTHON.exists():
        os.environ.setdefault("KVBRIDGE_TEST_AGENT_PYTHON", str(AGENTS_PYTHON))
    scenario = importlib.import_module(f"bench.scenarios.{name}")
    options = vars(_parser(name, scenario.__doc__ or "", scenario.measure).parse_args(arguments[1:]))
    bench = Bench(name, options.pop("out"))
    found: dict[str, Any] | None = None
    try:
        found = scenario.measure(bench, **options)
    except Problem as error:
        bench.problem(name, error)
    if found:
        bench.write(found)
        if lines := of_results(found):
            print(printed(lines))
    for problem in bench.problems:
        print(f"PROBLEM {problem}")
    return 1 if bench.problems else 0


def _about(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _parser(name: str, about: str, measure: Callable[..., Any]) -> argparse.ArgumentParser:
    """An option for each keyword of the scenario, of its default's type; a tuple is given with commas.

    Without a default it is one or more files.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=about, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    for each in list(inspect.signature(measure).parameters.values())[1:]:
        flag, default = f"--{each.name.replace('_', '-')}", each.default
        if default is inspect.Parameter.empty:
            parser.add_argument(each.name, type=Path, nargs="+")
        elif default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, type=_several(type((*default, "")[0])), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser


def _several(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(each) for each in text.split(",") if each)

    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
