"""What the troubleshooting page says of a check or an error code: an installed wheel has no docs folder to link to."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

PAGE = "troubleshooting.txt"  # docs/troubleshooting.md, copied by `make golden`
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
TABLE_HEAD = re.compile(r"^\|.*\n\|[-|]+\n", re.MULTILINE)
ROW = re.compile(r"^\| (.*?) \| (.*) \|$", re.MULTILINE)
BREAK = re.compile(r"(?<=[^\n|])\n(?=[^\n|])")  # within a paragraph


@cache
def _page() -> str:
    return resources.files(__package__).joinpath(PAGE).read_text()


def check_names() -> list[str]:
    """All checks, in the order of the page, without importing what they need."""
    checks = _page().partition("\n## Checks\n")[2].partition("\n## ")[0]
    return re.findall(r"^### (.+)$", checks, re.MULTILINE)


def of_check(name: str) -> str:
    """The text of the check's entry, a line per paragraph, and `name: text` per row of its table."""
    entry = _page().partition(f"\n### {name}\n")[2]
    entry = re.split(r"^##", entry, maxsplit=1, flags=re.MULTILINE)[0]
    return ROW.sub(r"\1: \2", _plain(TABLE_HEAD.sub("", entry)))


def of_code(code: str) -> str:
    """What to do about an error code. A peer may say one that this version does not know."""
    for line in _page().partition("\n## Error codes\n")[2].splitlines():
        cells = line.split(" | ")
        if len(cells) == 2 and f"`{code}`" in cells[0]:
            return _plain(cells[1].removesuffix("|"))
    return f"this version of kvbridge does not know {code}: look in the log of the agent that said it"


def _plain(text: str) -> str:
    return BREAK.sub(" ", LINK.sub(r"\1", text)).replace("**", "").strip()
