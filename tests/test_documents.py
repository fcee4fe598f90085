"""What SECURITY.md and THREAT_MODEL.md name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbridge.config import options

ROOT = Path(__file__).parents[1]
TEXTS = {name: (ROOT / name).read_text() for name in ("SECURITY.md", "THREAT_MODEL.md")}
TESTS: dict[str, str] = {}  # files of one name together
for path in sorted((ROOT / "tests").rglob("test_*.py")):
    TESTS[path.name] = TESTS.get(path.name, "") + path.read_text()


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXTS["THREAT_MODEL.md"])
    assert len(named) > 25
    assert [(file, test) for file, test in named if f"def {test}(" not in TESTS.get(file, "")] == []


def test_every_threat_has_a_test() -> None:
    rows = [line for line in TEXTS["THREAT_MODEL.md"].splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows[1:] if "::test_" not in row] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXTS[name])
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_option_that_is_shown_is_one() -> None:
    shown = re.findall(r"^(\w+) = ", TEXTS["SECURITY.md"], re.MULTILINE)
    assert {"key", "peers"} <= set(shown) <= options().keys()
