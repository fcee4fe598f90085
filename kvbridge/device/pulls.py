"""Turns a chunk, with both ends' blocks, into what a pull moves. All is checked before the first byte is written."""

from __future__ import annotations

from kvbridge_kernels.prepared_pull import PlacedPull, PreparedPull

from ..geometry.plan import Part
from .copy_templates import CopyTemplate, CopyTemplates
from .memory import AttachedPool, Regions


class Pulls:
    """The prepared pulls of one copier, kept since most chunks resemble an earlier one."""

    def __init__(self) -> None:
        self._senders, self._receivers = CopyTemplates(), CopyTemplates()
        self._kept: dict[tuple[CopyTemplate, CopyTemplate], PreparedPull] = {}

    def of(
        self,
        sender: AttachedPool,
        sender_regions: Regions,
        sender_part: Part,
        receiver: AttachedPool,
        receiver_regions: Regions,
        receiver_part: Part,
    ) -> PlacedPull:
        """The pull of one chunk, from its sender's blocks into its receiver's.

        EngineError if something in either part is invalid, ValueError if the two do not match.
        """
        assert sender_part.is_sender and not receiver_part.is_sender and sender_part.chunk == receiver_part.chunk
        size_bytes = sender_part.chunk.size_bytes
        templates = (
            self._senders.of(sender, sender_regions, sender_part, size_bytes),
            self._receivers.of(receiver, receiver_regions, receiver_part, size_bytes),
        )
        places = templates[0].places(sender_part), templates[1].places(receiver_part)
        prepared = self._kept.pop(templates, None)
        if prepared is None:
            segments = templates[0].segments(places[0]), templates[1].segments(places[1])
            prepared = PreparedPull(*segments, size_bytes)
            if len(self._kept) == CopyTemplates.KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[templates] = prepared  # the newest last
        return prepared.at(*places)

    def forget(self, pool: AttachedPool) -> None:
        """Keep nothing of this pool."""
        self._senders.forget(pool)
        self._receivers.forget(pool)
        self._kept = {
            templates: prepared
            for templates, prepared in self._kept.items()
            if all(template.attached is not pool for template in templates)
        }
