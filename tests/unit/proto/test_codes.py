"""docs/troubleshooting.md, and docs/proxy.md for the proxy, explain exactly the codes that the source can send."""

from __future__ import annotations

import re
from collections import Counter

from tests.unit.proto.codes import ROOT, used

ENTRIES = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## Error codes\n")[2]
PROXY = (ROOT / "docs" / "proxy.md").read_text().partition("## Codes")[2].partition("\n## ")[0]


def codes_of(text: str) -> Counter[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return Counter(code for row in rows for code in re.findall(r"`([a-z_]+)`", row))


def test_every_code_is_documented() -> None:
    documented = codes_of(ENTRIES) + codes_of(PROXY)
    assert {code: place for code, place in used().items() if code not in documented} == {}


def test_every_documented_code_is_said_somewhere() -> None:
    assert codes_of(ENTRIES).keys() | codes_of(PROXY).keys() <= used().keys()


def test_the_search_finds_codes() -> None:
    assert len(used()) > 80


def test_every_code_has_one_entry() -> None:
    assert [code for code, count in codes_of(ENTRIES).items() if count > 1] == []
