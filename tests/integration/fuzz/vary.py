"""Valid records with a few fields changed: wrong, but close enough to pass the first checks. Pure."""

from __future__ import annotations

import functools
from random import Random
from typing import Any, get_type_hints

import msgspec

from tests.integration.fuzz.typed import Draw, drawer


@functools.cache
def _draws(cls: type[msgspec.Struct]) -> dict[str, Draw]:
    return {name: drawer(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def varied(random: Random, record: Any, times: int) -> Any:
    """The record with `times` places changed."""
    for _ in range(times):
        record = _varied(random, record)
    return record


def _varied(random: Random, record: msgspec.Struct) -> Any:
    name = random.choice(record.__struct_fields__)
    value = getattr(record, name)
    if isinstance(value, msgspec.Struct) and random.random() < 0.95:
        return msgspec.structs.replace(record, **{name: _varied(random, value)})
    if isinstance(value, tuple) and value and random.random() < 0.9:
        return msgspec.structs.replace(record, **{name: _varied_items(random, value)})
    if type(value) is int and random.random() < 0.5:
        near = (value + 1, max(0, value - 1), min(value * 2, 1 << 62), value // 2, min(value << 20, 1 << 62))
        return msgspec.structs.replace(record, **{name: random.choice(near)})
    return msgspec.structs.replace(record, **{name: _draws(type(record))[name](random)})


def _varied_items(random: Random, items: tuple[Any, ...]) -> tuple[Any, ...]:
    at = random.randrange(len(items))
    item = items[at]
    match random.randrange(8):
        case 0:
            return items[:at] + items[at + 1 :]
        case 1:
            return (*items, item)
        case 2:
            return (*items, *(_varied(random, item) if isinstance(item, msgspec.Struct) else item for _ in range(20)))
        case 3:
            return items[::-1]
    if not isinstance(item, msgspec.Struct):
        return items
    changed = _varied(random, item)
    return (*items[:at], changed, *items[at + 1 :])
