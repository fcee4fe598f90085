"""Offers that begin after a prefix: nothing before it is read, and a want that needs it fails at once."""

from __future__ import annotations

import itertools

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Failed

from kvbridge.dataplane.orders import LandedChunk, LeavingChunk
from kvbridge.exchange.block_tables import extended
from kvbridge.geometry.plan import Part
from tests.unit.exchange.network import Node
from tests.unit.exchange.test_shares import ranks
from tests.unit.exchange.test_windows import FULL, LATE, blocks, hybrid, late_entries
from tests.unit.exchange.world import World, make_pool

TOKEN_BYTES = 2 * 2 * 4 * 16  # layers x parts x heads x row


def test_it_grows_as_the_prompt_is_computed() -> None:
    world = World(slots=8)
    world.want("r", 64, first=16)
    world.offer("r", 16, 0, first_token=16, last=False)
    world.serve("r", 32, 4, first=4, first_token=16, last=False)
    early = sum(world.scatters.values())
    world.serve("r", 64, 8, first=8, first_token=16)
    assert isinstance(world.answers()["r"], Done) and 0 < early < sum(world.scatters.values())
    world.check_rest()


@pytest.mark.parametrize(
    ("first_token", "first", "code", "reason"),
    [(6, 1, "", ""), (6, 2, "blocks_too_few", "[6, 16) asked for, the blocks hold [8, 24)"), (6, 0, "", "")],
)
def test_the_tables_begin_with_the_block_of_the_first_token(
    world: World, first_token: int, first: int, code: str, reason: str
) -> None:
    world.want("r", 16, first=6)
    world.serve("r", 16, 4, first=first, first_token=first_token)
    assert world.released()["r"].code == code and reason in world.released()["r"].reason


@pytest.mark.parametrize(
    ("first_token", "tokens", "code", "reason"),
    [
        (16, 32, "first_token_changed", "first_token: first 32, now 16"),
        (36, 64, "first_token_changed", "first_token: first 32, now 36"),
        (32, 40, "tokens_shrank", "tokens: first 48, now 40"),
        (32, 16, "bad_range", "tokens: got 16, first_token 32"),
    ],
)
def test_an_offer_that_contradicts_itself_ends(first_token: int, tokens: int, code: str, reason: str) -> None:
    world = World()
    world.offer("r", 48, 4, first=8, first_token=32, last=False)
    world.serve("r", tokens, 0, first_token=first_token)
    assert (world.released()["r"].code, world.released()["r"].reason) == (code, reason)
    world.check_rest()


@pytest.mark.proves("G16")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("is_wanted_first", [False, True])
@pytest.mark.parametrize(("first", "offered"), [(0, 32), (0, 2), (4, 6)])
def test_a_want_of_tokens_before_it_fails_at_once(first: int, offered: int, is_wanted_first: bool, last: bool) -> None:
    """Also of those that lie in the block with which it begins, and while more is computed."""
    world = World()
    for wants in (is_wanted_first, not is_wanted_first):
        if wants:
            world.want("r", 48, first=first)
        else:
            block = offered // 4
            world.offer("r", 48, 12 - block, first=block, first_token=offered, last=last)
    world.run()
    assert not world.scatters
    failed = world.failure()
    assert (failed.code, failed.reason) == ("tokens_missing", f"first_token: wanted {first}, offered from {offered}")
    assert world.released()["r"].code == "tokens_missing"
    world.check_rest()


def test_it_is_held_until_every_receiver_of_the_want_has_heard() -> None:
    world = World(1, 2)
    world.offer("r", 48, 4, first=8, first_token=32)
    world.hold = {"message"}
    world.fetch("r", 48)
    assert [kind for kind, *_ in world.events] == ["message"] * 2
    world.happen(0)
    assert not world.released()
    world.happen(0)
    world.go_on()
    assert world.released()["r"].code == "tokens_missing"
    assert world.failure("r", 0).code == world.failure("r", 1).code == "tokens_missing"
    world.check_rest()


