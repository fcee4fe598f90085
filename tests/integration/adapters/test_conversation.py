"""What an engine's adapter sends and receives, over a real unix socket: each offer and each want ends once."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kvbridge_proto.common import Blocks, Rank
from kvbridge_proto.engine import (
    READERS_S,
    Abandon,
    Adopt,
    Computed,
    Decline,
    Directory,
    Done,
    Expect,
    Failed,
    Held,
    Offer,
    Reclaim,
    Refused,
    Released,
    Rescale,
    Rescaled,
    Scales,
    ToEngine,
    Want,
    Weights,
    Withdraw,
)
from kvbridge_proto.framing import Limits
from msgspec.structs import replace

from kvbridge.adapters.engine import conversation
from kvbridge.adapters.engine import link as links
from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.conversation import DETACH_S, GRACE_S, Conversation, Ended
from kvbridge.adapters.engine.link import ATTACH_RETRY_S
from kvbridge.adapters.engine.memory import Memory
from kvbridge.device.fence import EngineFence
from kvbridge.errors import EngineError
from kvbridge.loopback.messages import number_of
from kvbridge.state_machines import LinkState
from testing.agents import agent as real_agent
from testing.proc import is_open
from tests.integration.adapters.fake_agent import FakeAgent, fake_pidfd
from tests.integration.adapters.small import Clock, memory_of

ONE, OTHER = number_of("r"), number_of("o")
OFFER = Offer(
    number=ONE, rendezvous="room", request="r", tokens=16, blocks=(Blocks(0, 0, (3,)),), is_last=True, hold_s=30
)
WANT = Want(
    number=ONE,
    request="r",
    rendezvous="room",
    sender="tcp://x:1",
    first_token=0,
    end_token=16,
    blocks=(Blocks(0, 0, (3,)),),
    deadline_s=60,
    fence=1,
)
NOTHING = replace(WANT, end_token=0, blocks=(), fence=0)
EXPECT = Expect(number=ONE, rendezvous="room", sender="tcp://x:1")
RANKS = (Rank(tp_rank=0, pp_rank=0, address="tcp://127.0.0.1:7700"),)
SCALES = (Scales(0, "k", (0.5,)),)


LONG = "tcp://" + "x" * 300
UNFIT = [
    replace(WANT, sender=LONG),
    replace(WANT, sender=""),
    replace(WANT, sender="tcp://\ud800:1"),
    replace(WANT, end_token=1 << 70),
    replace(WANT, deadline_s=1e9),
    replace(WANT, blocks=(Blocks(0, 0, (-1,)),)),
]
T = TypeVar("T", Offer, Want)


def called(name: str, message: T, **more: Any) -> T:
    return replace(message, number=number_of(name), request=name, **more)


class Talk:
    """A conversation, its agent, and the clock of both. `attach` stands for the engine's start without its thread."""

    def __init__(self, folder: Path, memory: Memory | None = None, **more: Any) -> None:
        self.path = folder / "agent.sock"
        self.clock = Clock()
        client = EngineClient(self.path, pidfd_of=fake_pidfd, limits=Limits(frame_bytes=4096))
        log = logging.getLogger("test")
        self.engine = Conversation(client, memory or memory_of(), log, clock=self.clock, **more)
        self.link = self.engine._link

    def attach(self) -> FakeAgent:
        """By a new agent."""
        agent = FakeAgent(self.path)
        self.again(agent)
        return agent

    def again(self, agent: FakeAgent) -> None:
        self.clock.now += ATTACH_RETRY_S
        self.engine.turn()
        agent.pump()
        assert self.engine.turn() == [] and self.engine.attached is not None
        agent.pump()

    def begin(self) -> None:
        """The want "r" and the offer "o"."""
        self.engine.want(WANT)
        self.engine.offer(called("o", OFFER))

    def attach_unheard(self, agent: FakeAgent) -> None:
        """As the link's thread, between turns: the last agent is lost, and this one attached to."""
        self.link._look()
        self.clock.now += ATTACH_RETRY_S
        for _ in range(2):
            self.link._look()
            agent.pump()
        assert self.link.state is LinkState.ATTACHED

    def pass_time(self, seconds: float) -> list[Any]:
        self.clock.now += seconds
        return list(self.engine.turn())


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    talk = Talk(tmp_path)
    with contextlib.closing(talk.engine):
        yield talk


