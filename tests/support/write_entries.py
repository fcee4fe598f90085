"""Copies docs/troubleshooting.md into the package: `kvbridge doctor` prints its entries."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
COPY = ROOT / "kvbridge" / "doctor" / "troubleshooting.txt"

if __name__ == "__main__":
    shutil.copyfile(PAGE, COPY)
