"""Writes the golden frames and the JSON Schemas: `make golden`. A diff in an old version's frames is a bug."""

from __future__ import annotations

from pathlib import Path

import msgspec
from kvbridge_proto import common, framing

from tests.unit.proto.samples import frames
from tests.unit.proto.schemas import SCHEMA, schema_texts

GOLDEN = Path(__file__).parents[3] / "proto" / "golden" / f"v{common.OURS.newest}"


def main() -> None:
    for name, (message, _) in frames().items():
        path = GOLDEN / f"{name}.msgpack"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(framing.encode(message))
        path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(message)) + b"\n")
    SCHEMA.mkdir(exist_ok=True)
    for name, text in schema_texts().items():
        (SCHEMA / name).write_text(text)


if __name__ == "__main__":
    main()
