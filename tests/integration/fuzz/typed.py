"""Draws absurd values that a wire type still allows: its bounds and their neighbours. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from random import Random
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

Draw = Callable[[Random], Any]

# Few, so that messages speak of the same things; and what breaks a log, a terminal or a path.
TEXTS = ("", "a", "t1", "r0", "r1", "k", "v", "k_scale", "latent", "tcp://127.0.0.1:1", "xxh3", "sum", "nixl")
ODD_TEXTS = ("\x00", "\x1b[2J\n", "[/x]", "../..", "ä" * 20, "\U0010ffff", "%s{0}", "nan", "٣")
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 64, 128, 255, 256, 4096, 65535, 65536)
POWERS = tuple(1 << power for power in (31, 32, 40, 48, 62, 63))
LENGTHS = (0, 1, 1, 1, 2, 2, 3, 4, 9)
LONG = 300


@functools.cache
def drawer(kind: Any) -> Draw:
    """What draws values of a type, such as a message or a union of them."""
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> Draw:
    match info:
        case inspect.IntType():
            return _integer(info)
        case inspect.FloatType():
            return _float(info)
        case inspect.StrType():
            return _text(info)
        case inspect.BytesType():
            return _bytes(info)
        case inspect.BoolType():
            return lambda random: random.random() < 0.5
        case inspect.NoneType():
            return lambda random: None
        case inspect.LiteralType(values=values):
            return lambda random: random.choice(values)
        case inspect.VarTupleType():
            return _tuple(info)
        case inspect.DictType(key_type=key, value_type=value):
            keys, values = _of(key), _of(value)
            return lambda random: {keys(random): values(random) for _ in range(random.choice(LENGTHS))}
        case inspect.UnionType(types=types):
            draws = [_of(each) for each in types]
            return lambda random: random.choice(draws)(random)
        case inspect.StructType():
            return _struct(info)
    raise AssertionError(f"no values of {info}")


def _integer(info: inspect.IntType) -> Draw:
    low = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else -(1 << 63)
    high = info.le if info.le is not None else info.lt - 1 if info.lt is not None else (1 << 63) - 1
    able = [n for n in (*NUMBERS, *POWERS, low, low + 1, high - 1, high) if low <= n <= high]
    small = [n for n in NUMBERS[:8] if low <= n <= high] or able
    return lambda random: random.choice(small if random.random() < 0.7 else able)


def _float(info: inspect.FloatType) -> Draw:
    low, high = info.ge if info.ge is not None else -math.inf, info.le if info.le is not None else math.inf
    able = [x for x in (0.0, 1e-9, 0.5, 1.0, 60.0, 86400.0, 1e38, 1e308, math.inf, -1.0, -math.inf) if low <= x <= high]
    if info.ge is None:
        able.append(math.nan)
    return lambda random: random.choice(able)


def _text(info: inspect.StrType) -> Draw:
    low, high = info.min_length or 0, info.max_length if info.max_length is not None else LONG
    able = [text for text in TEXTS if low <= len(text) <= high]
    odd = [text for text in ODD_TEXTS if low <= len(text) <= high] + ["x" * high]
    return lambda random: random.choice(able if able and random.random() < 0.9 else odd)


def _bytes(info: inspect.BytesType) -> Draw:
    low, high = info.min_length or 0, info.max_length if info.max_length is not None else LONG
    lengths = sorted({low, min(low + 1, high), min(low + 16, high), min(high, LONG)})
    return lambda random: random.randbytes(random.choice(lengths))


def _tuple(info: inspect.VarTupleType) -> Draw:
    draw, low, high = _of(info.item_type), info.min_length or 0, info.max_length or LONG

    def many(random: Random) -> tuple[Any, ...]:
        count = max(low, min(high, LONG if random.random() < 0.01 else random.choice(LENGTHS)))
        found = [draw(random) for _ in range(min(8, count))]
        return tuple(found * (count // len(found) if len(found) == 8 else 1))

    return many


def _struct(info: inspect.StructType) -> Draw:
    fields = [(each.name, _of(each.type), each.required) for each in info.fields]
    cls: type[msgspec.Struct] = info.cls

    def build(random: Random) -> msgspec.Struct:
        said = {name: draw(random) for name, draw, required in fields if required or random.random() < 0.5}
        return cls(**said)

    return build


# Records with a few fields changed: close enough to pass the first checks:


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
