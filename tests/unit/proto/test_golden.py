"""Frames of released versions still mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from kvbridge_proto import common, door, engine, framing, peer, status

from tests.unit.proto.samples import BODIES, FROM_DOOR, TO_AGENT, TO_DOOR, TO_ENGINE, frames
from tests.unit.proto.schemas import SCHEMA, schema_texts

GOLDEN = Path(__file__).parents[3] / "proto" / "golden"
NEWEST = GOLDEN / f"v{common.OURS.newest}"
FRAMES = frames()


@pytest.mark.parametrize("name", FRAMES)
def test_a_golden_frame_and_its_readable_twin_are_the_exact_struct(name: str) -> None:
    message, kind = FRAMES[name]
    frame = (NEWEST / f"{name}.msgpack").read_bytes()
    assert framing.decode(frame, kind) == message and framing.encode(message) == frame
    twin = (NEWEST / f"{name}.json").read_bytes()
    assert msgspec.json.decode(twin, type=type(message)) == message


def test_every_message_has_a_golden_frame() -> None:
    sampled = {type(sample) for sample in (*TO_AGENT, *TO_ENGINE, *BODIES, *TO_DOOR, *FROM_DOOR)}
    said = {*get_args(engine.ToAgent), *get_args(engine.ToEngine), *get_args(peer.Body)}
    assert sampled == said | {door.ToDoor, *get_args(door.FromDoor)}


def test_no_golden_frame_is_left_over() -> None:
    found = {str(path.relative_to(NEWEST).with_suffix("")) for path in NEWEST.rglob("*.msgpack")}
    assert found == set(FRAMES)


def test_every_version_we_speak_has_golden_frames_that_decode() -> None:
    kinds = {name: kind for name, (_, kind) in FRAMES.items()}
    for version in range(common.OURS.oldest, common.OURS.newest + 1):
        paths = sorted((GOLDEN / f"v{version}").rglob("*.msgpack"))
        assert paths
        for path in paths:
            name = str(path.relative_to(GOLDEN / f"v{version}").with_suffix(""))
            framing.decode(path.read_bytes(), kinds[name])


def test_no_key_of_the_page_status_is_gone_or_another_unless_its_schema_is() -> None:
    """A new key is added to the file. One that is gone or means something else needs a new file, and PAGE_SCHEMA."""
    text = (GOLDEN / f"status_page_{status.PAGE_SCHEMA}.json").read_bytes()
    read = msgspec.json.decode(text, type=status.StatusPage)
    assert json.loads(msgspec.json.encode(read)) == json.loads(text)
    assert read.engine and read.engine.traits and read.peers and read.refusals and read.problems  # their keys count


def test_tags_are_unique_in_each_union() -> None:
    for union in (engine.ToAgent, engine.ToEngine, peer.Body, door.FromDoor):
        tags = [kind.__struct_config__.tag for kind in get_args(union)]
        assert len(tags) == len(set(tags))


@pytest.mark.parametrize("name", schema_texts())
def test_json_schema_is_current(name: str) -> None:
    text = schema_texts()[name]
    assert (SCHEMA / name).read_text() == text
    assert _dangling(json.loads(text)) == set()


def _dangling(document: dict) -> set[str]:
    """References that point nowhere."""
    text = json.dumps(document)
    named = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    return named - set(document["$defs"])