@pytest.fixture
def agent(talk: Talk) -> FakeAgent:
    return talk.attach()


# How each ends:


@pytest.mark.parametrize(
    ("begun", "said", "ended"),
    [
        (WANT, Done(number=ONE, request="r", moved_bytes=7, seconds=0.5), Ended(ONE, "r", "want")),
        (
            WANT,
            Failed(number=ONE, request="r", code="peer_lost", reason="it left"),
            Ended(ONE, "r", "want", "peer_lost", "it left"),
        ),
        (WANT, Refused(number=ONE, code="bad_want", reasons=("a", "b")), Ended(ONE, "r", "want", "bad_want", "a; b")),
        (OFFER, Released(number=ONE, request="r"), Ended(ONE, "r", "offer")),
        (
            OFFER,
            Released(number=ONE, request="r", code="expired", reason="nobody"),
            Ended(ONE, "r", "offer", "expired", "nobody"),
        ),
        (
            OFFER,
            Refused(number=ONE, code="bad_offer", reasons=("a", "b")),
            Ended(ONE, "r", "offer", "bad_offer", "a; b"),
        ),
    ],
)
def test_each_ends_by_one_word_under_its_name(
    talk: Talk, agent: FakeAgent, begun: Want | Offer, said: ToEngine, ended: Ended
) -> None:
    talk.engine.want(begun) if isinstance(begun, Want) else talk.engine.offer(begun)
    assert agent.one(type(begun)) == begun and talk.engine.turn() == [] and talk.engine.is_open(ONE)
    agent.say(said)
    assert talk.engine.turn() == [ended] and not talk.engine.is_open(ONE)
    assert ended.is_good == (not ended.code)


@pytest.mark.proves("G16")
def test_what_is_over_does_not_end_again_nor_does_what_never_began(talk: Talk, agent: FakeAgent) -> None:
    talk.begin()
    done, released = Done(number=ONE, request="r", moved_bytes=0, seconds=0), Released(number=OTHER, request="o")
    failed, refused = (
        Failed(number=ONE, request="r", code="c", reason=""),
        Refused(number=ONE, code="c", reasons=("x",)),
    )
    others = (
        Released(number=ONE, request="r"),
        Failed(number=OTHER, request="o", code="c", reason=""),
        Released(number=number_of("nobody"), request="nobody"),
    )
    for message in (*others, done, done, failed, refused, released, released, *others):
        agent.say(message)
    assert talk.engine.turn() == [Ended(ONE, "r", "want"), Ended(OTHER, "o", "offer")]
    agent.let_go()
    assert talk.pass_time(0) == []


