"""An engine's side of the talk and its agent's, with a queue each way: every order in which they can go on, to its end.

A room has one request after another, and two pages. A request is offered in two pieces, or aborted before the second;
the agent may end its offer at any time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from kvbridge_proto.common import AgentCard, Blocks
from kvbridge_proto.engine import Attach, Attached, Offer, Released, ToAgent, ToEngine, Withdraw

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.conversation import Conversation, Ended
from kvbridge.exchange.actions import Tell
from kvbridge.exchange.sender import Sender
from kvbridge.routes.registry import sending_routes
from tests.integration.adapters.small import memory_of
from tests.unit.exchange.world import World

REQUESTS, PAGES, HOLD_S = 3, (0, 1), 100.0
ENGINE = World().sender.engine


class Wrong(Exception):
    """What no order may lead to."""


class Queues(EngineClient):
    """Both directions of the socket."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.to_agent: list[ToAgent] = []
        self.to_engine: list[ToEngine] = []

    is_connected = property(lambda self: True)
    has_ended = property(lambda self: False)
    is_agent_gone = property(lambda self: False)
    is_quiet = property(lambda self: not self.to_engine)

    def reconnect(self) -> bool:
        return True

    def send(self, message: ToAgent, fds: Any = ()) -> bool:
        if isinstance(message, Attach):
            card = AgentCard(name="a", incarnation="i", address="tcp://x:1", version="1")
            self.to_engine.append(Attached(version=1, epoch=1, agent=card))
        else:
            self.to_agent.append(message)
        return True

    def poll(self) -> list[ToEngine]:
        heard, self.to_engine = self.to_engine, []
        return heard


@dataclass
class Story:
    """How far both are. `owner` says whose each page is, as the engine sees it; `current` is the room's request."""

    sending: Sender = field(default_factory=lambda: Sender(sending_routes))
    to_agent: list[ToAgent] = field(default_factory=list)
    to_engine: list[ToEngine] = field(default_factory=list)
    open: dict[int, Any] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    current: int = 0
    is_whole: bool = False
    causes: set[tuple[int, str]] = field(default_factory=set)  # why an offer may end: (request, code)
    request_of: dict[int, int] = field(default_factory=dict)  # the last request that had this number
    now: float = 0.0

    @property
    def key(self) -> str:
        offers = [(offered.number, offered.state) for offered in self.sending.offers.values()]
        engine = (sorted(self.open), self.owner, self.begun, self.current, self.is_whole)
        return repr((self.to_agent, self.to_engine, offers, engine, sorted(self.causes), self.request_of))


class Search:
    """`number_of` gives the n-th request's number. With `answers_twice` an agent answers late withdrawals too."""

    def __init__(self, number_of: Callable[[int], int], answers_twice: bool) -> None:
        self.number_of, self.answers_twice = number_of, answers_twice
        self.client = Queues()
        self.talk = Conversation(self.client, memory_of(), logging.getLogger("test"))
        self.talk.turn()
        self.talk.turn()
        assert self.talk.attached is not None

    def run(self) -> int:
        """How many states there are. Raises Wrong."""
        start = Story()
        seen, left = {start.key}, [start]
        with contextlib.closing(self.talk):
            while left:
                for after in self.steps(left.pop()):
                    if after.key not in seen:
                        seen.add(after.key)
                        left.append(after)
        return len(seen)

    def steps(self, before: Story) -> Iterator[Story]:
        for step in (self.offer, self.more, self.abort, self.turn, self.hear, self.expire):
            story = deepcopy(before)
            self.client.to_agent, self.client.to_engine, self.talk._open = story.to_agent, story.to_engine, story.open
            if step(story):
                story.to_agent, story.to_engine = self.client.to_agent, self.client.to_engine
                self.check(story)
                yield story

    # The engine:

    def offer(self, story: Story) -> bool:
        number, free = self.number_of(story.begun + 1), [page for page in PAGES if page not in story.owner]
        if story.current or story.begun == REQUESTS or not free or self.talk.is_open(number):
            return False
        story.begun += 1
        story.current, story.owner[free[0]], story.is_whole = story.begun, story.begun, False
        story.request_of[number] = story.begun
        self._offer(number, 4, (Blocks(0, 0, (free[0],)),), is_last=False)
        return True

    def more(self, story: Story) -> bool:
        if not story.current or story.is_whole:
            return False
        story.is_whole = True
        self._offer(self.number_of(story.current), 4, (), is_last=True, is_more=True)
        return True

    def _offer(self, number: int, tokens: int, blocks: tuple[Blocks, ...], **more: bool) -> None:
        self.talk.offer(
            Offer(number=number, request="7", rendezvous="r", tokens=tokens, blocks=blocks, hold_s=HOLD_S, **more)
        )

    def abort(self, story: Story) -> bool:
        if not story.current:
            return False
        self.talk.withdraw(self.number_of(story.current), "aborted")
        story.causes.add((story.current, "withdrawn"))
        story.current = 0
        return True

    def turn(self, story: Story) -> bool:
        """What has ended gives its page to whoever comes next."""
        if not story.to_engine:
            return False
        for ended in self.talk.turn():
            assert isinstance(ended, Ended)
            request = story.request_of[ended.number]
            if (request, ended.code) not in story.causes:
                raise Wrong(f"request {request} ended by {ended.code}, for no reason of its own")
            story.owner = {page: owner for page, owner in story.owner.items() if owner != request}
            story.current = 0 if story.current == request else story.current
        return True

    # The agent:

    def hear(self, story: Story) -> bool:
        if not story.to_agent:
            return False
        message = self.client.to_agent.pop(0)
        if isinstance(message, Offer):
            self._do(story.sending.offer(message, ENGINE, story.now))
        elif isinstance(message, Withdraw):
            if self.answers_twice and message.number not in story.sending.offers:
                self.client.to_engine.append(Released(number=message.number, request="7", code="unknown_offer"))
            self._do(story.sending.withdraw(message.number, message.reason, story.now))
        return True

    def expire(self, story: Story) -> bool:
        if not story.sending.offers:
            return False
        for offered in story.sending.offers.values():
            (page,) = (page for table in offered.tables.values() for page in table.ids)
            story.causes.add((story.owner[page], "offer_expired"))
        story.now += HOLD_S + 1
        self._do(story.sending.tick(story.now))
        return True

    def _do(self, actions: list[Any]) -> None:
        self.client.to_engine += [action.message for action in actions if isinstance(action, Tell)]

    def check(self, story: Story) -> None:
        lent = {
            page: offered
            for offered in story.sending.offers.values()
            for t in offered.tables.values()
            for page in t.ids
        }
        for page, offered in lent.items():
            if self.number_of(story.owner.get(page, 0)) != offered.number or not self.talk.is_open(offered.number):
                raise Wrong(f"page {page} is lent for offer {offered.number}, and the engine has it back")
        if not story.to_agent and not story.to_engine and story.open.keys() != story.sending.offers.keys():
            raise Wrong(f"the engine waits for {list(story.open)}, its agent holds {list(story.sending.offers)}")


@pytest.mark.proves("G14")
@pytest.mark.parametrize("answers_twice", [False, True])
def test_no_order_of_messages_ends_an_offer_for_another_or_gives_its_pages_away(answers_twice: bool) -> None:
    """Also if an agent answers a withdrawal that came too late: that answer has the number of what is over."""
    assert Search(lambda request: request, answers_twice).run() > 300


def test_the_search_finds_what_happened_when_names_came_again() -> None:
    with pytest.raises(Wrong, match="unknown_offer"):
        Search(lambda request: 1, answers_twice=True).run()
