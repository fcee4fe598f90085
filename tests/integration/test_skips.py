"""In CI a test may not skip because something is not installed: tests/conftest.py makes it a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LACKS = "kubectl is not installed"
MAY = "SGLang is not in this environment (make test-sglang)"
HOW = {
    "mark": '@pytest.mark.skipif(True, reason="{}")\ndef test_it(): pass',
    "test": 'def test_it(): pytest.skip("{}")',
    "fixture": '@pytest.fixture\ndef tool(): pytest.skip("{}")\ndef test_it(tool): pass',
    "module": 'pytest.skip("{}", allow_module_level=True)',
    "import": 'pytest.importorskip("no_such_module", reason="{}")',
}


def counted(folder: Path, reason: str, ci: str) -> dict[str, int]:
    """What pytest counts of tests that skip in each way, and of one that fails as expected."""
    for name, body in (HOW | {"expected": "@pytest.mark.xfail\ndef test_it(): assert False"}).items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n{body.format(reason)}\n")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "tests.conftest", "-p", "no:cacheprovider"]
    told = subprocess.run(
        [*command, "-n", "1", "--continue-on-collection-errors", "."],
        cwd=folder,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout
    found = {what.removesuffix("s"): int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", told.splitlines()[-1])}
    assert (f"(tests/conftest.py): Skipped: {reason}" in told) == ("failed" in found), told
    return found


@pytest.mark.parametrize(
    ("reason", "ci", "found"),
    [
        (LACKS, "true", {"failed": 1, "error": 4, "xfailed": 1}),  # what comes before a test begins is an error
        (LACKS, "", {"skipped": 5, "xfailed": 1}),
        (MAY, "true", {"skipped": 5, "xfailed": 1}),
    ],
)
def test_what_is_not_installed_is_a_failure_in_ci_alone(
    reason: str, ci: str, found: dict[str, int], tmp_path: Path
) -> None:
    assert counted(tmp_path, reason, ci) == found


def test_ci_says_that_it_is_ci() -> None:
    assert re.search(r"^export CI=\S+", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_each_file_that_ci_names_has_tests_of_the_engine_that_it_is_named_for() -> None:
    """A file without the mark is left out without a word, since pytest deselects its tests."""
    run = (ROOT / ".ci/run").read_text()
    named = re.findall(r"^make test-(\w+) \w+_TESTS=\"([^\"]+)\"", run, re.MULTILINE)
    assert [mark for mark, _ in named] == ["vllm", "cross", "sglang"]
    for mark, arguments in named:
        for path in (each for each in arguments.partition(" -k ")[0].split()):
            files = [ROOT / path] if path.endswith(".py") else list((ROOT / path).glob("test_*.py"))
            assert any(f"mark.{mark}" in file.read_text() for file in files), f"{path} has no test of {mark}"
