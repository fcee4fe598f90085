"""KV rows that the servers left in a folder (see plugin.py). The demo keeps and compares them in the same way."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from demo.rows import SavedRows, difference, load

__all__ = ["SavedRows", "assert_carried", "assert_parts_carried", "assert_windows_carried", "load"]


def assert_carried(given: SavedRows, taken: SavedRows) -> None:
    """`taken` is `given` in its own codec, bit for bit."""
    assert not (wrong := difference(given, taken, len(next(iter(given.rows.values()))))), wrong


def assert_parts_carried(given: SavedRows, taken: SavedRows, codecs: Mapping[tuple[str, ...], tuple[str, str]]) -> None:
    """The same where parts have codecs of their own. `codecs` are those of parts on the given and the taken side."""
    assert {part for _, part in taken.rows} == {part for parts in codecs for part in parts}
    for parts, each in codecs.items():
        ours, theirs = (
            SavedRows({key: rows for key, rows in side.rows.items() if key[1] in parts}, codec)
            for side, codec in zip((given, taken), each, strict=True)
        )
        assert_carried(ours, theirs)


def assert_windows_carried(given: SavedRows, taken: SavedRows, windowed: Collection[int], first: int) -> None:
    """The same, but of the layers `windowed` only the rows of tokens from `first` on: all that they keep."""
    for has_window, begin in ((False, 0), (True, first)):
        ours, theirs = (
            SavedRows(
                {key: each[begin:] for key, each in side.rows.items() if (key[0] in windowed) == has_window}, side.codec
            )
            for side in (given, taken)
        )
        assert all(each.any(axis=(1, 2)).all() for each in theirs.rows.values()), "a row of zeros"
        assert_carried(ours, theirs)
