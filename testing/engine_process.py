"""An engine as a process, forked by the nursery: it is told and says lines of JSON."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from testing.nursery import HERE, PipedChild, Place

SAID_S = 120.0


class EngineProcess(PipedChild):
    """Runs a module with a job as its argument. What it says is kept until it is asked for."""

    def __init__(
        self, module: str, job: msgspec.Struct, log: Path, env: Mapping[str, str] | None = None, place: Place = HERE
    ) -> None:
        self.log = log
        with log.open("ab") as errors:
            told = msgspec.json.encode(job).decode()
            super().__init__(module, told, errors=errors.fileno(), env=env, place=place)
        os.set_blocking(self.stdout.fileno(), False)
        self._unread = b""
        self.said: list[dict[str, Any]] = []

    def tell(self, do: str, **more: Any) -> None:
        try:
            self.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self.stdin.flush()
        except BrokenPipeError:
            assert self.is_dead(1.0)

    def hear(self, seconds: float = 0.0) -> bool:
        """Take in what it says within so long; False if nothing came."""
        if not select.select([self.stdout], [], [], seconds)[0]:
            return False
        got = self.stdout.read()
        *lines, self._unread = (self._unread + (got or b"")).split(b"\n")
        self.said += [json.loads(line) for line in lines]
        if not got:
            time.sleep(0.01)
        return bool(got)

    def wait_for(self, event: str, seconds: float = SAID_S) -> dict[str, Any]:
        """The first such event; it is taken out. Raises AssertionError."""
        end = time.monotonic() + seconds
        while True:
            for each in self.said:
                if each["event"] == event:
                    self.said.remove(each)
                    return each
            assert time.monotonic() < end, f"{self.log.stem}: no {event} in {seconds} s: {self._last()}"
            assert not self.is_dead() or self.hear(), f"{self.log.stem} died: {self._last()}"
            self.hear(0.1)

    def _last(self) -> str:
        return f"{self.said[-5:]} {self.log.read_text(errors='replace')[-2000:]}"
