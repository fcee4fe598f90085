"""Real agents: an engine keeps an answer, the agents that it fetches from hear so, and theirs fetches it back."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import pytest
from kvbridge_proto.engine import Attached, KeptBy, Refused, Weights, Withdraw

from demo.processes import free_port
from kvbridge.adapters.engine.prompts import PromptDigest
from kvbridge.loopback.messages import number_of
from testing.agents import OracleEngine
from testing.oracle import Shape, fill, mismatch
from testing.pairs import Bench, Benches
from tests.integration.agent.test_scraping import asked

PREFIXES = (b"a" * 20, b"b" * 20)  # of 64 and 128 tokens
SHAPES = (Shape("nhd", blocks=24), Shape("hnd", block_tokens=32, blocks=16))


class Hearing(OracleEngine):
    """Wants to hear what others keep."""

    def attach(self, **changes: Any) -> Attached | Refused:
        return super().attach(**{"takes_kept": True} | changes)


@pytest.fixture
def bench(bench_of: Benches) -> Bench:
    found = bench_of(*SHAPES, engine=Hearing)
    found.works()
    return found


def keep(bench: Bench, request: str = "answer", tokens: int = 130, **changes: Any) -> None:
    table = list(range(1, 1 + -(-tokens // 32)))
    bench.receiver.offer(request, table, tokens, **{"prefixes": PREFIXES} | changes)


def heard(engine: OracleEngine) -> KeptBy:
    kept: KeptBy = engine.told(KeptBy)
    return kept


@pytest.mark.parametrize("route", ["pull", "nixl"])
def test_an_answer_goes_back_to_the_engine_that_prefilled_it(route: str, bench_of: Benches) -> None:
    bench = bench_of(*SHAPES, engine=Hearing, routes=f"{route},host")
    bench.works()
    sender, receiver = bench.sender, bench.receiver
    table, blocks = [1, 2, 3, 4, 5], list(range(10, 19))
    fill(receiver.held, table, range(130))
    keep(bench)
    kept = heard(sender)
    assert (kept.rendezvous, kept.prefixes) == ("answer", PREFIXES)
    assert kept.sender == receiver.agent.address
    before = sender.held.copy()
    for turn, end in (("turn", 128), ("another", 64), ("later", 128)):  # it serves any number of requests
        sender.want(turn, kept.sender, blocks, range(16, end), rendezvous="answer", is_offered=True)
        sender.done(turn)
        if turn == "turn":
            assert not (wrong := mismatch(sender.held, before, blocks, range(16, 128), range(128, 144))), wrong
    receiver.client.send(Withdraw(number=number_of("answer")))
    assert receiver.released("answer").code == "withdrawn"
    assert heard(sender) == KeptBy(sender=kept.sender, rendezvous="answer")


def test_a_scheduler_is_told_how_much_of_a_prompt_an_engine_keeps(bench_of: Benches) -> None:
    ports = [free_port(), free_port()]
    page, none = ({"metrics": f"127.0.0.1:{port}"} for port in ports)
    bench = bench_of(*SHAPES, engine=Hearing, d=page | {"kept_page": True}, p=none)
    bench.works()
    tokens = list(range(150))
    given = PromptDigest(()).prefixes(tokens, 64, 4096)
    assert given == prefixes_by_the_page(tokens) and len(given) == 2
    keep(bench, prefixes=given)
    heard(bench.sender)
    other = b"x" * 20
    for prefixes, kept in ((given, 128), (given[:1], 64), ((given[0], other), 64), ((*given, other), 128), ((), 0)):
        code, told = asked(("127.0.0.1", ports[0]), "/kept?prefixes=" + b"".join(prefixes).hex())
        assert (code, json.loads(told)) == (200, {"schema": 1, "prefix_tokens": 64, "tokens": kept})
    assert '"tokens":0' in asked(("127.0.0.1", ports[0]), f"/kept?prefixes={other.hex()}")[1]
    for wrong, text in (("ab", "got 2 digits, need 40 for each"), ("zz" * 20, "need hexadecimal digits")):
        code, told = asked(("127.0.0.1", ports[0]), f"/kept?prefixes={wrong}")
        assert code == 400 and text in told, told
    assert asked(("127.0.0.1", ports[0]), "/kept?" + "a=1&" * 9)[0] == 400
    assert asked(("127.0.0.1", ports[1]), "/kept")[0] == 404, "only if it is asked for"
    bench.receiver.client.send(Withdraw(number=number_of("answer")))
    heard(bench.sender)
    assert '"tokens":0' in asked(("127.0.0.1", ports[0]), f"/kept?prefixes={given[0].hex()}")[1]


def prefixes_by_the_page(tokens: list[int]) -> tuple[bytes, ...]:
    """What docs/metrics.md says of them."""
    digest, found = blake2b(digest_size=20), []
    words = [b"tokens", b""]
    for first in range(0, len(tokens) // 64 * 64, 64):
        words += [b"prefix", b"".join(each.to_bytes(8, "little") for each in tokens[first : first + 64])]
        for word in words:
            digest.update(len(word).to_bytes(8, "little") + word)
        found.append(digest.digest())
        words = []
    return tuple(found)


@pytest.mark.parametrize("end", ["withdrawn", "held no longer", "other weights", "its engine leaves", "its agent ends"])
def test_what_is_kept_no_longer_is_told(bench: Bench, end: str) -> None:
    keep(bench, hold_s=0.5 if end == "held no longer" else 60.0)
    assert heard(bench.sender).prefixes
    if end == "withdrawn":
        bench.receiver.client.send(Withdraw(number=number_of("answer")))
    elif end == "other weights":
        bench.receiver.client.send(Weights(version="other"))
    elif end == "its engine leaves":
        bench.receiver.detach()
    elif end == "its agent ends":
        bench.receiver.agent.kill()
    gone = heard(bench.sender)
    assert (gone.rendezvous, gone.prefixes) == ("answer", ())


def test_what_is_kept_under_other_weights_ends_even_if_both_sides_get_the_same(bench: Bench) -> None:
    sender, receiver = bench.sender, bench.receiver
    keep(bench)
    kept = heard(sender)
    for engine in (receiver, sender):
        engine.client.send(Weights(version="next"))
    assert receiver.released("answer").code == "other_weights"
    assert heard(sender) == KeptBy(sender=kept.sender, rendezvous="answer")
    bench.works("again")
    sender.want("late", kept.sender, [10, 11, 12, 13], range(64), rendezvous="answer", is_offered=True)
    sender.failed("late", "other_weights")
    assert not [each for each in sender.heard if isinstance(each, KeptBy)], "nor is it told again"


def test_a_new_session_is_told_of_all_that_is_kept(bench: Bench) -> None:
    keep(bench)
    heard(bench.sender)
    bench.sender.detach()
    engine = Hearing(bench.sender.agent, bench.senders[0].held)
    engine.attach()
    bench.senders[:] = [engine]
    bench.works("again")  # the receiver's agent opens a new session
    assert heard(engine).rendezvous == "answer"
    engine.close()


def test_only_what_names_prefixes_is_told_and_only_to_who_wants_to_hear(bench_of: Benches) -> None:
    bench = bench_of(*SHAPES)  # engines that do not
    bench.works()
    keep(bench)
    bench.works()
    assert not [each for each in bench.sender.heard if isinstance(each, KeptBy)]


@pytest.mark.parametrize("dial", ["127.0.0.2:*", None], ids=["not allowed", "allowed"])
def test_an_agent_that_cannot_be_dialled_costs_one_want(dial: str | None, bench_of: Benches) -> None:
    """The network between hosts may be open one way, or `dial` may not name decode agents."""
    bench = bench_of(*SHAPES, engine=Hearing, p={"dial": dial})
    bench.works()
    keep(bench, "first")
    kept = heard(bench.sender)
    bench.sender.want("turn", kept.sender, [10, 11, 12, 13], range(64), rendezvous="first", is_offered=True)
    if dial is None:
        bench.sender.done("turn")
        keep(bench, "second", prefixes=PREFIXES[1:])
        assert heard(bench.sender).rendezvous == "second"
        return
    bench.sender.failed("turn", "peer_not_allowed")
    assert heard(bench.sender) == KeptBy(sender=kept.sender, rendezvous="first")
    keep(bench, "second")
    bench.works("on")
    assert not [each for each in bench.sender.heard if isinstance(each, KeptBy)]


def test_an_offer_without_prefixes_is_not_told(bench: Bench) -> None:
    keep(bench, "one", prefixes=())
    keep(bench, "two")
    assert heard(bench.sender).rendezvous == "two"


def test_what_is_claimed_too_late_fails_at_once(bench: Bench) -> None:
    keep(bench, hold_s=0.3)
    kept = heard(bench.sender)
    assert bench.receiver.released("answer").code == "kept_no_longer"
    bench.sender.want("late", kept.sender, [10, 11, 12, 13], range(64), rendezvous="answer", is_offered=True)
    assert bench.sender.failed("late", "kept_no_longer")
