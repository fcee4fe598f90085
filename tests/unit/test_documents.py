"""What pages name exists: tests by their whole path, links and anchors, options; and each page can be found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest

from kvbridge.options import options
from tests.support.cited import ROOT, cited
from tests.support.page_blocks import BLOCKS
from tests.support.pages import blocks

FOLDERS = ("docs", "deploy", "proto", "kernels", "bench", "tests")
FILES = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
LINK = re.compile(r'\]\(([^()\s]+)\)|\b(?:href|src|srcset)="([^"]+)"')


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen: Counter[str] = Counter()
    found = set()
    for name in names:
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(name: str) -> Iterator[tuple[str, str]]:
    """Of each link of a page that leads into this repository: a path from its root, and an anchor or ""."""
    for found in LINK.finditer(prose(PAGES[name])):
        path, _, anchor = (found[1] or found[2]).partition("#")
        if "://" not in path:
            target = (ROOT / name).parent / path if path else ROOT / name
            yield str(target.resolve().relative_to(ROOT)), anchor


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_is_named_is_there(name: str) -> None:
    assert [each for each in cited(PAGES[name]) if not each.exists] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    assert [path for path, _ in links(name) if not (ROOT / path).exists()] == []
    anchored = [(path, anchor) for path, anchor in links(name) if anchor]
    assert [(path, anchor) for path, anchor in anchored if anchor not in anchors(PAGES[path])] == []


def test_functions_that_the_architecture_names_are_in_the_files_it_names() -> None:
    table = PAGES["docs/architecture.md"].partition("### A pull, function by function")[2].partition("\n## ")[0]
    rows = re.findall(r"\]\(\.\./(kvbridge/[\w/]+\.py)\) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) > 10
    named = [(path, name) for path, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert [each for each in named if not re.search(rf"def {each[1]}\(", (ROOT / each[0]).read_text())] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, fresh = set[str](), {"README.md"}
    while fresh:
        reached |= fresh
        fresh = {path for path, _ in chain.from_iterable(map(links, fresh)) if path in PAGES} - reached
    assert PAGES.keys() - reached == set()


def test_every_option_that_is_shown_is_one() -> None:
    shown = re.findall(r"^(\w+) = ", PAGES["SECURITY.md"], re.MULTILINE)
    assert {"key", "peers"} <= set(shown) <= options().keys()


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_commands_is_run_by_a_test_or_it_is_said_why_not(name: str) -> None:
    """A new block goes into tests/support/page_blocks.py, with the test that runs it."""
    known, found = BLOCKS.get(name, []), blocks(name)
    assert [begins for begins, _ in known] == [
        text[: len(begins)] for text, (begins, _) in zip(found, known, strict=False)
    ]
    assert not found[len(known) :], f"blocks that nothing is said of: {found[len(known) :]}"
    assert [each for _, said in known for each in cited(said) if not each.exists] == []
