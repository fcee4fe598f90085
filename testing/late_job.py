"""A rank whose stream is late, as a process: `python -m testing.late_job '<LateJob as JSON>'`. On a GPU only."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

from testing.job_engine import DemoRequest, Job, JobEngine
from testing.jobs import main
from testing.made_rows import DemoRows


class LateJob(Job, frozen=True, kw_only=True):
    """With `late_cycles`, a kernel of that many cycles runs before every piece that a sender computes, and before the
    last write by the former owner of the blocks that a receiver wants. An agent that does not wait for the fence then
    leaves wrong rows.
    """

    late_cycles: int = 0
    is_fenced: bool = True  # if False, offers and wants claim that the stream has finished


class LateEngine(JobEngine):
    job: LateJob

    def fill_own(self) -> None:
        """Each piece is written when it is offered instead."""
        if not self.job.late_cycles:
            super().fill_own()

    def compute(self, request: DemoRequest, first_token: int, tokens: int) -> int:
        if tokens > request.first_token:
            first_token = max(first_token, request.first_token)
            piece = msgspec.structs.replace(request, first_token=first_token, tokens=tokens)
            self._put_late(self.rows(self.regions, piece, self.job.shape.codec))
        return self._mark()

    def leave(self, request: DemoRequest) -> int:
        """Let the former owner write for the last time."""
        former = msgspec.structs.replace(request, seed=request.seed + 1)
        self._put_late(self.rows(self.regions, former, self.job.sender_codec))
        return self._mark()

    def _mark(self) -> int:
        return self.fence.mark() if self.job.is_fenced else 0

    def _put_late(self, rows: Iterator[DemoRows]) -> None:
        if not self.job.late_cycles:
            return
        ready = list(rows)  # copies from the host would wait for the kernel, so they come before it
        with torch.cuda.device(self.job.device):
            torch.cuda._sleep(self.job.late_cycles)
            for each in ready:
                each.put()


if __name__ == "__main__":
    main(LateEngine, LateJob)
