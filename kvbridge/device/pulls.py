"""Turns a chunk that both ends see into what a pull moves, everything checked before the first byte is written."""

from __future__ import annotations

from kvbridge_kernels.prepared_pull import PlacedPull, PreparedPull

from ..geometry.plan import Part
from .copy_templates import CopyTemplate, CopyTemplates
from .memory import AttachedPool, Regions


class Pulls:
    """The recipes of one data plane. Most chunks are like one before."""

    def __init__(self) -> None:
        self._senders, self._receivers = CopyTemplates(), CopyTemplates()
        self._kept: dict[tuple[CopyTemplate, CopyTemplate], PreparedPull] = {}

    def of(
        self,
        sender: AttachedPool,
        sender_regions: Regions,
        ours: Part,
        receiver: AttachedPool,
        receiver_regions: Regions,
        theirs: Part,
    ) -> PlacedPull:
        """One chunk of a plan, as its sender (`ours`) and its receiver have it in their blocks.

        EngineError where something in one of them is not right, ValueError where the two do not meet.
        """
        assert ours.is_sender and not theirs.is_sender and ours.chunk == theirs.chunk
        size_bytes = ours.chunk.size_bytes
        forms = (
            self._senders.of(sender, sender_regions, ours, size_bytes),
            self._receivers.of(receiver, receiver_regions, theirs, size_bytes),
        )
        places = forms[0].places(ours), forms[1].places(theirs)
        recipe = self._kept.pop(forms, None)
        if recipe is None:
            segments = forms[0].segments(places[0]), forms[1].segments(places[1])
            recipe = PreparedPull(*segments, size_bytes)
            if len(self._kept) == CopyTemplates.KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[forms] = recipe  # the newest last
        return recipe.at(*places)

    def forget(self, pool: AttachedPool) -> None:
        """Keep nothing of this pool any more."""
        self._senders.forget(pool)
        self._receivers.forget(pool)
        self._kept = {
            forms: recipe for forms, recipe in self._kept.items() if all(form.attached is not pool for form in forms)
        }
