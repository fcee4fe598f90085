"""Whether one pool's rows can become another's, and whether a pool makes sense at all. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
from kvbridge_proto.pool import Model, Pool


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing has to be converted."""


@dataclass(frozen=True, slots=True)
class Convertible:
    """Everything can be moved; `changes` say what becomes different, with both values."""

    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Incompatible:
    """Nothing can be moved; `reasons` name each field and both values."""

    reasons: tuple[str, ...]


Verdict = Same | Convertible | Incompatible


def fingerprint(model: Model) -> str:
    """A name for the identity of a cache: equal exactly where the models are."""
    return hashlib.blake2b(msgspec.msgpack.encode(model), digest_size=16).hexdigest()


def check_pool(pool: Pool) -> tuple[str, ...]:
    """Why this pool cannot be; nothing if it can."""
    return ()


def verdict(source: Pool, sink: Pool) -> Verdict:
    """Whether rows of `source` can become rows of `sink`."""
    return Same()
