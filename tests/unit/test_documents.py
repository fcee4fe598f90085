"""What the pages name exists: tests by their whole path, links, options."""

from __future__ import annotations

import re

import pytest

from kvbridge.options import options
from tests.support.cited import ROOT, Cited, cited

FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "proto/PROTOCOL.md"]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}


@pytest.mark.parametrize(("name", "at_least"), [("THREAT_MODEL.md", 30), ("GUARANTEES.md", 40), ("README.md", 1)])
def test_so_many_tests_are_named(name: str, at_least: int) -> None:
    assert len(cited(PAGES[name])) >= at_least


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_is_named_is_there(name: str) -> None:
    assert [each for each in cited(PAGES[name]) if not each.exists] == []


@pytest.mark.parametrize(
    ("text", "exists"),
    [
        ("`tests/unit/proto/test_hostile.py::test_announced_lengths_cost_no_memory`", True),
        ("`tests/unit/proto/test_hostile.py`", True),
        ("`tests/unit/exchange/test_hostile.py::test_announced_lengths_cost_no_memory`", False),  # another of that name
        ("`test_hostile.py::test_announced_lengths_cost_no_memory`", False),
        ("`proto/test_hostile.py`", False),
        ("`tests/unit/proto/test_hostile.py::test_announced_lengths`", False),  # the beginning of its name
    ],
)
def test_a_test_is_there_only_under_its_whole_path(text: str, exists: bool) -> None:
    (each,) = cited(text)
    assert each.exists == exists


@pytest.mark.parametrize(
    ("text", "needs", "said"),
    [
        ("`tests/system/gpu/test_fence.py` (on a GPU)", "on a GPU", "on a GPU"),
        ("`tests/system/gpu/test_carry.py::test_two_gpus`", "on two GPUs", ""),
        ("`tests/system/gpu/test_carry.py::test_one_gpu`\n(on a GPU; by every route)", "on a GPU", "on a GPU"),
        ("`tests/system/engines/test_faults.py` (which see)", "with vLLM", ""),
        ("`tests/integration/agent/test_abandon.py`", "", ""),
    ],
)
def test_what_a_test_needs_is_read_off_its_markers(text: str, needs: str, said: str) -> None:
    (each,) = cited(text)
    assert (each.needs, each.said) == (needs, said)


def test_a_file_without_tests_is_none() -> None:
    assert not Cited("tests/support/oracle.py", "", "").exists


def test_every_threat_has_a_test() -> None:
    rows = [line for line in PAGES["THREAT_MODEL.md"].splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows[1:] if not any(each.test for each in cited(row))] == []


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "THREAT_MODEL.md", "docs/adapters.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[name]) if "://" not in link]
    assert links
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


def test_every_option_that_is_shown_is_one() -> None:
    shown = re.findall(r"^(\w+) = ", PAGES["SECURITY.md"], re.MULTILINE)
    assert {"key", "peers"} <= set(shown) <= options().keys()
