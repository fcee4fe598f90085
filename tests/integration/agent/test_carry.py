"""Real agents carry requests between unequal pools: every row is as the oracle says, and nothing else is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvbridge_proto.engine import Abandon, Done, Failed, Withdraw

from tests.integration.agent.harness import AgentProcess, SyntheticEngine, agent, is_at_rest, wait_for
from tests.support.oracle import Held, Shape, build_all, fill, mismatch


class Bench:
    """Engines of two shapes, each rank beside an agent of its own."""

    def __init__(self, folder: Path, stack: ExitStack, sender: Shape, receiver: Shape, **options: object) -> None:
        self.senders = self._engine(folder, stack, "p", sender, options)
        self.receivers = self._engine(folder, stack, "d", receiver, options)
        self.sender_shape, self.receiver_shape = sender, receiver
        self.before = [engine.held.copy() for engine in self.receivers]

    def _engine(
        self, folder: Path, stack: ExitStack, name: str, shape: Shape, options: dict[str, object]
    ) -> list[SyntheticEngine]:
        engines = []
        for i, held in enumerate(build_all(shape)):
            running = stack.enter_context(agent(folder, f"{name}{i}", **options))
            engines.append(stack.enter_context(closing(SyntheticEngine(running, held))))
            engines[-1].attach()
        for engine in engines:
            engine.directory(*(each.agent for each in engines))
        return engines

    @property
    def address(self) -> str:
        return self.senders[0].agent.address

    def fill(self, table: list[int], tokens: range) -> None:
        for engine in self.senders:
            fill(engine.held, table, tokens)

    def offer(self, request: str, table: list[int], tokens: int, **more: object) -> None:
        for engine in self.senders:
            engine.offer(request, table, tokens, **more)

    def want(self, request: str, table: list[int], tokens: range, **more: object) -> None:
        address = self.address
        for engine in self.receivers:
            engine.want(request, address, table, tokens, **more)

    def went_by(self, route: str) -> None:
        """Every session is of this route."""
        for engine in self.receivers:
            assert {peer.route.split()[0] for peer in engine.agent.status.peers} == {route}, engine.agent.text()
            for peer in engine.agent.status.peers:
                assert peer.route_name == route and peer.bytes_per_s, peer
                assert f" {peer.bytes_per_s / 1e9:.3g} GB/s" in peer.route

    def done(self, request: str) -> None:
        for engine in self.receivers:
            answer = engine.answer(request)
            assert isinstance(answer, Done), answer
        for engine in self.senders:
            assert engine.released(request).code == ""

    def check(self, table: list[int], tokens: range) -> None:
        size = self.receiver_shape.block_tokens
        tail = range(tokens.stop, -(-tokens.stop // size) * size)
        for engine, before in zip(self.receivers, self.before, strict=True):
            wrong = mismatch(engine.held, before, table, tokens, tail)
            assert not wrong, wrong


PAIRS = {
    "nhd 16 tp2 -> hnd 64 tp1": (Shape("nhd", tp_size=2), Shape("hnd", block_tokens=64, blocks=8)),
    "cross-layer 64 tp1 -> packed 16 tp2": (
        Shape("cross_layer", block_tokens=64, blocks=8),
        Shape("packed", tp_size=2),
    ),
    "column-major 32 -> column-major 128": (
        Shape("cpu_vec", block_tokens=32, key_width=32, value_width=32, blocks=16),
        Shape("cpu_vec", block_tokens=128, key_width=32, value_width=32, blocks=6),
    ),
    "equal (folded)": (Shape("cpu_vec", block_tokens=32), Shape("cpu_vec", block_tokens=32)),
    "pp2 -> tp2": (Shape("nhd", pp_size=2), Shape("hnd", tp_size=2)),
}


ROUTES = ("nixl", "pull")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", PAIRS)
def test_carries_every_row_and_writes_nothing_else(name: str, route: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, *PAIRS[name], routes=f"{route},host")
        sender_table, receiver_table = _tables(bench, 90)
        bench.fill(sender_table, range(90))
        bench.offer("r", sender_table, 90)
        bench.want("r", receiver_table, range(90))
        bench.done("r")
        bench.check(receiver_table, range(90))
        bench.went_by(route)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_carries_what_lies_behind_a_prefix_that_the_receiver_has(ranks: tuple[int, int], tmp_path: Path) -> None:
    """48 tokens, three blocks of 16: the receiver's second block of 32 has some of them, and keeps them."""
    shapes = (Shape("nhd", tp_size=ranks[0]), Shape("hnd", block_tokens=32, blocks=16, tp_size=ranks[1]))
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, *shapes)
        sender_table, receiver_table = _tables(bench, 90)
        bench.fill(sender_table, range(48, 90))
        behind = {"first": 3, "first_token": 48}
        bench.offer("r", sender_table[3:], 90, **behind)
        bench.want("r", receiver_table, range(48, 90))
        bench.done("r")
        bench.check(receiver_table, range(48, 90))
        bench.offer("before", sender_table[3:], 90, **behind)
        bench.want("before", receiver_table, range(47, 90))
        for engine in bench.receivers:
            answer = engine.answer("before")
            assert isinstance(answer, Failed) and answer.code == "tokens_missing", answer
            assert answer.reason == "first_token: wanted 47, offered from 48"
        for engine in bench.senders:
            assert engine.released("before").code == "tokens_missing"
        bench.offer("all of it", [], 90, first_token=90)
        bench.want("all of it", receiver_table, range(90, 90), blocks=())
        bench.done("all of it")
        bench.check(receiver_table, range(48, 90))