def test_the_answer_to_an_empty_want_does_not_wait_for_an_offer() -> None:
    world = World(2)
    world.fetch("r", 30, (), first=30)
    assert isinstance(world.answers()["r"], Done)
    world.offer("r", 48, 12, last=False)
    assert world.released(0)["r"].code == world.released(1)["r"].code == ""
    world.check_rest()


@pytest.mark.parametrize(
    ("first", "end", "reason"),
    [(16, 32, "first_token: wanted 16, offered from 32"), (32, 33, "end_token: wanted 33, offered 32")],
)
def test_an_offer_of_no_tokens_is_not_what_a_want_of_some_needs(first: int, end: int, reason: str) -> None:
    world = World()
    world.offer("r", 32, 0, first_token=32)
    world.fetch("r", end, first=first)
    failed = world.failure()
    assert (failed.code, failed.reason) == ("tokens_missing", reason)
    world.check_rest()


@pytest.mark.parametrize(
    ("want_first", "reason"), [(4, ""), (6, ""), (2, "first_token: wanted 2, offered from 4"), (8, "")]
)
def test_a_rank_looks_at_its_own_tokens(want_first: int, reason: str) -> None:
    """Of tokens from 4 on the first rank, with runs of 4 of two ranks, has [8, 12) and so begins with its entry 1."""
    world = World(ranks("prefill", 2, 4, 4), 1, slots=8)
    for node, first in zip(world.senders, (1, 0), strict=True):
        pieces = (Blocks(0, first, tuple(range(first, 2))),)
        world.offer("r", 16, pieces, first_token=4, at=node)
    world.fetch("r", 16, first=want_first)
    if reason:
        failed = world.failure()
        assert (failed.code, failed.reason) == ("tokens_missing", reason)
    else:
        done = world.answers()["r"]
        assert isinstance(done, Done) and done.moved_bytes == (16 - want_first) * TOKEN_BYTES
    world.check_rest()


def test_a_rank_that_has_nothing_before_it_does_not_miss_it() -> None:
    """Of tokens from 2 on the second rank has all that it has."""
    world = World(ranks("prefill", 2, 4, 4), 1)
    world.offer("r", 16, 2, first_token=2)
    world.hold = {"message"}
    world.fetch("r", 16)
    (_, claim) = [event for event in world.events if event[0] == "message"]
    world.happen(world.events.index(claim))
    assert not world.released(1) and world.senders[1].sending.outgoing_transfers
    world.hold = set()


@pytest.mark.parametrize(("kind", "end", "first_token"), [("sliding", 39, 24), ("chunked", 39, 24), ("state", 39, 24)])
def test_a_group_that_keeps_less_counts_as_what_it_keeps(kind: str, end: int, first_token: int) -> None:
    """The window of 39 tokens begins at 30, in an entry that begins before the offer does: it is said, and not read."""
    world = World([hybrid("prefill", 4, 16, kind)], [hybrid("decode", 16, 4, kind)], slots=8)
    world.offer("r", end, (blocks(FULL, 6, 10), late_entries(kind, end, 16)), first_token=first_token)
    world.fetch("r", end, (blocks(FULL, 1, 3), late_entries(kind, end, 4)), first=first_token)
    assert isinstance(world.answers()["r"], Done) and world.released()["r"].code == ""
    world.check_rest()


def test_a_window_that_begins_behind_the_offer_is_all_that_its_sender_checks() -> None:
    world = World([hybrid("prefill", 4, 16)], [hybrid("decode", 16, 4)])
    engine = world.senders[0].engine
    extended({}, engine, (blocks(FULL, 8, 10), blocks(LATE, 2, 3)), 32, 39, True)
    with pytest.raises(Exception, match=r"\[32, 39\) asked for, the blocks hold \[0, 32\)"):
        extended({}, engine, (blocks(FULL, 8, 10), blocks(LATE, 0, 2)), 32, 39, True)
    with pytest.raises(Exception, match=r"\[16, 39\) asked for, the blocks hold \[32, 48\)"):
        extended({}, engine, (blocks(FULL, 0, 10), blocks(LATE, 2, 3)), 8, 39, True)


