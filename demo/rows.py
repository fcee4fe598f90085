"""Reads the KV rows of one prompt that an engine left in a folder: joins its ranks, converts, and compares.

Each rank that has a part of the rows writes a file, `SIDE-ROOM-RANK.npz`: SIDE is `prefill` or `decode`, ROOM the
`bootstrap_room` of the request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kvbridge_kernels.codecs_ref import Number, cast

from kvbridge.errors import OperatorError

APPEAR_S = 10.0


@dataclass(frozen=True)
class SavedRows:
    """Rows of one codec: (layer, part) -> [tokens, heads of the whole model, row bytes], uint8."""

    rows: dict[tuple[int, str], np.ndarray]
    codec: str

    def first(self, tokens: int) -> SavedRows:
        """The rows of the first `tokens` tokens."""
        return SavedRows({key: rows[:tokens] for key, rows in self.rows.items()}, self.codec)

    def converted(self, codec: str) -> SavedRows:
        """The rows in another codec, by the kernels' plain-torch twin, with scale 1."""
        if codec == self.codec:
            return self
        return SavedRows({key: _convert(rows, self.codec, codec) for key, rows in self.rows.items()}, codec)


def write(folder: Path, side: str, room: int, rank: int, codec: str, rows: Mapping[str, np.ndarray]) -> None:
    """Write one rank's rows: "LAYER.PART" -> [tokens, heads, row bytes]. A file with its final name is complete."""
    path = folder / f"{side}-{room}-{rank}.npz"
    part_written, arrays = path.with_suffix(".part"), {"codec": np.array(codec), **rows}
    with part_written.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # none of these names is an option of savez
    part_written.rename(path)


def load(folder: Path, side: str, room: int, ranks: int, timeout_s: float = APPEAR_S) -> SavedRows:
    """Join heads side by side, in the order of the ranks that have the layer. Latents and index keys must be the same.

    Raises OperatorError (`no_rows`, `ranks_differ`).
    """
    each = [_load(folder / f"{side}-{room}-{rank}.npz", timeout_s) for rank in range(ranks)]
    (codec,) = {rows.codec for rows in each}
    joined = {}
    for layer, part in sorted({key for rows in each for key in rows.rows}):
        parts = [rows.rows[layer, part] for rows in each if (layer, part) in rows.rows]
        if part == "latent" or part.startswith("index_key"):
            if not all(np.array_equal(parts[0], other) for other in parts):
                raise OperatorError("ranks_differ", f"{side}: ranks differ in layer {layer} {part}")
            parts = parts[:1]
        joined[layer, part] = np.concatenate(parts, axis=1)
    return SavedRows(joined, codec)


def wait_room(folder: Path) -> int:
    """Wait until a decode engine has left rows here. Returns the request's room. Raises OperatorError (`no_rows`)."""
    end = time.monotonic() + APPEAR_S
    while not (found := list(folder.glob("decode-*-0.npz"))):
        if time.monotonic() > end:
            raise OperatorError("no_rows", "the decoding engine left no rows")
        time.sleep(0.02)
    return int(found[0].name.split("-")[1])


def difference(given: SavedRows, taken: SavedRows, tokens: int) -> str:
    """How `taken` differs from `tokens` tokens of `given`, converted to its codec; empty if bit for bit the same."""
    expected = given.converted(taken.codec)
    if not expected.rows or expected.rows.keys() != taken.rows.keys():
        return f"planes {sorted(expected.rows)} were given, {sorted(taken.rows)} taken"
    for (layer, part), rows in expected.rows.items():
        found = taken.rows[layer, part]
        if rows.shape != found.shape or len(rows) != tokens:
            return f"layer {layer} {part}: {rows.shape} were given, {found.shape} taken, of {tokens} tokens"
        wrong = np.argwhere((rows != found).any(axis=2))
        if len(wrong):
            return (
                f"layer {layer} {part}: {len(wrong)} of {rows.shape[0] * rows.shape[1]} rows differ, "
                f"the first at token {wrong[0][0]}, head {wrong[0][1]}"
            )
        if rows.any(axis=2).mean() <= 0.99:
            return f"layer {layer} {part}: most rows are zeros, which proves nothing"
    return ""


def _load(path: Path, timeout_s: float) -> SavedRows:
    end = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > end:
            raise OperatorError("no_rows", f"no {path.name} was written")
        time.sleep(0.02)
    with np.load(path) as arrays:
        keys = [key for key in arrays.files if "." in key]
        rows = {(int(key.split(".")[0]), key.split(".")[1]): arrays[key] for key in keys}
        return SavedRows(rows, str(arrays["codec"]))


def _convert(rows: np.ndarray, old: str, new: str) -> np.ndarray:
    before, after = Number(old), Number(new)
    flat = torch.from_numpy(rows).reshape(1, rows.shape[0] * rows.shape[1], rows.shape[2])
    width = rows.shape[2] // before.dtype.itemsize * after.dtype.itemsize
    target = torch.empty(*flat.shape[:2], width, dtype=torch.uint8)
    cast(flat.contiguous(), target, before, after)
    return target.reshape(*rows.shape[:2], width).numpy()
