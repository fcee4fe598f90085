"""PROTOCOL.md, and docs/proxy.md for the proxy, explain exactly the codes that the source can send."""

from __future__ import annotations

import re
from collections import Counter

from tests.unit.proto.codes import ROOT, used

TEXT = (ROOT / "proto" / "PROTOCOL.md").read_text().partition("## Error codes")[2]
PROXY = (ROOT / "docs" / "proxy.md").read_text().partition("## Codes")[2].partition("\n## ")[0]
DOCUMENTED = {
    code
    for line in (TEXT + PROXY).splitlines()
    if line.startswith(("| `", "**A bug"))
    for code in re.findall(r"`([a-z_]+)`", line.split("|")[1] if line.startswith("|") else line)
}


def test_every_code_is_documented() -> None:
    assert {code: place for code, place in used().items() if code not in DOCUMENTED} == {}


def test_every_documented_code_is_said_somewhere() -> None:
    assert DOCUMENTED - used().keys() == set()


def test_the_search_finds_codes() -> None:
    assert len(used()) > 80


def test_every_code_has_an_entry_of_what_to_do_once() -> None:
    """Those of the proxy have theirs beside its own options."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## Error codes\n")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    entries = Counter(code for row in rows for code in re.findall(r"`([a-z_]+)`", row))
    proxy = set(re.findall(r"`([a-z_]+)`", PROXY))
    assert entries.keys() - DOCUMENTED == set()
    assert DOCUMENTED - proxy - entries.keys() == set()
    assert [code for code, count in entries.items() if count > 1] == []
