"""Groups that do not keep every token: their blocks come with the last offer, and are read after it."""

from __future__ import annotations

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.pool import Pool

from kvbridge.routes.slots.halves import OutgoingBySlots
from tests.unit.exchange.world import World, make_pool

WINDOW = 10
FULL, LATE = 0, 1


def hybrid(engine: str, block_tokens: int, late_tokens: int, kind: str = "sliding") -> Pool:
    """Layer 0 keeps every token, layer 1 a window or a state in blocks of its own."""
    return make_pool(engine, 0, 1, block_tokens, kinds=("full", kind), window=WINDOW, late_tokens=late_tokens)


def world(kind: str = "sliding", seed: int = 0, slots: int = 8) -> World:
    return World([hybrid("prefill", 4, 16, kind)], [hybrid("decode", 16, 4, kind)], slots=slots, seed=seed)


def blocks(group: int, first: int, end: int) -> Blocks:
    return Blocks(group, first, tuple(range(first, end)))


def late_entries(kind: str, end: int, block_tokens: int) -> Blocks:
    """The entries that hold what the next query sees after `end` tokens, and no others."""
    first = max(0, end + 1 - WINDOW) if kind == "sliding" else end // WINDOW * WINDOW
    first = end - 1 if kind == "state" else first
    return blocks(LATE, first // block_tokens, -(-end // block_tokens))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["sliding", "chunked", "state"])
def test_carries_requests_whatever_the_order(kind: str, seed: int) -> None:
    small = world(kind, seed, slots=4)
    for i in range(5):
        end = 38 + i
        offer = (blocks(FULL, 0, 12), late_entries(kind, end, 16))
        want = (blocks(FULL, 0, 3), late_entries(kind, end, 4))
        if (seed + i) % 2:
            small.want(f"r{i}", end, want)
        small.offer(f"r{i}", end, offer)
        if not (seed + i) % 2:
            small.want(f"r{i}", end, want)
    small.run()
    assert [type(answer) for answer in small.answers().values()] == [Done] * 5
    assert len(small.released()) == 5
    small.check_rest()


@pytest.mark.parametrize("slots", [2, 16])
@pytest.mark.parametrize("kind", ["sliding", "chunked", "state"])
def test_a_window_waits_for_the_last_offer_and_is_lent_no_slots_before(kind: str, slots: int) -> None:
    """Also when all tokens are there already: only the last word says that their blocks stay as they are."""
    one = world(kind, slots=slots)
    one.want("r", 39, (blocks(FULL, 0, 3), late_entries(kind, 39, 4)))
    one.serve("r", 20, (blocks(FULL, 0, 5),), last=False)
    early = sum(one.scatters.values())
    one.serve("r", 39, (blocks(FULL, 5, 10),), last=False)
    (outgoing,) = one.senders[0].sending.outgoing_transfers.values()
    assert isinstance(outgoing, OutgoingBySlots)
    assert early < sum(one.scatters.values()) == outgoing.shipped == outgoing.plan.early_chunks < outgoing.plan.chunks
    assert slots == 16 or outgoing.announced == outgoing.lent == outgoing.shipped
    one.serve("r", 39, (late_entries(kind, 39, 16),))
    one.check_done("r")


def test_an_early_offer_needs_no_window_blocks() -> None:
    one = world()
    one.serve("r", 20, (blocks(FULL, 0, 5),), last=False)
    assert not one.released()
    one.serve("r", 20, ())
    assert one.released()["r"].code == "missing_group" and f"group: {LATE}" in one.released()["r"].reason


@pytest.mark.parametrize(("first", "end", "code"), [(1, 3, ""), (2, 3, "blocks_too_few"), (1, 2, "blocks_too_few")])
def test_a_last_offer_needs_all_of_the_window(first: int, end: int, code: str) -> None:
    """39 tokens: the query at 39 sees token 30 and on, which begins in entry 1 of blocks of 16."""
    one = world()
    one.want("r", 39, (blocks(FULL, 0, 3), blocks(LATE, 7, 10)))
    one.serve("r", 39, (blocks(FULL, 0, 10), blocks(LATE, first, end)))
    assert one.released()["r"].code == code
    one.pass_time(200)
    one.run()
    assert isinstance(one.answers()["r"], Failed if code else Done)
    one.check_rest()


def test_a_want_needs_blocks_for_the_window_and_no_more() -> None:
    one = world()
    one.want("r", 39, (blocks(FULL, 0, 3), blocks(LATE, 8, 10)))
    one.want("s", 39, (blocks(FULL, 0, 3),))
    for request, code in (("r", "blocks_too_few"), ("s", "missing_group")):
        assert one.failure(request).code == code
    one.check_rest()


def test_a_prefix_inside_the_window_needs_no_blocks_before() -> None:
    one = world()
    one.offer("r", 39, (blocks(FULL, 0, 10), late_entries("sliding", 39, 16)))
    one.fetch("r", 39, (blocks(FULL, 2, 3), blocks(LATE, 8, 10)), first=32)
    done = one.answers()["r"]
    # The full layer goes by units of 4 tokens, which divide both blocks: 8. Its window has the 7 that are wanted.
    assert isinstance(done, Done) and done.moved_bytes == (8 + 7) * 2 * 4 * 16  # tokens x parts x heads x row
    one.check_rest()


def test_a_window_of_a_longer_offer_that_begins_too_late_fails_by_name() -> None:
    """What is offered last keeps its own window; a want of less may need a token before it."""
    one = world()
    one.want("r", 30, (blocks(FULL, 0, 2), blocks(LATE, 5, 8)))
    one.serve("r", 45, (blocks(FULL, 0, 12), late_entries("sliding", 45, 16)))
    answer = one.failure()
    assert answer.code == "blocks_too_few" and "[32, 48)" in answer.reason
    one.check_rest()


def test_a_chunk_that_is_over_needs_no_blocks() -> None:
    """At 80 tokens a new chunk of 10 begins, and a new block: nothing of the old ones is wanted."""
    one = world("chunked")
    one.offer("r", 80, (blocks(FULL, 0, 20),))
    one.fetch("r", 80, (blocks(FULL, 0, 5),))
    one.check_done("r")


@pytest.mark.parametrize(("kind", "end", "first"), [("sliding", 46, 9), ("chunked", 53, 12)])
def test_the_block_in_which_a_window_begins_is_wanted_whole(kind: str, end: int, first: int) -> None:
    """The receiver's engine keeps it, and may take it for another request: no row of it may be left as it was."""
    one = world(kind)
    late = blocks(LATE, first, -(-end // 4))
    one.offer("r", end, (blocks(FULL, 0, 14), late_entries(kind, end, 16)))
    one.fetch("r", end, (blocks(FULL, 2, 4), late), first=32)
    done = one.answers()["r"]
    tokens = -(-(end - 32) // 4) * 4 + end - 4 * first  # the full layer goes by units of 4
    assert isinstance(done, Done) and done.moved_bytes == tokens * 2 * 4 * 16  # tokens of both layers x parts x heads
    one.check_rest()


@pytest.mark.parametrize(("end", "offered"), [(38, 39), (20, 39)])
def test_a_state_of_a_longer_offer_fails_by_name(end: int, offered: int) -> None:
    """The entry may be the same, and yet hold the state after another token."""
    one = world("state")
    one.want("r", end, (blocks(FULL, 0, 3), late_entries("state", end, 4)))
    one.serve("r", offered, (blocks(FULL, 0, 10), blocks(LATE, 0, 3)))
    answer = one.failure()
    assert answer.code == "state_moved_on" and str(end) in answer.reason and str(offered) in answer.reason
    one.check_rest()
