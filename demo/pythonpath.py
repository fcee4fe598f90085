"""The PYTHONPATH with which processes in other folders find the demo, which is in no wheel."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def of_checkout() -> dict[str, str]:
    """Environment for the demo and the kvbridge of this checkout."""
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [known])])}


def of_demo_alone(folder: Path, *before: Path) -> dict[str, str]:
    """Environment for the folders `before`, then the demo, and nothing else of this checkout."""
    tools = folder / "tools"
    if not tools.is_dir():
        tools.mkdir()
        (tools / "demo").symlink_to(ROOT / "demo")
    return {"PYTHONPATH": os.pathsep.join(map(str, (*before, tools))), "PYTHONSAFEPATH": "1"}