def test_a_second_want_that_is_refused_does_not_end_the_first(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.want(WANT)
    agent.say(Refused(about=f"want {ONE}", code="duplicate_request", reasons=("wanted already",)))
    assert talk.engine.turn() == [] and talk.engine.is_open(ONE)


def test_layers_with_zeros_are_said_once_in_the_engine_s_log(
    talk: Talk, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    for i, layers in enumerate((1, 1, 0, 2)):
        talk.engine.want(replace(WANT, number=ONE + i))
        agent.say(Done(number=ONE + i, request="r", moved_bytes=0, seconds=0, unfilled_layers=layers))
        assert talk.engine.turn() == [Ended(ONE + i, WANT.request, "want")]
    said = [record.getMessage() for record in caplog.records if "draft model" in record.getMessage()]
    assert [text.split(" of our")[0] for text in said] == [
        f"the prefill side has no rows of {layers}" for layers in (1, 2)
    ]


@pytest.mark.proves("G14")
@pytest.mark.parametrize("kind", ["want", "offer"])
def test_a_late_answer_ends_nothing_that_has_the_same_name(talk: Talk, agent: FakeAgent, kind: str) -> None:
    """An engine uses names again at once: what comes then would be taken for its rows, or its pages be given away."""
    begun, begin = (WANT, talk.engine.want) if kind == "want" else (OFFER, talk.engine.offer)
    first, second = talk.engine.new_number(), talk.engine.new_number()
    answer = Done(number=first, request="r", moved_bytes=0, seconds=0) if kind == "want" else None
    begin(replace(begun, number=first))
    agent.say(answer or Released(number=first, request="r"))
    assert [each.number for each in talk.engine.turn()] == [first]
    begin(replace(begun, number=second))
    for late in (
        answer or Released(number=first, request="r", code="withdrawn"),
        Refused(number=first, code="c", reasons=()),
    ):
        agent.say(late)
    assert talk.engine.turn() == [] and talk.engine.is_open(second)


def test_numbers_do_not_come_again_after_a_restart(tmp_path: Path) -> None:
    """Nor in a conversation that is made anew, for memory that was mapped again."""
    before = [Talk(tmp_path).engine.new_number() for _ in range(3)]
    assert len(set(before)) == 3 and before == sorted(before)


def test_a_request_that_needs_nothing_is_expected_no_more(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.send(EXPECT)
    talk.engine.want(NOTHING)
    assert agent.one(Want) == NOTHING and not talk.engine.is_open(ONE)
    agent.say(Done(number=ONE, request="r", moved_bytes=0, seconds=0))
    assert talk.engine.turn() == [] and talk.link._first() == []


def test_what_was_computed_while_no_agent_was_there_is_told_to_the_next(talk: Talk) -> None:
    for tokens in (1, 2):
        talk.engine.send(Computed(tokens=tokens, reason="agent_lost"))
    agent = talk.attach()
    assert [each.tokens for each in agent.take(Computed)] == [1, 2]
    talk.engine.turn()
    assert not agent.take(Computed)


@pytest.mark.proves("G8", "G12")
def test_offers_end_when_a_killed_agents_socket_does_and_wants_when_its_process_does(
    talk: Talk, agent: FakeAgent
) -> None:
    talk.begin()
    agent.pump()
    agent.hang_up()
    assert talk.engine.turn() == [Ended(OTHER, "o", "offer", "agent_lost", "the agent is gone")]
    assert talk.pass_time(1000) == [] and talk.engine.is_open(ONE)
    agent.vanish()
    assert talk.engine.turn() == [Ended(ONE, "r", "want", "agent_lost", "the agent is gone")]


@pytest.mark.proves("G8")
def test_wants_do_not_wait_for_those_who_read_on_the_word_of_an_agent_that_is_gone(talk: Talk) -> None:
    agent = FakeAgent(talk.path)
    agent.is_shared = True
    talk.again(agent)
    talk.begin()
    agent.pump()
    agent.hang_up()
    agent.vanish()
    assert talk.engine.turn() == [Ended(ONE, "r", "want", "agent_lost", "the agent is gone")]
    assert talk.pass_time(0.9 * READERS_S) == [] and talk.engine.is_open(OTHER)
    assert talk.pass_time(0.1 * READERS_S) == [Ended(OTHER, "o", "offer", "agent_lost", "the agent is gone")]


def test_without_an_agent_each_ends_at_once(talk: Talk) -> None:
    talk.begin()
    ended = talk.engine.turn()
    assert [(each.request, each.kind, each.code) for each in ended] == [
        ("r", "want", "not_sent"),
        ("o", "offer", "not_sent"),
    ]
    assert all("not connected" in each.reason or "No such file" in each.reason for each in ended)
    assert not talk.engine.is_open(ONE) and not talk.engine.is_open(OTHER)


def test_a_want_that_no_message_holds_ends_and_the_other_side_need_not_hold_its_offer(
    talk: Talk, agent: FakeAgent
) -> None:
    talk.engine.want(replace(WANT, blocks=(Blocks(0, 0, tuple(range(5000))),)))
    (ended,) = talk.engine.turn()
    assert (ended.code, ended.reason[:17]) == ("not_sent", "Want: frame_bytes")
    assert agent.one(Want) == NOTHING


@pytest.mark.proves("T12")
@pytest.mark.parametrize("unfit", UNFIT, ids=range(len(UNFIT)))
def test_what_an_agent_would_refuse_is_not_sent_and_harms_no_other_want(
    talk: Talk, agent: FakeAgent, unfit: Want
) -> None:
    """A client may choose an address. The agent ended the connection over it, and everybody's fetches with it."""
    talk.engine.want(healthy := called("healthy", WANT))
    talk.engine.send(replace(EXPECT, sender=unfit.sender))
    talk.engine.want(unfit)
    (ended,) = talk.engine.turn()
    assert isinstance(ended, Ended) and (ended.request, ended.code) == ("r", "not_sent") and "Want" in ended.reason
    agent.pump()  # decodes as an agent does
    assert talk.link.is_attached and talk.engine.is_open(healthy.number)
    agent.say(Done(number=healthy.number, request="healthy", moved_bytes=0, seconds=0))
    assert talk.engine.turn() == [Ended(healthy.number, "healthy", "want")]


@pytest.mark.proves("T12")
def test_ranks_that_an_agent_would_refuse_are_told_to_none(talk: Talk, agent: FakeAgent) -> None:
    """They were told again at every attach, and ended each."""
    talk.engine.share(RANKS)
    talk.engine.share((replace(RANKS[0], address=LONG),))
    agent.die()
    assert talk.engine.turn() is not None
    second = talk.attach()
    assert second.one(Directory) == Directory(ranks=RANKS) and talk.link.is_attached


@pytest.mark.proves("G10")
def test_rows_that_come_after_the_weights_have_changed_are_of_no_use(talk: Talk, agent: FakeAgent) -> None:
    early = number_of("early")
    talk.engine.want(replace(WANT, number=early))
    talk.engine.want(WANT)
    agent.say(Done(number=early, request="r", moved_bytes=1, seconds=0.1))
    talk.engine._listen()  # as `wait_for_readers` does: no turn has told it yet
    talk.engine.send(Weights(version="b"))
    talk.engine.want(replace(WANT, number=OTHER))
    for number in (ONE, OTHER):
        agent.say(Done(number=number, request="r", moved_bytes=1, seconds=0.1))
    ended = [(each.number, each.code) for each in talk.engine.turn()]
    assert ended == [(early, "other_weights"), (ONE, "other_weights"), (OTHER, "")]


@pytest.mark.parametrize(
    "unfit", [Rescale(revision=1, scales=(Scales(0, "k" * 100, (0.5,)),)), Weights(version="x" * 300)]
)
def test_scales_and_weights_that_cannot_be_sent_end_the_connection(
    talk: Talk, agent: FakeAgent, unfit: Rescale | Weights
) -> None:
    """The agent would go on under those that hold no more. Nor may one be attached that does not know them."""
    talk.engine.send(unfit)
    assert not talk.link.is_attached
    agent.die()
    talk.engine.turn()
    talk.clock.now += ATTACH_RETRY_S
    second = FakeAgent(talk.path)
    talk.engine.turn()
    second.pump()
    assert len(second.attaches) == 1 and talk.engine.turn() == [] and talk.engine.attached is None


def test_an_offer_whose_next_piece_no_message_holds_is_withdrawn_and_ends_when_nobody_reads_it(
    talk: Talk, agent: FakeAgent
) -> None:
    talk.engine.offer(replace(OFFER, is_last=False))
    talk.engine.offer(replace(OFFER, blocks=(Blocks(0, 1, tuple(range(5000))),), is_last=False, is_more=True))
    assert talk.engine.turn() == [] and talk.engine.is_open(ONE)
    assert agent.one(Withdraw).reason.startswith("not sent: Offer: frame_bytes")
    agent.say(Released(number=ONE, request="r", code="withdrawn"))
    assert talk.engine.turn() == [Ended(ONE, "r", "offer", "withdrawn")]
    agent.take(Offer)
    for is_last in (False, True):
        talk.engine.offer(replace(OFFER, is_more=True, is_last=is_last))
    assert agent.take(Offer) == [] and talk.engine.turn() == [] and not talk.engine.is_open(ONE)
    talk.engine.offer(called("another", OFFER))
    assert agent.one(Offer) and talk.engine.is_open(number_of("another"))


def test_of_an_offer_that_has_ended_the_next_agent_hears_nothing(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.offer(replace(OFFER, is_last=False))
    agent.let_go()
    assert [ended.code for ended in talk.engine.turn()] == ["agent_lost"]
    talk.again(agent)
    agent.heard.clear()
    talk.engine.offer(replace(OFFER, is_more=True))
    talk.engine.withdraw(ONE, "preempted", comes_again=True)
    assert agent.take(Offer | Withdraw) == []


def test_a_withdrawn_offer_ends_when_the_agent_says_that_nobody_reads_it(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.offer(replace(OFFER, is_last=False))
    talk.engine.withdraw(ONE, "preempted", comes_again=True)
    assert agent.one(Withdraw) == Withdraw(number=ONE, reason="preempted", comes_again=True)
    assert talk.engine.turn() == [] and talk.engine.is_open(ONE)
    agent.say(Released(number=ONE, request="r", code="withdrawn"))
    assert talk.engine.turn() == [Ended(ONE, "r", "offer", "withdrawn")]


def test_an_abandoned_want_ends_when_nothing_writes_its_blocks_any_more(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.want(WANT)
    talk.engine.abandon(ONE, "aborted")
    assert agent.one(Abandon) == Abandon(number=ONE, reason="aborted")
    assert talk.engine.turn() == [] and talk.engine.is_open(ONE)
    agent.say(Failed(number=ONE, request="r", code="aborted", reason="abandoned by the engine"))
    assert [ended.code for ended in talk.engine.turn()] == ["aborted"]


def test_blocks_that_are_short_are_asked_for_and_come_by_offers_that_end(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.offer(OFFER)
    talk.engine.send(Reclaim(blocks=3))
    assert agent.one(Reclaim) == Reclaim(blocks=3)
    agent.say(Released(number=ONE, request="r", code="reclaimed", reason="its engine needs the blocks"))
    assert talk.engine.turn() == [Ended(ONE, "r", "offer", "reclaimed", "its engine needs the blocks")]


# An agent that is silent:


@pytest.mark.proves("G16")
@pytest.mark.parametrize("kind", ["want", "offer"])
def test_a_silent_agent_is_asked_to_stop_then_given_up(talk: Talk, agent: FakeAgent, kind: str) -> None:
    talk.engine.want(WANT) if kind == "want" else talk.engine.offer(OFFER)
    last_s = WANT.deadline_s if kind == "want" else OFFER.hold_s
    talk.pass_time(last_s + GRACE_S - 1)
    asked: type[Abandon | Withdraw] = Abandon if kind == "want" else Withdraw
    assert agent.take(asked) == []
    talk.pass_time(2)
    assert agent.one(asked).number == ONE and talk.engine.attached is not None
    talk.pass_time(GRACE_S + 1)
    assert talk.engine.attached is None and "r: no answer" in talk.link.why
    ended = [each.kind for _ in range(5) for each in talk.pass_time(READERS_S)]
    assert ended == ([] if kind == "want" else ["offer"]), "what it may write stays wanted"
    agent.pump()  # goes on, reads that we have left, lets go
    assert [each.kind for each in talk.pass_time(0)] == (["want"] if kind == "want" else [])


@pytest.mark.parametrize("kind", ["want", "offer"])
def test_an_agent_that_is_asked_to_stop_has_less_time(talk: Talk, agent: FakeAgent, kind: str) -> None:
    talk.engine.want(WANT) if kind == "want" else talk.engine.offer(OFFER)
    talk.engine.abandon(ONE, "") if kind == "want" else talk.engine.withdraw(ONE, "")
    for _ in range(2):
        assert talk.engine.attached is not None
        talk.pass_time(GRACE_S + 1)
    assert talk.engine.attached is None


def test_an_offer_that_somebody_waits_for_is_held_for_longer(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.offer(OFFER)
    for _ in range(5):
        agent.say(Held(numbers=(ONE, number_of("nobody"))))
        talk.pass_time(0)
        talk.pass_time(OFFER.hold_s)
    assert agent.take(Withdraw) == []
    talk.pass_time(OFFER.hold_s)
    assert agent.one(Withdraw).number == ONE


# What every agent is told:


def test_every_agent_is_told_again_what_it_must_know_and_no_more(talk: Talk) -> None:
    engine = talk.engine
    engine.share(RANKS)
    engine.send(EXPECT)
    for name in ("wanted", "declined", "abandoned"):
        engine.send(replace(EXPECT, number=number_of(name)))
    agent = talk.attach()
    assert [type(message) for message in agent.heard] == [Directory, *[Expect] * 4]
    engine.want(called("wanted", WANT))
    engine.want(called("declined", NOTHING))
    engine.abandon(number_of("abandoned"), "aborted")
    engine.send(Rescale(revision=1, scales=SCALES))
    engine.share(RANKS * 2)
    for _ in range(3):
        agent.let_go()
        engine.turn()
        agent.heard.clear()
        talk.again(agent)
        assert agent.heard == [Directory(ranks=RANKS * 2), EXPECT, Rescale(revision=1, scales=SCALES)]


def test_an_agent_that_came_since_the_last_turn_hears_what_every_agent_is_told(talk: Talk, agent: FakeAgent) -> None:
    """The link's thread attaches between turns: what was offered to the last one is not over before a turn says so."""
    talk.engine.offer(called("o", OFFER))
    talk.engine.send(EXPECT)
    agent.let_go()
    talk.attach_unheard(agent)
    agent.heard.clear()
    assert not talk.link.is_attached
    talk.engine.share(RANKS)
    talk.engine.send(Rescale(revision=1, scales=SCALES))
    talk.engine.send(replace(EXPECT, number=number_of("more")))
    talk.engine.abandon(ONE, "aborted")
    talk.engine.want(called("more", WANT))
    agent.pump()
    assert [type(message) for message in agent.heard] == [Directory, Rescale, Expect, Abandon, Want]
    assert agent.one(Want).end_token == 0
    ended = [(each.request, each.code) for each in talk.engine.turn() if isinstance(each, Ended)]
    assert ended == [("more", "not_sent"), ("o", "agent_lost")]


def test_scales_are_asked_for_taken_or_declined(talk: Talk, agent: FakeAgent) -> None:
    question, taken = Adopt(revision=3, scales=SCALES), Rescaled(revision=3, epoch=2)
    agent.say(question)
    assert talk.engine.turn() == [question]
    talk.engine.send(Decline(revision=3, reason="rows are there"))
    assert agent.one(Decline).revision == 3
    talk.engine.send(Rescale(revision=3, scales=SCALES))
    assert agent.one(Rescale).revision == 3
    agent.say(taken)
    assert talk.engine.turn() == [taken]


def test_an_agent_that_refuses_our_scales_is_relied_on_no_more(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.send(Rescale(revision=1, scales=SCALES))
    agent.say(Refused(about="rescale 1", code="bad_pool", reasons=("scales",)))
    talk.engine.turn()
    assert talk.engine.attached is None and "bad_pool" in talk.link.why


def test_who_has_our_memory_can_be_asked(talk: Talk) -> None:
    assert talk.engine.attached is None and talk.engine.address == ""
    agent = talk.attach()
    attached = talk.engine.attached
    assert attached is not None
    assert (attached.agent.incarnation, attached.agent.name, attached.epoch) == ("incarnation-1", "fake", 1)
    assert talk.engine.address == agent.address
    agent.say(Rescaled(revision=1, epoch=2))
    talk.engine.turn()
    assert talk.engine.attached is not None and talk.engine.attached.epoch == 2
    agent.hang_up()
    talk.engine.turn()
    assert talk.engine.attached is None and talk.engine.address == ""


# An engine that must compute on:


def timed(talk: Talk, *requests: str) -> float:
    began = time.monotonic()
    talk.engine.wait_for_readers(map(number_of, requests))
    return time.monotonic() - began


LONG_READERS_S = 100.0  # who waits for readers so long is seen on the busiest machine


@pytest.fixture
def long_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conversation, links):
        monkeypatch.setattr(module, "READERS_S", LONG_READERS_S)


@pytest.mark.usefixtures("long_readers")
def test_waits_for_readers_until_the_agent_says_that_there_are_none(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.offer(OFFER)
    talk.engine.offer(called("goes on", OFFER))
    talk.engine.withdraw(ONE, "preempted")
    agent.is_answering_withdrawals = True
    with agent.alive():
        assert timed(talk, "r", "nobody") < LONG_READERS_S / 2
    assert talk.engine.turn() == [Ended(ONE, "r", "offer", "withdrawn")] and talk.engine.is_open(number_of("goes on"))


@pytest.mark.proves("G13")
@pytest.mark.parametrize(
    ("loss", "least_s"), [("silent", READERS_S), ("given up", 0.9 * READERS_S), ("given up before", 0.9 * READERS_S)]
)
def test_waits_for_readers_of_an_agent_that_may_still_read(
    talk: Talk, agent: FakeAgent, loss: str, least_s: float
) -> None:
    talk.engine.offer(OFFER)
    began = time.monotonic()
    if loss.startswith("given up"):
        talk.engine.give_up("for a reason of its own")
    if loss == "given up before":
        time.sleep(READERS_S / 2)
    talk.engine.wait_for_readers([ONE])
    assert time.monotonic() - began >= least_s
    assert not talk.engine.is_open(ONE)


@pytest.mark.proves("G13")
@pytest.mark.usefixtures("long_readers")
@pytest.mark.parametrize("loss", ["killed", "let go", "let go, and another has come", "away"])
def test_waits_for_no_readers_once_the_agent_reads_nothing(talk: Talk, agent: FakeAgent, loss: str) -> None:
    talk.engine.offer(OFFER)
    if loss == "killed":
        agent.hang_up()
    else:
        agent.let_go()
    if loss == "away":
        talk.engine.turn()
        assert talk.link.state is LinkState.DETACHED
    elif loss.endswith("has come"):
        talk.attach_unheard(agent)
    assert timed(talk, "r") < LONG_READERS_S / 2
    assert not talk.engine.is_open(ONE)


@pytest.mark.parametrize("hears_at_s", [0.5, None])
def test_waits_for_readers_from_when_the_agent_could_hear_of_it(
    talk: Talk, agent: FakeAgent, hears_at_s: float | None
) -> None:
    """What waits in our own queue it cannot hear. One that reads nothing may read on for a second once given up."""
    talk.engine.offer(OFFER)
    while talk.link.client.is_all_sent:
        talk.link.send(Withdraw(number=1, reason="x" * 1000))
    talk.engine.withdraw(ONE, "preempted")
    timer, began = threading.Timer(hears_at_s or 0, agent.pump), time.monotonic()
    if hears_at_s is not None:
        timer.start()
    talk.engine.wait_for_readers([ONE])
    expected_s = READERS_S + (READERS_S if hears_at_s is None else hears_at_s)
    assert time.monotonic() - began >= expected_s - 0.05
    assert talk.engine.attached is None and not talk.engine.is_open(ONE)


def test_says_whether_there_is_anything_to_wait_for_and_wakes_when_it_comes(talk: Talk, agent: FakeAgent) -> None:
    assert not talk.engine.is_waiting
    talk.engine.want(WANT)
    assert talk.engine.is_waiting
    agent.say(Done(number=ONE, request="r", moved_bytes=0, seconds=0))
    began = time.monotonic()
    talk.engine.rest(100)
    assert time.monotonic() - began < 50
    talk.engine.want(called("goes on", WANT))
    talk.engine._listen()
    assert not talk.engine.is_waiting, "there is news"
    assert len(talk.engine.turn()) == 1 and talk.engine.is_waiting


# Memory that is about to go away:


@pytest.mark.parametrize("when", ["at work", "nobody came", "asking", "lost already"])
def test_what_is_detached_nothing_touches_and_all_of_it_has_ended(talk: Talk, when: str) -> None:
    agent = None if when == "nobody came" else FakeAgent(talk.path)
    if agent is None or when == "asking":
        talk.engine.turn()
        assert talk.link.state is (LinkState.DETACHED if agent is None else LinkState.ASKING)
    else:
        talk.again(agent)
        talk.begin()
        if when == "lost already":
            talk.engine.give_up("for a reason of its own")
    with agent.alive() if agent is not None else contextlib.nullcontext():
        began = time.monotonic()
        talk.engine.detach()
        assert time.monotonic() - began < DETACH_S / 2
    assert agent is None or agent._engine is None
    asked = [] if agent is None or when == "asking" else ["o", "r"]
    assert [ended.request for ended in talk.engine.turn() if isinstance(ended, Ended)] == asked
    talk.clock.now += 1000
    assert talk.engine.turn() == [] and not talk.engine.start(0.1)


def test_detaching_waits_for_an_agent_that_stands_still_until_its_process_is_gone(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.want(WANT)
    timer = threading.Timer(0.5, agent.die)
    timer.start()
    began = time.monotonic()
    talk.engine.detach()
    assert time.monotonic() - began > 0.4
    assert [ended.code for ended in talk.engine.turn() if isinstance(ended, Ended)] == ["agent_lost"]


def test_detaching_from_a_stopped_agent_fails_in_time_and_the_memory_stays(tmp_path: Path) -> None:
    """A real agent. It waited without end, on the thread of SGLang's scheduler."""
    memory = memory_of()
    with real_agent(tmp_path, "a", device="cpu") as running, contextlib.ExitStack() as stack:
        engine = Conversation(EngineClient(running.socket), memory, logging.getLogger("test"))
        stack.callback(engine.close)
        assert engine.start(120)
        running.process.send_signal(signal.SIGSTOP)
        assert running.process.is_stopped(60)
        with pytest.raises(EngineError, match="has not let go of our memory") as caught:
            engine.detach(0.5)
        assert caught.value.code == "not_let_go" and not engine._link.is_over
        running.process.send_signal(signal.SIGCONT)
        engine.detach()
        assert engine._link.is_closed and running.status.engine is None


def test_no_agent_is_attached_to_while_the_memory_goes_away(
    talk: Talk, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's thread tries again in the very moment in which the last agent has let go."""
    listen = talk.engine._listen

    def listen_long() -> None:
        listen()
        monkeypatch.setattr(talk.engine, "_listen", listen)
        talk.clock.now += ATTACH_RETRY_S
        thread = threading.Thread(target=talk.link._look)
        thread.start()
        thread.join()

    monkeypatch.setattr(talk.engine, "_listen", listen_long)
    detaching = threading.Thread(target=talk.engine.detach, daemon=True)
    with agent.alive():
        detaching.start()
        detaching.join(60)
    assert not detaching.is_alive() and agent._engine is None and talk.engine.attached is None


# Descriptors, and the end:


def descriptors() -> set[str]:
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if is_open(int(fd))}


def test_a_fence_goes_with_the_memory_and_its_descriptor_stays_the_fences(tmp_path: Path) -> None:
    fence = EngineFence("cpu")
    talk = Talk(tmp_path, fence_of=lambda device: fence)
    agent = talk.attach()
    agent.let_go()
    talk.engine.turn()
    talk.again(agent)
    assert [each.fence_fd for each in agent.attaches] == [1, 1]
    assert talk.engine.mark() == 1 and agent.fence is not None and agent.fence.reached(1)
    assert is_open(fence.fd)
    talk.engine.close()
    assert fence.fd == -1, "it was made for this conversation"


def test_what_was_opened_for_the_agent_is_closed_with_the_conversation(tmp_path: Path) -> None:
    memory = memory_of()
    memory.storages[0]._share_fd_cpu_()  # this one is the storage's
    gc.collect()  # what earlier tests have left
    before = descriptors()
    talk = Talk(tmp_path, memory)
    attached = []
    for _ in range(3):
        agent = talk.attach()
        attached.append(len(descriptors()))
        agent.let_go()
        talk.engine.turn()
        agent.die()
        del agent
    assert attached[0] == attached[-1] > len(before)
    talk.engine.close()
    assert descriptors() == before


def test_a_client_and_a_conversation_that_are_closed_are_seen_to_leave(talk: Talk, agent: FakeAgent) -> None:
    talk.engine.close()
    agent.pump()
    assert agent._engine is None
    client = EngineClient(agent.path, pidfd_of=fake_pidfd)
    assert client.reconnect()
    agent.pump()
    client.close()
    assert not client.is_connected and client.has_ended and client.pidfd == -1
    agent.pump()
    assert agent._engine is None
