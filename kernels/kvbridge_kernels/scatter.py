"""Slot -> blocks on a GPU: one launch per chunk over all planes alike in form, converting and summing as it goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .segment import Segment, Span
from .work import Work


def scatter(segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work) -> None:
    """Write the rows in the slot to the places of all segments; `sums`, int64 [1], becomes the sum64 of the slot.

    Enqueued on the current stream of `work.device`; nothing is allocated or waited for. `segments`' places and scales
    are read before this returns, `work` until the launch has run. ValueError before anything is enqueued.
    """
    raise NotImplementedError
