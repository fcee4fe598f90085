"""Prompts that are held, with real agents: held on for who waits, given back to who lacks blocks, shown by status."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from kvbridge_proto.engine import Computed, Expect, Held, Reclaim
from kvbridge_proto.status import OfferStatus

from kvbridge.commands.status import rendered
from kvbridge.exchange.outbound import FRESH_S
from tests.integration.agent.harness import AgentProcess, wait_for
from tests.integration.agent.test_carry import Bench
from tests.support.oracle import Shape

TOKENS = 40
HOLD_S = 1.5


def shown(agent: AgentProcess) -> str:
    """What `kvbridge status` prints, every blank once."""
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(rendered(agent.status))
    return " ".join(console.export_text().split())


def offers(bench: Bench) -> dict[str, OfferStatus]:
    return {offer.request: offer for offer in bench.sources[0].agent.status.offers}


def test_an_offer_is_held_for_whom_it_is_awaited_and_let_go_when_nobody_asks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd", block_tokens=64, blocks=8))
        (source,), (sink,) = bench.sources, bench.sinks
        table, wanted = [3, 1, 2], [5]
        bench.fill(table, range(TOKENS))
        for request in ("awaited", "forgotten"):
            bench.offer(request, table, TOKENS, hold_s=HOLD_S)
        sink.client.send(Expect(request="awaited", room="awaited", source=bench.address))
        assert source.client.wait(Held, seconds=HOLD_S).requests == ("awaited",)
        found = offers(bench)
        assert [(each.state, each.peer, each.tokens, each.blocks) for each in found.values()] == [
            ("awaited", "d0", TOKENS, 3),
            ("unclaimed", "", TOKENS, 3),
        ]
        assert all(0 < each.age_s < 60 for each in found.values())
        gone = source.released("forgotten", seconds=2 * HOLD_S)
        assert gone.code == "offer_expired"
        assert "nobody asked for its 40 tokens" in gone.reason
        bench.want("awaited", wanted, range(TOKENS))
        bench.done("awaited")
        bench.check(wanted, range(TOKENS))
        assert not offers(bench)
        counters = source.agent.status.counters
        assert counters["kvbridge_offers_released_total{code=offer_expired}"] == 1
        assert "offered 2 prompts: 1 fetched; 1 offer_expired" in shown(source.agent)
        wait_for(lambda: "prompts that nobody fetched: 1, the last: offer_expired" in source.agent.text())
        assert "others were: decode engines are slow to ask" in source.agent.text()


def test_an_engine_that_lacks_blocks_gets_those_that_nobody_asked_for(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd", block_tokens=64, blocks=8))
        (source,), (sink,) = bench.sources, bench.sinks
        for number in range(3):
            bench.offer(f"r{number}", [3 * number, 3 * number + 1, 3 * number + 2], TOKENS)
        sink.client.send(Expect(request="r0", room="r0", source=bench.address))
        source.client.wait(Held)
        time.sleep(FRESH_S)
        source.client.send(Reclaim(blocks=2))
        gone = source.released("r1")
        assert gone.code == "reclaimed"
        assert offers(bench).keys() == {"r0", "r2"}
        metrics = source.agent.status.counters
        assert metrics["kvbridge_offers_released_total{code=reclaimed}"] == 1
        # Its sink's engine leaves: nobody waits any more, and the offer that was awaited may go as well.
        sink.client.close()
        wait_for(lambda: sink.agent.status.engine is None)
        assert offers(bench)["r0"].state == "awaited", "for as long as that was last said"


def test_status_tells_people_of_open_offers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd", block_tokens=64, blocks=8))
        bench.offer("cmpl-1", [0, 1, 2], TOKENS)
        wait_for(lambda: bool(offers(bench)))
        text = shown(bench.sources[0].agent)
        assert "offers" in text and "cmpl-1" in text and "unclaimed" in text


def test_prompts_that_are_computed_though_they_could_be_fetched_are_counted_and_said(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, Shape("nhd"), Shape("hnd", block_tokens=64, blocks=8))
        (sink,) = bench.sinks
        bench.fill([3, 1, 2], range(TOKENS))
        bench.offer("r", [3, 1, 2], TOKENS)
        bench.want("r", [5], range(30))
        bench.done("r")
        bench.offer("nobody's", [4], 10)
        bench.want("nobody's", [], range(0))
        assert bench.sources[0].released("nobody's").is_declined
        assert "offered 2 prompts: 1 fetched; 1 declined" in shown(bench.sources[0].agent)
        for tokens, reason in ((50, "untagged"), (10, "deadline"), (10, "untagged")):
            sink.client.send(Computed(tokens=tokens, reason=reason))
        wait_for(lambda: "computed here 3 prompts: 2 untagged, 1 deadline" in shown(sink.agent))
        assert "came by the bridge 30 of 100 prompt tokens (30.0%)" in shown(sink.agent)
        counters = sink.agent.status.counters
        assert counters["kvbridge_prompt_tokens_computed_here_total{reason=untagged}"] == 60
        wait_for(lambda: "computed here lately, not fetched: 3 prompts of 70 tokens; 30% of" in sink.agent.text())
        assert "2 untagged (they name nothing to fetch" in sink.agent.text()
