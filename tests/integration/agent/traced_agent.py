"""`kvbridge agent`, which writes down the functions of ours that it called, beside its socket, when it ends."""

from __future__ import annotations

import atexit
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[3]
Called = set[tuple[str, str]]


@contextmanager
def traced() -> Iterator[Called]:
    """The functions of this checkout that this thread and new ones call meanwhile: their files and names."""
    codes: set[Any] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    called: Called = set()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        called |= {(code.co_filename.removeprefix(f"{ROOT}/"), code.co_name) for code in list(codes)}


def main() -> None:
    from kvbridge import cli
    from kvbridge.agent import daemon  # noqa: F401 - what it imports is not of interest

    said = Path(sys.argv[sys.argv.index("--socket") + 1]).with_suffix(".calls")
    tracing = traced()
    called = tracing.__enter__()

    def write() -> None:
        tracing.__exit__(None, None, None)
        said.write_text(json.dumps(sorted(called)))

    atexit.register(write)
    cli.main()


if __name__ == "__main__":
    main()
