"""`kvbridge agent`, but it keeps a reference to all memory ever attached, so memory is unmapped only by a close.

On a CPU memory is unmapped with the last reference to it, on a GPU it is not. `python -m
tests.integration.agent.holding_agent`.
"""

from __future__ import annotations

from typing import Any

from kvbridge import cli
from kvbridge.dataplane.attached import AttachedMemory


def main() -> None:
    kept: list[Any] = []
    make = AttachedMemory.__init__

    def held(self: AttachedMemory, *parts: Any, **named: Any) -> None:
        make(self, *parts, **named)
        kept.append((self, self.memory, self.fence))

    AttachedMemory.__init__ = held
    cli.main()


if __name__ == "__main__":
    main()
