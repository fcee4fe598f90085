"""KV rows that the servers left in a folder (see plugin.py): joined over the ranks, and converted as on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kvbridge_kernels.codecs_ref import Number, cast


@dataclass(frozen=True)
class Rows:
    """One prompt's: (layer, part) -> [tokens, heads of the whole model, row bytes], uint8; all of one codec."""

    rows: dict[tuple[int, str], np.ndarray]
    codec: str

    def converted(self, codec: str) -> Rows:
        """By the twin of the kernels, with scale 1."""
        if codec == self.codec:
            return self
        return Rows({key: _convert(rows, self.codec, codec) for key, rows in self.rows.items()}, codec)


def load(folder: Path, side: str, room: int, ranks: int, timeout_s: float = 10.0) -> Rows:
    """Heads side by side in the order of the ranks that have the layer; a latent must be the same on all of them."""
    each = [_load(folder / f"{side}-{room}-{rank}.npz", timeout_s) for rank in range(ranks)]
    codecs = {rows.codec for rows in each}
    assert len(codecs) == 1, codecs
    joined = {}
    for layer, part in sorted({key for rows in each for key in rows.rows}):
        parts = [rows.rows[layer, part] for rows in each if (layer, part) in rows.rows]
        if part == "latent":
            assert all(np.array_equal(parts[0], other) for other in parts), f"{side}: ranks differ in layer {layer}"
            parts = parts[:1]
        joined[layer, part] = np.concatenate(parts, axis=1)
    return Rows(joined, codecs.pop())


def assert_carried(given: Rows, taken: Rows) -> None:
    """`taken` is `given` in its own codec, bit for bit."""
    expected = given.converted(taken.codec)
    assert expected.rows.keys() == taken.rows.keys()
    for (layer, part), rows in expected.rows.items():
        found = taken.rows[layer, part]
        assert rows.shape == found.shape, f"layer {layer} {part}: {rows.shape} were given, {found.shape} taken"
        wrong = np.argwhere((rows != found).any(axis=2))
        assert not len(wrong), (
            f"layer {layer} {part}: {len(wrong)} of {rows.shape[0] * rows.shape[1]} rows differ, "
            f"the first at token {wrong[0][0]}, head {wrong[0][1]}"
        )
        assert rows.any(axis=2).mean() > 0.99, f"layer {layer} {part}: most rows are zeros, which proves nothing"


def _load(path: Path, timeout_s: float) -> Rows:
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} was written"
        time.sleep(0.02)
    with np.load(path) as arrays:
        keys = [key for key in arrays.files if "." in key]
        rows = {(int(key.split(".")[0]), key.split(".")[1]): arrays[key] for key in keys}
        return Rows(rows, str(arrays["codec"]))


def _convert(rows: np.ndarray, old: str, new: str) -> np.ndarray:
    before, after = Number(old), Number(new)
    flat = torch.from_numpy(rows).reshape(1, rows.shape[0] * rows.shape[1], rows.shape[2])
    width = rows.shape[2] // before.dtype.itemsize * after.dtype.itemsize
    target = torch.empty(*flat.shape[:2], width, dtype=torch.uint8)
    cast(flat.contiguous(), target, before, after)
    return target.reshape(*rows.shape[:2], width).numpy()
