"""Agents that stand still for longer than the other side waits, and go on."""

from __future__ import annotations

import os
import signal

from kvbridge_proto.engine import Done

from tests.integration.agent.pairs import Benches
from tests.support.waiting import wait_for


def test_a_receiver_that_was_given_up_while_it_stood_still_dials_anew_as_soon_as_it_goes_on(bench_of: Benches) -> None:
    """It would find out by the silence, in a minute. The sender has waited for a second only."""
    bench = bench_of(routes="nixl", p={"silence_s": 1}, d={"silence_s": 60})
    bench.works("before")
    sender, receiver = bench.sender.agent, bench.receiver.agent
    os.kill(receiver.process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: not sender.status.peers, why=sender.text)
    finally:
        os.kill(receiver.process.pid, signal.SIGCONT)
    wait_for(lambda: not receiver.status.peers, why=receiver.text)
    assert "link_over" in receiver.text()
    assert isinstance(answer := bench.carry("after"), Done), answer
