"""Blocks -> slot on a GPU: one launch per chunk over all planes alike in form, converting and summing as it goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .segment import Segment, Span
from .work import Work


def gather(segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work) -> None:
    """Fill the slot with the rows of all segments and its gaps with zeros; `sums`, int64 [1], becomes the sum64.

    Enqueued on the current stream of `work.device`; nothing is allocated or waited for. `segments`' places and scales
    are read before this returns, `work` until the launch has run. ValueError before anything is enqueued.
    """
    raise NotImplementedError