def _tables(bench: Bench, tokens: int) -> tuple[list[int], list[int]]:
    """Block tables in no order, of which no block is the first of its pool."""
    tables = []
    for shape in (bench.sender_shape, bench.receiver_shape):
        needed = -(-tokens // shape.block_tokens)
        tables.append([shape.blocks - 1 - i for i in range(needed)])
    return tables[0], tables[1]


@pytest.fixture(params=ROUTES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        wide = {"key_width": 64, "value_width": 64}
        sender = Shape("nhd", blocks=200, **wide)
        receiver = Shape("hnd", block_tokens=64, blocks=60, **wide)
        bench = Bench(tmp_path, stack, sender, receiver, routes=f"{request.param},host")
        yield bench
        bench.went_by(request.param)


def test_want_before_offer_and_chunks_while_the_prompt_is_computed(bench: Bench) -> None:
    table, wanted = list(range(100, 164)), list(range(5, 21))
    bench.want("r", wanted, range(1000))
    time.sleep(0.2)
    bench.fill(table, range(1000))
    bench.offer("r", table[:32], 500, is_last=False)
    deadline = time.monotonic() + 10
    while "role=receiver" not in str(bench.receivers[0].agent.status.counters):
        assert time.monotonic() < deadline, "no chunk moved before the prompt was computed"
        time.sleep(0.02)
    bench.offer("r", table[32:], 1000, first=32)
    bench.done("r")
    bench.check(wanted, range(1000))


def test_a_prefix_that_is_there_already_is_left_alone(bench: Bench) -> None:
    table, wanted = list(range(10)), list(range(50, 53))
    bench.fill(table, range(150))
    bench.offer("r", table, 150)
    bench.want("r", wanted, range(37, 150))
    bench.done("r")
    bench.check(wanted, range(37, 150))


def test_many_requests_at_once(bench: Bench) -> None:
    for i in range(32):
        tokens = range(1 + 3 * i)
        table, wanted = list(range(6 * i, 6 * i + 6)), [2 * i % 60, (2 * i + 1) % 60]
        bench.fill(table, tokens)
        if i % 2:
            bench.want(f"r{i}", wanted[: -(-len(tokens) // 64)], tokens)
        bench.offer(f"r{i}", table, len(tokens))
        if not i % 2:
            bench.want(f"r{i}", wanted[: -(-len(tokens) // 64)], tokens)
    for i in range(32):
        bench.done(f"r{i}")
    assert is_at_rest(bench.receivers[0].agent.status)


def test_abandoned_and_withdrawn_requests_end_once_and_leave_nothing(bench: Bench) -> None:
    bench.want("gone", list(range(4)), range(200))
    bench.receivers[0].client.send(Abandon(request="gone"))
    answer = bench.receivers[0].answer("gone")
    assert isinstance(answer, Failed) and answer.code == "aborted"
    bench.offer("back", list(range(4)), 64)
    bench.senders[0].client.send(Withdraw(request="back"))
    assert bench.senders[0].released("back").code == "withdrawn"
    bench.fill([7], range(16))
    bench.offer("r", [7], 16)
    bench.want("r", [9], range(16))
    bench.done("r")
    for engine in (*bench.senders, *bench.receivers):
        wait_for(lambda engine=engine: is_at_rest(engine.agent.status))  # the receiver may hear of it first


def test_a_request_that_ends_as_it_should_is_no_line_at_info(bench: Bench) -> None:
    bench.offer("back", [7], 16)
    bench.senders[0].client.send(Withdraw(request="back"))
    bench.senders[0].released("back")
    bench.fill([7], range(16))
    bench.offer("one", [7], 16)
    bench.want("one", [9], range(16))
    bench.done("one")
    for engine in (*bench.senders, *bench.receivers):
        assert "attached: " in engine.agent.text() and "request=" not in engine.agent.text()


def test_drains_what_flows_and_then_stops(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd"))
        bench.want("r", [3], range(16))
        time.sleep(0.3)
        receiver: AgentProcess = bench.receivers[0].agent
        receiver.process.terminate()
        time.sleep(0.3)
        assert receiver.status.state == "draining"
        bench.receivers[0].want("late", bench.address, [4], range(16))
        late = bench.receivers[0].answer("late")
        assert isinstance(late, Failed) and late.code == "draining"
        bench.fill([5], range(16))
        bench.offer("r", [5], 16)
        bench.done("r")
        bench.check([3], range(16))
        assert receiver.process.wait(10) == 0


def test_a_sender_that_drains_gives_what_is_claimed_and_refuses_the_rest_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd"))
        (sender,), (receiver,) = bench.senders, bench.receivers
        bench.offer("one", [0], 16)
        bench.want("one", [1], range(16))
        bench.done("one")
        bench.offer("two", [4], 16)
        bench.want("claimed", [3], range(16))
        wait_for(lambda: sender.agent.status.transfers)
        sender.agent.process.terminate()
        wait_for(lambda: sender.agent.status.state == "draining")
        bench.offer("late", [6], 16)
        assert sender.released("late").code == "draining"
        began = time.monotonic()
        bench.want("late", [5], range(16))
        late = receiver.answer("late")
        assert isinstance(late, Failed) and late.code == "draining" and time.monotonic() - began < 1
        bench.want("two", [7], range(16))
        bench.done("two")
        bench.fill([5], range(16))
        bench.offer("claimed", [5], 16)
        bench.done("claimed")
        bench.check([3], range(16))
        assert sender.agent.process.wait(5) == 0


def test_a_drain_ends_by_its_deadline(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd"), drain_s=1)
        (sender,), (receiver,) = bench.senders, bench.receivers
        bench.want("r", [3], range(16))
        wait_for(lambda: sender.agent.status.transfers)
        began = time.monotonic()
        sender.agent.process.terminate()
        failed = receiver.answer("r")
        assert isinstance(failed, Failed) and failed.code == "engine_left" and 0.9 < time.monotonic() - began < 3
        assert sender.agent.process.wait(5) == 0


def test_one_agent_can_be_sender_and_receiver(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("nhd"))
        bench.fill([1], range(16))
        bench.offer("r", [1], 16)
        bench.want("r", [2], range(16))
        bench.done("r")
        before: Held = bench.senders[0].held.copy()
        fill(bench.receivers[0].held, [7], range(16))
        bench.receivers[0].offer("back", [7], 16)
        bench.senders[0].want("back", bench.receivers[0].agent.address, [9], range(16))
        assert isinstance(bench.senders[0].answer("back"), Done)
        assert not mismatch(bench.senders[0].held, before, [9], range(16))


def test_a_rank_without_a_token_of_the_prompt_names_no_block(tmp_path: Path) -> None:
    """Neither side: under context parallelism the tokens may all lie on the first ranks."""
    with ExitStack() as stack:
        sender, receiver = Shape("nhd", cp_size=2, cp_interleave=4), Shape("hnd", cp_size=2, cp_interleave=8)
        bench = Bench(tmp_path, stack, sender, receiver)
        bench.fill([2], range(4))
        for rank, engine in enumerate(bench.senders):
            engine.offer("r", [] if rank else [2], 4)
        for rank, engine in enumerate(bench.receivers):
            engine.want("r", bench.address, [3], range(4), **({"blocks": ()} if rank else {}))
        bench.done("r")
        bench.check([3], range(4))


def test_two_hundred_regions_are_mapped_each_in_its_place(tmp_path: Path) -> None:
    """A hundred layers with K and V apart; more descriptors than ride with one frame."""
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape(layers=100, blocks=4), Shape(layers=100, layout="hnd", blocks=4))
        assert len(bench.senders[0].pool.regions) == len(bench.receivers[0].pool.regions) == 200
        table, tokens = [2, 0], range(0, 24)
        bench.fill(table, tokens)
        bench.offer("r", table, 24)
        bench.want("r", [3, 1], tokens)
        bench.done("r")
        bench.check([3, 1], tokens)
