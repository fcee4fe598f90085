"""`kvbridge agent` of another release: it speaks a range of protocol versions.

`VERSIONS=1-2 python -m tests.integration.agent.ranged_agent`. Every version is the one that this commit has.
"""

from __future__ import annotations

import os
import sys

from kvbridge_proto import common

from kvbridge import cli
from kvbridge.agent import daemon  # so that all modules that know the range are there

MODULES = ("kvbridge_proto", "kvbridge")


def main() -> None:
    assert daemon
    before, after = common.OURS, common.VersionRange(*map(int, os.environ["VERSIONS"].split("-")))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in MODULES and getattr(module, "OURS", None) is before:
            module.OURS = after  # type: ignore[attr-defined]
    cli.main()


if __name__ == "__main__":
    main()
