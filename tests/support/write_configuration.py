"""Writes deploy/kvbridge.toml and docs/configuration.md from the options in options.py."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbridge.options import allowed, defaults, meta_of, options, section_of

ROOT = Path(__file__).parents[2]
DEPLOYED = ROOT / "deploy" / "kvbridge.toml"
PAGE = ROOT / "docs" / "configuration.md"
COLUMNS = 118

TOML_HEAD = """# One agent, beside one engine rank: `kvbridge agent --config /etc/kvbridge/agent-0.toml`.
#
# Every option is here with its default; take the "# " away to change one. The same option can be given as a flag
# (--slot-bytes) or in the environment (KVBRIDGE_SLOT_BYTES); a flag beats the environment, which beats this file.
# `kvbridge config show` prints what holds. Written by `python -m tests.support.write_configuration` (make golden).
"""

PAGE_HEAD = """# The options of an agent

Written from [kvbridge/options.py](../kvbridge/options.py) (`make golden`); do not edit.

`slot_bytes` is a line of a TOML file (`kvbridge agent --config FILE`; [a sample](../deploy/kvbridge.toml)), the
variable `KVBRIDGE_SLOT_BYTES`, or the flag `--slot-bytes`; a flag beats the environment, which beats the file. What is
true or false has two flags: `--share-memory`, `--no-share-memory`. Commas separate the parts of a list. `kvbridge
config show` takes the same arguments and prints every value and where it came from. An unknown name or a wrong value is
refused (exit code 2). Variables that Kubernetes sets for a service called `kvbridge` are ignored.

Adapters have options of their own: [those of both engines](../kvbridge/adapters/engine/options.py),
[vLLM's](vllm.md#options), and [SGLang's](../kvbridge/adapters/sglang/options.py).
"""


def about(name: str) -> str:
    """What else there is to know about an option, often ""."""
    return str((meta_of(name).extra or {})["about"])


def sample(name: str) -> Any:
    """The default, or an example if the default depends on the device."""
    default = defaults()[name]
    return (meta_of(name).extra or {})["sample"] if default is None else default


def toml() -> str:
    return TOML_HEAD + "".join(_toml_section(title, names) for title, names in _sections())


def page() -> str:
    return PAGE_HEAD + "".join(f"\n## {title}\n" + "".join(map(_entry, names)) for title, names in _sections())


def _sections() -> Iterator[tuple[str, list[str]]]:
    for title in dict.fromkeys(map(section_of, options())):
        yield title, [name for name in options() if section_of(name) == title]


def _toml_section(title: str, names: list[str]) -> str:
    lines = []
    for name in names:
        comment = textwrap.wrap(_said(name), COLUMNS, break_on_hyphens=False, break_long_words=False)
        lines += ["", *(f"# {line}" for line in comment), f"# {name} = {json.dumps(sample(name))}"]
    return f"\n# --- {title} ---\n" + "\n".join(lines) + "\n"


def _entry(name: str) -> str:
    default = defaults()[name]
    usual = "by device" if default is None else f"`{json.dumps(default)}`"
    facts = "; ".join(filter(None, (_bounds(name), f"default {usual}")))
    text = textwrap.fill(_said(name).replace("*", r"\*"), COLUMNS, break_on_hyphens=False, break_long_words=False)
    return f"\n### `{name}`\n\n{facts}\n\n{text}\n"


def _bounds(name: str) -> str:
    """What the default does not show of what is allowed, in short."""
    told = re.sub(r"a(?: whole)? number, at least (\d+), at most (\d+)", r"\1 to \2", allowed(name))
    return "" if re.match("text|true or false|a list of .* text", told) else told


def _said(name: str) -> str:
    return f"{options()[name]}. {about(name)}".strip()


if __name__ == "__main__":
    DEPLOYED.write_text(toml())
    PAGE.write_text(page())
