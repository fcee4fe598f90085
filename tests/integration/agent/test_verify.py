"""Real agents compare pulled rows with the sender's: the chosen share of them, and a difference fails the transfer."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from kvbridge_proto.engine import Done, Failed

from tests.integration.agent.harness import wait_for
from tests.integration.agent.test_carry import Bench
from tests.support.oracle import Shape

TOKENS = range(1000)
TABLE, WANTED = list(range(100, 163)), list(range(5, 21))
WIDE = {"key_width": 64, "value_width": 64}
MOST_TRIES = 20


def bench_of(folder: Path, stack: ExitStack, verify: str) -> Bench:
    sender, receiver = Shape("nhd", blocks=200, **WIDE), Shape("hnd", block_tokens=64, blocks=60, **WIDE)
    bench = Bench(folder, stack, sender, receiver, routes="pull,host", verify=verify)
    bench.fill(TABLE, TOKENS)
    return bench


def counted(bench: Bench, name: str) -> list[float]:
    """By the sender's agent, and by the receiver's."""
    sides = (("sender", bench.senders[0]), ("receiver", bench.receivers[0]))
    return [e.agent.status.counters.get(f"kvbridge_{name}_total{{role={role}}}", 0.0) for role, e in sides]


@pytest.mark.parametrize(("verify", "every"), [("always", 1), ("sampled", 64), ("never", 0)])
def test_so_many_chunks_are_compared_and_none_differs(verify: str, every: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = bench_of(tmp_path, stack, verify)
        for i in range(3):
            bench.offer(f"r{i}", TABLE, len(TOKENS))
            bench.want(f"r{i}", WANTED, TOKENS)
            bench.done(f"r{i}")
        bench.check(WANTED, TOKENS)
        bench.went_by("pull")
        chunks = counted(bench, "chunks")[1]
        assert chunks > 3
        compared = -(-chunks // every) if every else 0
        assert counted(bench, "chunks_compared") == [compared, compared]
        assert counted(bench, "digest_mismatches") == [0, 0]
        assert [peer.has_pipe for side in (*bench.senders, *bench.receivers) for peer in side.agent.status.peers] == [
            True
        ] * 2


@contextmanager
def written_to(bench: Bench) -> Iterator[None]:
    """The sender's engine does not stop writing to rows that it has offered."""
    (engine,) = bench.senders
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


def test_rows_that_are_not_the_senders_fail_with_both_values(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = bench_of(tmp_path, stack, "always")
        with written_to(bench):
            for i in range(MOST_TRIES):  # it may be that nothing is written between a read and its check
                bench.offer(f"r{i}", TABLE, len(TOKENS))
                bench.want(f"r{i}", WANTED, TOKENS)
                answer = bench.receivers[0].answer(f"r{i}")
                if isinstance(answer, Failed):
                    break
                assert isinstance(answer, Done)
        assert isinstance(answer, Failed) and answer.code == "digest_mismatch", answer
        found = re.fullmatch(r"chunk (\d+): the sender has digest (\w{16}), read was (\w{16})", answer.reason)
        assert found is not None and found[2] != found[3]
        assert bench.senders[0].released(f"r{i}").code == "digest_mismatch"
        sender, receiver = bench.senders[0].agent, bench.receivers[0].agent
        assert f"code=digest_mismatch {answer.reason}" in receiver.text()
        assert f"chunk {found[1]}: we have digest {found[2]}, read was {found[3]}" in sender.text()
        assert min(counted(bench, "digest_mismatches")) >= 1
        wait_for(lambda: not sender.status.transfers)
        bench.offer("after", TABLE, len(TOKENS))
        bench.want("after", WANTED, TOKENS)
        bench.done("after")
