"""Notes in the engine's process when its adapter sends and receives the messages that move KV. The same in any engine.

`KVBRIDGE_TEST_TIMES` names a file, which gets a line of JSON each time. Processes of one machine share the clock.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "KVBRIDGE_TEST_TIMES"


def note(**line: Any) -> None:
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def noted(path: Path, side: str, room: int | str | None = None) -> list[dict[str, Any]]:
    """What was noted of this kind, of one room or of all."""
    lines = path.read_text().splitlines() if path.exists() else []
    notes = [each for each in map(json.loads, lines) if each["side"] == side]
    return [each for each in notes if room is None or each["room"] == room]


def watch() -> None:
    """Note when this process offers the last of a prompt, wants one, and hears that it is there. Before it attaches."""
    from kvbridge_proto.engine import Done, Offer, ToEngine, Want

    from kvbridge.adapters.engine.conversation import Conversation

    offer, want, hear = Conversation.offer, Conversation.want, Conversation._on_message
    rooms: dict[str, str] = {}  # of open wants

    def noted_offer(self: Conversation, message: Offer) -> None:
        at_s = time.monotonic()
        offer(self, message)
        if message.is_last:
            note(side="offered", room=message.rendezvous, at_s=at_s)

    def noted_want(self: Conversation, message: Want) -> None:
        at_s = time.monotonic()
        rooms[message.request] = message.rendezvous
        want(self, message)
        note(side="wanted", room=message.rendezvous, at_s=at_s)

    def noted_hear(self: Conversation, message: ToEngine) -> None:
        at_s = time.monotonic()
        hear(self, message)
        if isinstance(message, Done) and (room := rooms.pop(message.request, None)) is not None:
            note(side="carried", room=room, at_s=at_s, bytes=message.moved_bytes, agent_s=message.seconds)

    Conversation.offer, Conversation.want, Conversation._on_message = noted_offer, noted_want, noted_hear  # type: ignore
