"""Turns a chunk that both ends see into what a pull moves, everything checked before the first byte is written."""

from __future__ import annotations

from kvbridge_kernels.prepared_pull import PlacedPull, PreparedPull

from ..geometry.plan import Part
from .copy_templates import CopyTemplate, CopyTemplates
from .memory import AttachedPool, Regions


class Pulls:
    """The recipes of one data plane. Most chunks are like one before."""

    def __init__(self) -> None:
        self._sources, self._sinks = CopyTemplates(), CopyTemplates()
        self._kept: dict[tuple[CopyTemplate, CopyTemplate], PreparedPull] = {}

    def of(
        self,
        source: AttachedPool,
        source_regions: Regions,
        ours: Part,
        sink: AttachedPool,
        sink_regions: Regions,
        theirs: Part,
    ) -> PlacedPull:
        """One chunk of a plan, as its source (`ours`) and its sink have it in their blocks.

        EngineError where something in one of them is not right, ValueError where the two do not meet.
        """
        assert ours.is_source and not theirs.is_source and ours.chunk == theirs.chunk
        size_bytes = ours.chunk.size_bytes
        forms = (
            self._sources.of(source, source_regions, ours, size_bytes),
            self._sinks.of(sink, sink_regions, theirs, size_bytes),
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
        self._sources.forget(pool)
        self._sinks.forget(pool)
        self._kept = {
            forms: recipe for forms, recipe in self._kept.items() if all(form.attached is not pool for form in forms)
        }
