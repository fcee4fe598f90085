"""Finishes scores that an engine of another kind has kept: adds a weight of the model to them, or takes it off.

For the next rows DeepSeek V4's compressors keep each token's kv and score. vLLM has added a weight of the token's place
(`ape`) to the score, SGLang adds it when it makes the row. Agents do not have that weight, and copy rows as they are.
So the receiving engine's process changes what has come, once all of it is there and before its engine reads it: in the
engine's stream, behind what that computes now. What is offered is never changed.

vLLM's sum is what vLLM itself would have kept. Where SGLang receives, its own sum is off by one rounding more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvbridge_proto.engine import Want

from ...values import Value

RATIOS = (4, 128)  # tokens that a row is made of


class Compressor(Value):
    """One of a layer's: what it keeps, and its weight. `rows` are [B, N, W], blocks of N tokens of `group`.

    A row is kv and score, W / 2 numbers each. `weight` is [ratio, W / 2]; read for each want, as it may be loaded anew.
    """

    rows: torch.Tensor
    group: int
    weight: Callable[[], torch.Tensor]


class Scores(Value):
    """A rank's compressors. `sign` is 1 where the engine keeps scores with the weight, -1 where without."""

    compressors: tuple[Compressor, ...]
    sign: int

    @classmethod
    def of(cls, compressors: list[Compressor | None], sign: int) -> Scores | None:
        """None unless all have fp32 rows, and beside them a weight for each place and number."""
        known = tuple(each for each in compressors if each is not None and _is_known(each))
        return cls(known, sign) if known and len(known) == len(compressors) else None

    def finish(self, want: Want) -> None:
        """Change the rows of the tokens that `want` has brought. Once for each want."""
        with torch.inference_mode():
            for group in sorted({each.group for each in self.compressors}):
                self._finish(group, want)

    def _finish(self, group: int, want: Want) -> None:
        mine = [each for each in self.compressors if each.group == group]
        block, device = mine[0].rows.shape[1], mine[0].rows.device
        for piece in want.blocks:
            first = max(want.first_token, piece.first * block)
            if piece.group != group or first >= want.end_token:
                continue
            tokens = torch.arange(first, want.end_token)
            ids = torch.tensor(piece.ids)[tokens // block - piece.first]
            # Without waiting for the device: a wait would last as long as the engine's step.
            blocks, places, tokens = (each.to(device, non_blocking=True) for each in (ids, tokens % block, tokens))
            for each in mine:
                scores, weight = each.rows[:, :, each.rows.shape[2] // 2 :], each.weight()
                scores[blocks, places] = torch.add(
                    scores[blocks, places], weight[tokens % len(weight)], alpha=self.sign
                )


def _is_known(compressor: Compressor) -> bool:
    rows, weight = compressor.rows, compressor.weight()
    is_fp32 = rows.dtype == weight.dtype == torch.float32 and rows.device == weight.device
    return is_fp32 and len(weight) in RATIOS and tuple(weight.shape[1:]) == (rows.shape[2] // 2,)
