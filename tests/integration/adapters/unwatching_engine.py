"""An engine that cannot watch its agent: attaches if it may, and prints what it says and whether it is attached."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.conversation import Conversation
from tests.integration.adapters.small import memory_of


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")


def main(path: str, is_allowed: bool) -> None:
    lines, log = Lines(), logging.getLogger("engine")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    client = EngineClient(path, allow_unwatched=is_allowed)
    with closing(Conversation(client, memory_of(), log)) as talk:
        is_attached = talk.start(3 if not is_allowed else 30)
        found = {"is_attached": is_attached, "said": lines.said, "has_pidfd": client.pidfd >= 0}
        print(json.dumps(found), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "allowed")
