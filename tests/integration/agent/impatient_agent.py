"""`kvbridge agent`, but it waits only STUCK_S for its data plane, and a pause at a failpoint ends when a test says so.

`python -m tests.integration.agent.impatient_agent agent --FLAG VALUE`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from kvbridge import failpoints
from kvbridge.agent.daemon import run
from kvbridge.config import load, supervision

STUCK_S = 2.0


def goes_on(folder: Path) -> None:
    """The agent whose socket is in this folder pauses no longer."""
    (folder / "goes_on").touch()


def main() -> None:
    said = sys.argv[2:]
    names = [flag.removeprefix("--").replace("-", "_") for flag in said[::2]]
    flags = dict(zip(names, said[1::2], strict=True))
    told = Path(flags["socket"]).with_name("goes_on")

    def pause(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not told.exists():
            time.sleep(0.05)

    vars(failpoints)["time"] = SimpleNamespace(sleep=pause)
    run(load(flags=flags), stuck_s=STUCK_S, supervision=supervision())


if __name__ == "__main__":
    main()
