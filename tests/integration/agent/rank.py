"""An engine rank as a process. Lines of JSON tell it what to offer, want, abandon or kill, and when.

`python -m tests.integration.agent.rank '<Job as JSON>'`. Once a request is over, the rank does at once what an engine
may do. A sender overwrites blocks that were released. A receiver overwrites blocks whose want has failed, and then says
whether anybody wrote there since.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

import msgspec
import torch
from kvbridge_proto.engine import Abandon, Withdraw
from kvbridge_proto.status import Status, StatusQuery

from kvbridge.loopback.engine import Job, JobEngine, RequestRejected, why
from kvbridge.loopback.messages import number_of, offer_of, want_of
from kvbridge.loopback.pools import POISON, DemoRequest, first_difference

CALM_S = 0.1  # how long nobody may have written when we look
GONE = "connection_ended"
GONE_S = 5.0
SEEDS = 2


class Rank(JobEngine):
    """`do_verb` does what it is told by that verb, and what it returns is said.

    The job's one request comes with the content of several seeds, in the same blocks: what is left of the one before
    would show.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        (request,) = job.requests
        codec = job.shape.codec if job.role == "sender" else job.sender_codec
        self.tokens, self.table = request.tokens, tuple(self.tables[request.name])
        self.wholes = [self._whole(msgspec.structs.replace(request, seed=seed), codec) for seed in range(SEEDS)]

    def _whole(self, request: DemoRequest, codec: Any) -> list[torch.Tensor]:
        """All of our memory as it is with this prompt in it."""
        regions = [torch.full_like(region, POISON) for region in self.regions]
        self.fill(regions, request, codec)
        return regions

    # As sender:

    def do_offer(self, seed: int, rendezvous: str, hold_s: float) -> dict[str, Any]:
        """Compute a prompt and offer it; says `offered` once our agent knows of it. How the offer ended.

        The blocks are somebody else's at once, while the receiver may not be through with what came out of them.
        """
        self._offer(seed, rendezvous, hold_s)
        ended = self._end_of(rendezvous)
        self._scribble(POISON)
        return ended

    def _offer(self, seed: int, rendezvous: str, hold_s: float) -> None:
        for region, whole in zip(self.regions, self.wholes[seed], strict=True):
            region.copy_(whole)
        offer = offer_of(rendezvous, self.tokens, self.table, hold_s=hold_s, fence=self.fence.mark())
        self.client.send(offer)
        self.client.send(StatusQuery())
        self.told(Status)
        say("offered", {})

    def do_halt(
        self, seed: int, rendezvous: str, hold_s: float, after_s: float, stop: int, for_s: float, is_withdrawn: bool
    ) -> dict[str, Any]:
        """Offer; after so long that process stands still for a while. How the offer ended.

        If the offer is withdrawn meanwhile, its blocks are used again before the process goes on: that is what an
        engine does that must compute on and gets no answer.
        """
        self._offer(seed, rendezvous, hold_s)
        time.sleep(after_s)
        os.kill(stop, signal.SIGSTOP)
        try:
            if is_withdrawn:
                self.client.send(Withdraw(number=number_of(rendezvous), reason="preempted"))
            time.sleep(for_s)
            if is_withdrawn:
                self._scribble(POISON)
        finally:
            os.kill(stop, signal.SIGCONT)
        return self._end_of(rendezvous)

    # As receiver:

    def do_want(self, seed: int, rendezvous: str, sender: str) -> dict[str, Any]:
        """Undisturbed: how long it took and what is wrong with our memory."""
        self._scribble(POISON)
        began = self._want(rendezvous, sender)
        return self._end_of(rendezvous) | {"seconds": time.perf_counter() - began, "wrong": self._wrong(seed)}

    def do_disturb(
        self,
        seed: int,
        rendezvous: str,
        sender: str,
        after_s: float,
        kill: int,
        pattern: int,
        number: int = signal.SIGKILL,
        calm_s: float = CALM_S,
        is_patient: bool = True,
    ) -> dict[str, Any]:
        """Want, then abandon it after so long, or signal that process; how it ended, and what was written since.

        The end of our agent's socket is not yet the end of its kernels: only its process's is.
        """
        process = os.pidfd_open(kill) if kill else -1
        self._scribble(POISON)
        began = self._want(rendezvous, sender)
        time.sleep(after_s)
        if kill:
            os.kill(kill, number)
        else:
            self.client.send(Abandon(number=number_of(rendezvous)))
        ended = self._end_of(rendezvous)
        if ended["code"] == GONE and is_patient:
            assert select.select([process], [], [], GONE_S)[0], f"process {kill} is not gone in {GONE_S} s"
        if kill:
            os.close(process)
        if not ended["code"]:
            return ended | {"seconds": time.perf_counter() - began, "wrong": self._wrong(seed)}
        self._scribble(pattern)
        time.sleep(calm_s)
        return ended | {"wrong": self._written_on(pattern)}

    # Both:

    def do_attach(self) -> dict[str, Any]:
        self.join(self.job.ranks)
        return {}

    def do_gone(self) -> dict[str, Any]:
        """Wait until our agent's end is heard."""
        try:
            self.wait(lambda message: False)
        except RequestRejected as error:
            return {"is_gone": not self.client.is_connected, "reason": str(error)}
        raise AssertionError

    def _want(self, rendezvous: str, sender: str) -> float:
        """When it was sent."""
        tokens, size = range(self.tokens), self.job.shape.block_tokens
        want = want_of(rendezvous, sender, tokens, self.table, size, deadline_s=20.0, fence=self.fence.mark())
        began = time.perf_counter()
        self.client.send(want)
        return began

    def _end_of(self, rendezvous: str) -> dict[str, Any]:
        """Code and reason of a want or an offer: empty if all is well, the code GONE if our agent is."""
        try:
            code, reason = why(self.end_of((rendezvous,)))
        except RequestRejected as error:
            return {"code": GONE if not self.client.is_connected else "silent", "reason": str(error)}
        return {"code": code, "reason": reason}

    def _scribble(self, pattern: int) -> None:
        """Write all of our memory, and return when that is over."""
        for region in self.regions:
            region.fill_(pattern)
        if self.job.device != "cpu":
            torch.cuda.synchronize(self.job.device)

    def _written_on(self, pattern: int) -> str:
        """What is not the pattern any more, in words."""
        for index, region in enumerate(self.regions):
            others = (region != pattern).nonzero().flatten()
            if len(others):
                first = int(others[0])
                return f"region {index}: {len(others)} bytes written after the end, the first at {first}"
        return ""

    def _wrong(self, seed: int) -> str:
        found = zip(self.layers, self.regions, self.wholes[seed], strict=True)
        shape, rank = self.job.shape, self.job.rank
        wrong = (first_difference(ours, whole, shape, rank, layer) for layer, ours, whole in found)
        return next(filter(None, wrong), "")


def main() -> None:
    """Until stdin ends."""
    torch.set_num_threads(1)
    rank = Rank(msgspec.json.decode(sys.argv[1], type=Job))
    say("ready", {})
    for line in sys.stdin:
        told = json.loads(line)
        verb = told.pop("do")
        say(verb, getattr(rank, f"do_{verb}")(**told))


def say(event: str, more: dict[str, Any]) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


if __name__ == "__main__":
    main()