class Watched(World):
    """Notes of which tokens rows are read and written; every request has the blocks that its tokens are numbers of."""

    def __init__(self, senders: int, receivers: int, block_tokens: tuple[int, int]) -> None:
        pools = [
            [make_pool(engine, rank, size, tokens, kv_heads=6) for rank in range(size)]
            for engine, size, tokens in zip(("prefill", "decode"), (senders, receivers), block_tokens, strict=True)
        ]
        super().__init__(*pools, slots=8, local=4)
        self.block_tokens = block_tokens
        self.read: dict[tuple[str, str], set[int]] = {}  # sender, request
        self.written: dict[tuple[str, str], set[int]] = {}  # receiver, request

    def _gather(self, sender: Node, leaving: LeavingChunk) -> None:
        plan = leaving.order.plan
        part = Part(plan, plan.chunk(leaving.chunk), leaving.tables, is_sender=True)
        self.read.setdefault((sender.name, leaving.order.request), set()).update(_tokens(part))
        super()._gather(sender, leaving)

    def _scatter(self, receiver: Node, landed: LandedChunk) -> None:
        order = landed.order
        part = Part(order.plan, order.plan.chunk(landed.notice.chunk), order.tables, is_sender=False)
        request = receiver.receiving.incoming_transfers[order.transfer].wanted.want.request
        self.written.setdefault((receiver.name, request), set()).update(_tokens(part))
        super()._scatter(receiver, landed)

    def tables(self, is_receiver: bool, first: int, end: int) -> tuple[Blocks, ...]:
        size = self.block_tokens[is_receiver]
        ids = tuple(range(first // size, -(-end // size)))
        return (Blocks(0, first // size, ids),) if first < end else ()


def _tokens(part: Part) -> set[int]:
    units = {(move.unit_tokens, place) for move in part.moves() for place in move.places.tolist()}
    return {place * unit_tokens + i for unit_tokens, place in units for i in range(unit_tokens)}


TOKENS = 5
UP_TO = range(TOKENS + 1)
RANGES = [(first, end) for first, end in itertools.product(UP_TO, UP_TO) if first <= end]


@pytest.mark.proves("G16")
@pytest.mark.parametrize("block_tokens", list(itertools.product((1, 3, 4), (1, 3, 4))))
def test_whatever_is_offered_and_wanted_is_answered_and_released(block_tokens: tuple[int, int]) -> None:
    """Every offer of the last tokens of 5, every want of some of them, between 1 to 3 ranks and 1 to 3.

    Of both sides' ranks and blocks, each three are tried together: a third of all fours.
    """
    row = sum(map((1, 3, 4).index, block_tokens))
    for senders, receivers in ((each, (row - each) % 3 + 1) for each in (1, 2, 3)):
        world = Watched(senders, receivers, block_tokens)
        for number, (offered, (first, end)) in enumerate(itertools.product(UP_TO, RANGES)):
            request, want = f"{offered}: {first}-{end}", world.tables(True, first, end)
            if number % 2:
                world.want(request, end, want, first=first)
            world.offer(request, TOKENS, world.tables(False, offered, TOKENS), first_token=offered)
            if not number % 2:
                world.want(request, end, want, first=first)
            world.run()
            tokens, is_there = set(range(first, end)), first == end or first >= offered
            tail = set(range(end, -(-end // block_tokens[1]) * block_tokens[1]))  # equal sides move whole blocks
            for receiver in range(receivers):
                answer = world.answers(receiver)[request]
                assert isinstance(answer, Done if is_there else Failed), (request, answer)
                written = world.written.get((f"D{receiver}", request), set())
                assert written - tail == (tokens if is_there else set()), request
            for sender in range(senders):
                assert world.released(sender)[request].code == ("" if is_there else "tokens_missing"), request
            read = set().union(*(world.read.get((f"P{sender}", request), set()) for sender in range(senders)))
            assert read - tail == (tokens if is_there else set()), request
        world.check_rest()
