"""The same targets, guided by coverage: `python -m tests.integration.fuzz.guided TARGET [libFuzzer's options]`.

Needs atheris, which `make fuzz-guided` installs. Frames come from the target's own generator and from libFuzzer, which
keeps those that reach new branches of kvbridge. A frame that does harm is kept like any other.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from random import Random

import atheris


def main() -> None:
    name = sys.argv[1]
    with atheris.instrument_imports(include=["kvbridge", "kvbridge_proto"]):
        from tests.integration.fuzz.__main__ import keep
        from tests.integration.fuzz.target import judged, minimised
        from tests.integration.fuzz.targets import made
    logging.disable(logging.CRITICAL)
    target = made(name)

    def one(frame: bytes) -> None:
        _, crash = judged(target, frame)
        if crash is not None:
            raise RuntimeError(keep(name, minimised(target, crash)))

    def another(frame: bytes, most_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return target.frame(random)[:most_bytes]
        changed: bytes = atheris.Mutate(frame, len(frame) + 64)
        return changed[:most_bytes]

    with tempfile.TemporaryDirectory() as folder:
        said = [sys.argv[0], "-max_len=65536", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/", *sys.argv[2:]]
        atheris.Setup(said, one, custom_mutator=another)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
