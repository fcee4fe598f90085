"""Real agents compare pulled rows with the sender's: the chosen share of them, and a difference fails the transfer."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvbridge_proto.engine import Done, Failed

from testing.oracle import Shape
from testing.pairs import Bench, Benches
from testing.waiting import wait_for

pytestmark = pytest.mark.proves("G4")

TOKENS = range(1000)
TABLE, WANTED = list(range(100, 163)), list(range(5, 21))
WIDE = {"key_width": 64, "value_width": 64}
MOST_TRIES = 20


def started(bench_of: Benches, verify: str) -> Bench:
    sender, receiver = Shape("nhd", blocks=200, **WIDE), Shape("hnd", block_tokens=64, blocks=60, **WIDE)
    return bench_of(sender, receiver, routes="pull,host", verify=verify)


def counted(bench: Bench, name: str) -> list[float]:
    """By the sender's agent, and by the receiver's."""
    sides = (("sender", bench.sender), ("receiver", bench.receiver))
    return [e.agent.status.counters.get(f"kvbridge_{name}_total{{role={role}}}", 0.0) for role, e in sides]


@pytest.mark.parametrize(("verify", "every"), [("always", 1), ("sampled", 64), ("never", 0)])
def test_so_many_chunks_are_compared_and_none_differs(verify: str, every: int, bench_of: Benches) -> None:
    bench = started(bench_of, verify)
    for i in range(3):
        bench.carries(f"r{i}", TABLE, WANTED, TOKENS)
    bench.went_by("pull")
    chunks = counted(bench, "chunks")[1]
    assert chunks > 3
    compared = -(-chunks // every) if every else 0
    assert counted(bench, "chunks_compared") == [compared, compared]
    assert counted(bench, "digest_mismatches") == [0, 0]
    assert [peer.has_pipe for side in bench.engines for peer in side.agent.status.peers] == [True] * 2


@contextmanager
def written_to(bench: Bench) -> Iterator[None]:
    """The sender's engine does not stop writing to rows that it has offered."""
    engine = bench.sender
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            for region in engine.held.memory:
                region[::64] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        is_over.set()
        writer.join()


def test_rows_that_are_not_the_senders_fail_with_both_values(bench_of: Benches) -> None:
    bench = started(bench_of, "always")
    bench.fill(TABLE, TOKENS)
    with written_to(bench):
        for i in range(MOST_TRIES):  # it may be that nothing is written between a read and its check
            bench.offer(f"r{i}", TABLE, len(TOKENS))
            bench.want(f"r{i}", WANTED, TOKENS)
            answer = bench.receiver.answer(f"r{i}")
            if isinstance(answer, Failed):
                break
            assert isinstance(answer, Done)
    assert isinstance(answer, Failed) and answer.code == "digest_mismatch", answer
    found = re.fullmatch(r"chunk (\d+): the sender has digest (\w{16}), read was (\w{16})", answer.reason)
    assert found is not None and found[2] != found[3]
    assert bench.sender.released(f"r{i}").code == "digest_mismatch"
    sender, receiver = bench.sender.agent, bench.receiver.agent
    assert f"code=digest_mismatch {answer.reason}" in receiver.text()
    assert f"chunk {found[1]}: we have digest {found[2]}, read was {found[3]}" in sender.text()
    assert min(counted(bench, "digest_mismatches")) >= 1
    wait_for(lambda: not sender.status.transfers)
    bench.offer("after", TABLE, len(TOKENS))
    bench.want("after", WANTED, TOKENS)
    bench.done("after")
