"""Held prompts, with real agents: held longer if somebody waits, given back if blocks are needed, shown by status."""

from __future__ import annotations

import time

import pytest
from kvbridge_proto.engine import Computed, Expect, Held, Reclaim
from kvbridge_proto.status import OfferStatus

from kvbridge.commands.status import rendered
from kvbridge.exchange.sender import FRESH_S, LOST_S
from kvbridge.loopback.messages import number_of
from testing.agents import AgentProcess
from testing.oracle import Shape
from testing.pairs import Bench, Benches
from testing.waiting import wait_for

pytestmark = pytest.mark.proves("G17")

TOKENS = 40
HOLD_S, LATER_S = 60.0, 0.2


@pytest.fixture
def bench(bench_of: Benches) -> Bench:
    return bench_of(receiver=Shape("hnd", block_tokens=64, blocks=8))


def shown(agent: AgentProcess) -> str:
    """What `kvbridge status` prints, every blank once."""
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(rendered(agent.status))
    return " ".join(console.export_text().split())


def offers(bench: Bench) -> dict[str, OfferStatus]:
    return {offer.request: offer for offer in bench.sender.agent.status.offers}


def test_an_offer_is_held_for_whom_it_is_awaited_and_let_go_when_nobody_asks(bench: Bench) -> None:
    sender, receiver = bench.sender, bench.receiver
    table, wanted = [3, 1, 2], [5]
    bench.fill(table, range(TOKENS))
    for request in ("awaited", "forgotten"):
        bench.offer(request, table, TOKENS, hold_s=HOLD_S)
    wait_for(lambda: len(offers(bench)) == 2)
    time.sleep(LATER_S)
    receiver.client.send(Expect(number=number_of("awaited"), rendezvous="awaited", sender=bench.address))
    assert sender.told(Held).numbers == (number_of("awaited"),)
    found = offers(bench)
    assert [(each.state, each.peer, each.tokens, each.blocks) for each in found.values()] == [
        ("awaited", "d0", TOKENS, 3),
        ("unclaimed", "", TOKENS, 3),
    ]
    assert "unclaimed" in shown(sender.agent) and "forgotten" in shown(sender.agent)
    assert all(0 < each.age_s < 60 for each in found.values())
    ends = {name: round(each.age_s + each.left_s, 1) for name, each in found.items()}
    assert ends["forgotten"] == HOLD_S and ends["awaited"] >= HOLD_S + LATER_S
    bench.offer("forgotten", [], TOKENS, hold_s=LATER_S, is_more=True)
    gone = sender.released("forgotten")
    assert gone.code == "offer_expired"
    assert "nobody asked for its 40 tokens" in gone.reason
    bench.want("awaited", wanted, range(TOKENS))
    bench.done("awaited")
    bench.check(wanted, range(TOKENS))
    assert not offers(bench)
    counters = sender.agent.status.counters
    assert counters["kvbridge_offers_released_total{code=offer_expired}"] == 1
    assert "offered 2 prompts: 1 fetched; 1 offer_expired" in shown(sender.agent)
    wait_for(lambda: "prompts that nobody fetched: 1, the last: offer_expired" in sender.agent.text())
    assert "others were: decode engines are slow to ask" in sender.agent.text()


def test_an_engine_that_lacks_blocks_gets_those_that_nobody_asked_for(bench: Bench) -> None:
    sender, receiver = bench.sender, bench.receiver
    for number in range(3):
        bench.offer(f"r{number}", [3 * number, 3 * number + 1, 3 * number + 2], TOKENS)
    receiver.client.send(Expect(number=number_of("r0"), rendezvous="r0", sender=bench.address))
    sender.told(Held)
    sender.client.send(Reclaim(blocks=2))
    bench.offer("later", [0, 1, 2], TOKENS)
    wait_for(lambda: "later" in offers(bench), why=sender.agent.text)  # so it has heard the first
    time.sleep(FRESH_S)
    sender.client.send(Reclaim(blocks=2))
    gone = sender.released("r1")
    assert gone.code == "reclaimed"
    assert offers(bench).keys() == {"r0", "r2", "later"}
    metrics = sender.agent.status.counters
    assert metrics["kvbridge_offers_released_total{code=reclaimed}"] == 1
    # Its receiver's engine leaves: nobody waits any more, and the offer that was awaited may go as well.
    receiver.client.close()
    wait_for(lambda: receiver.agent.status.engine is None)
    assert offers(bench)["r0"].state == "awaited", "for as long as that was last said"


def test_prompts_that_are_computed_though_they_could_be_fetched_are_counted_and_said(bench: Bench) -> None:
    receiver = bench.receiver
    bench.fill([3, 1, 2], range(TOKENS))
    bench.offer("r", [3, 1, 2], TOKENS)
    bench.want("r", [5], range(30))
    bench.done("r")
    bench.offer("nobody's", [4], 10)
    bench.want("nobody's", [], range(0))
    assert bench.sender.released("nobody's").is_declined
    assert "offered 2 prompts: 1 fetched; 1 declined" in shown(bench.sender.agent)
    for tokens, reason in ((50, "untagged"), (10, "deadline"), (10, "untagged")):
        receiver.client.send(Computed(tokens=tokens, reason=reason))
    wait_for(lambda: "computed here 3 prompts: 2 untagged, 1 deadline" in shown(receiver.agent))
    assert "came by the bridge 30 of 100 prompt tokens (30.0%)" in shown(receiver.agent)
    counters = receiver.agent.status.counters
    assert counters["kvbridge_prompt_tokens_computed_here_total{reason=untagged}"] == 60
    wait_for(lambda: "computed here lately, not fetched: 3 prompts of 70 tokens; 30% of" in receiver.agent.text())
    assert "2 untagged (they name nothing to fetch" in receiver.agent.text()


def test_an_offer_is_not_held_for_the_other_ranks_of_a_receiver_that_died(bench_of: Benches) -> None:
    """One rank had begun to fetch. Its host is gone, so nobody says that the want has failed."""
    bench = bench_of(receiver=Shape("hnd", tp_size=2))
    sender, first = bench.sender, bench.receivers[0]
    bench.fill([3], range(16))
    bench.offer("r", [3], 8, is_last=False, hold_s=600.0)
    first.want("r", bench.address, [5], range(16))
    wait_for(lambda: offers(bench)["r"].state == "claimed", why=sender.agent.text)
    first.agent.kill()
    released = sender.released("r", seconds=LOST_S + 60.0)
    assert released.code == "peer_lost" and "1 of 2 ranks of the same want never came" in released.reason
