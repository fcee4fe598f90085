"""JSON Schemas of all protocols for clients in other languages, made from the structs. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from kvbridge_proto import common, door, engine, peer

SCHEMA = Path(__file__).parents[3] / "proto" / "schema"


def _schema(title: str, roots: dict[str, Any]) -> str:
    """One document with every record under `$defs` and each root as an `anyOf` or a reference."""
    shapes, components = msgspec.json.schema_components(roots.values(), ref_template="#/$defs/{name}")
    found = dict(zip(roots, shapes, strict=True))
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "$comment": f"versions {common.OURS.oldest}-{common.OURS.newest}; base64 strings are bin on the wire",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in found],
        "$defs": {**{name: shape for name, shape in found.items() if name not in components}, **components},
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def schema_texts() -> dict[str, str]:
    """File name -> text."""
    return {
        "engine.json": _schema("kvbridge: engine and agent", {"ToAgent": engine.ToAgent, "ToEngine": engine.ToEngine}),
        "door.json": _schema("kvbridge: agents of one host", {"ToDoor": door.ToDoor, "FromDoor": door.FromDoor}),
        "peer.json": _schema("kvbridge: agent and agent", {"Envelope": peer.Envelope, "Notice": peer.Notice}),
    }
