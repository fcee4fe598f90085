"""`kvbridge agent`, but it waits only STUCK_S for its data plane.

`python -m tests.integration.agent.impatient_agent agent --FLAG VALUE`.
"""

from __future__ import annotations

import sys

from kvbridge.agent.daemon import run
from kvbridge.config import load, supervision

STUCK_S = 2.0


def main() -> None:
    said = sys.argv[2:]
    names = [flag.removeprefix("--").replace("-", "_") for flag in said[::2]]
    run(load(flags=dict(zip(names, said[1::2], strict=True))), stuck_s=STUCK_S, supervision=supervision())


if __name__ == "__main__":
    main()
