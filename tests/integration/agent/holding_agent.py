"""`kvbridge agent` that keeps everything that an engine ever attached: what is unmapped was unmapped by a close.

On a CPU memory goes with the last reference to it, on a GPU it does not. `python -m
tests.integration.agent.holding_agent`.
"""

from __future__ import annotations

from typing import Any

from kvbridge import cli
from kvbridge.dataplane.attachment import Attachment


def main() -> None:
    kept: list[Any] = []
    make = Attachment.__init__

    def held(self: Attachment, *parts: Any, **named: Any) -> None:
        make(self, *parts, **named)
        kept.append((self, self.memory, self.fence))

    Attachment.__init__ = held  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
