"""Every order in which equal requests come, end and are reported: one want, given up only if nobody needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from kvbridge_proto.engine import Abandon, Want

from kvbridge.adapters.vllm.fetches import Fetch, Fetches

NAMES = "abc"


@dataclass
class Request:
    """As vLLM has it: `state` is queued, waiting (it has blocks, and no rows), running or over."""

    request_id: str
    state: str = "queued"
    shared: Fetch | None = None
    is_reported: bool = False


@dataclass
class Engine:
    """What the scheduler's half and its workers do."""

    caches: bool
    requests: dict[str, Request] = field(default_factory=lambda: {name: Request(name) for name in NAMES})
    own: dict[str, int] = field(default_factory=dict)  # wants for the agent, by request
    joined: dict[str, int] = field(default_factory=dict)
    abandoned: Counter[int] = field(default_factory=Counter)
    answered: set[int] = field(default_factory=set)  # wants that the agent has ended

    def __post_init__(self) -> None:
        self.fetches = Fetches(lambda request: request.state == "waiting")

    def events(self) -> Iterator[tuple[str, str]]:
        for name, request in self.requests.items():
            if request.state == "queued":
                yield "ask", name
            if request.state != "over":
                yield "end", name
            if request.state == "waiting" and request.is_reported:
                yield "run", name
        for name, number in self.own.items():
            if number not in self.answered:
                yield "good", name
                yield "failed", name

    def do(self, what: str, name: str) -> None:
        request = self.requests[name]
        getattr(self, what)(request)
        self.check()

    def ask(self, request: Request) -> None:
        """`SchedulerSide.matched_tokens` and `allocated`, with blocks for all."""
        empty = want_of(10 + NAMES.index(request.request_id), 0)
        fetch = self.fetches.find(empty, request.shared)
        if fetch is not None:
            request.shared = fetch
            if self.caches and self.fetches.is_needed(fetch):
                fetch.waiting.add(request.request_id)
                return
        if fetch is not None and not fetch.is_over:
            number = 20 + NAMES.index(request.request_id)
            self.fetches.join(request, want_of(number, 39), fetch, empty)
            self.joined[request.request_id] = number
        else:
            if request.shared is not None:
                self.give_up(self.fetches.stop_waiting(request.request_id, request.shared, "found"))
                if request.shared.is_good:
                    request.state = "running"
                    return
            self.fetches.begin(request, want_of(empty.number, 39))
            self.own[request.request_id] = empty.number
        request.state = "waiting"

    def end(self, request: Request) -> None:
        request.state = "over"
        if request.shared is not None and request.request_id not in self.joined:
            self.give_up(self.fetches.stop_waiting(request.request_id, request.shared, "over"))
        self.give_up(self.fetches.ended(request.request_id, "over"))

    def run(self, request: Request) -> None:
        request.state = "running"

    def good(self, request: Request) -> None:
        self.answer(request, set())

    def failed(self, request: Request) -> None:
        self.answer(request, {request.request_id})

    def answer(self, request: Request, failed: set[str]) -> None:
        """Workers report a want, and those that joined it and have not left."""
        number = self.own[request.request_id]
        self.answered.add(number)
        self.fetches.failed(failed, set())
        assert self.fetches.reported(request.request_id)[0] == [number]
        request.is_reported = True
        for name, own in self.joined.items():
            fetch = self.requests[name].shared
            if fetch is not None and fetch.want.number == number and not self.abandoned[own]:
                assert self.fetches.reported(name) == ([], [])
                self.requests[name].is_reported = True

    def give_up(self, abandons: list[Abandon]) -> None:
        for each in abandons:
            self.abandoned[each.number] += 1
            for name, number in self.joined.items():
                if number == each.number:
                    self.fetches.reported(name)

    def picture(self) -> tuple[Any, ...]:
        """All that decides what may follow."""
        each = ((r.state, r.is_reported, r.shared and r.shared.want.number) for r in self.requests.values())
        waiting = (frozenset(r.shared.waiting) if r.shared else None for r in self.requests.values())
        ended = (frozenset(self.answered), frozenset(self.abandoned))
        return (*each, *waiting, *sorted(self.own.items()), *sorted(self.joined.items()), *ended)

    def check(self) -> None:
        assert all(count == 1 for count in self.abandoned.values()), "given up twice"
        needed = Counter[int]()
        for name, request in self.requests.items():
            fetch = request.shared
            is_sharing = fetch is not None and (name in fetch.waiting or name in self.joined)
            if fetch is not None and is_sharing and request.state in ("queued", "waiting") and not request.is_reported:
                needed[fetch.want.number] += 1
            if name in self.own and request.state == "waiting":
                needed[self.own[name]] += 1
        for number in set(self.own.values()) - self.answered:
            assert bool(needed[number]) != bool(self.abandoned[number]), "needed and given up, or neither"
        for number in self.joined.values():
            assert number not in self.answered


def want_of(number: int, tokens: int) -> Want:
    named: dict[str, Any] = {"request": "r", "rendezvous": "call/0/digest", "sender": "tcp://10.0.0.1:7700"}
    return Want(number=number, first_token=0, end_token=tokens, blocks=(), deadline_s=1.0, **named)


def replayed(caches: bool, events: tuple[tuple[str, str], ...]) -> Engine:
    engine = Engine(caches)
    for event in events:
        engine.do(*event)
    return engine


@pytest.mark.parametrize("caches", [False, True], ids=["copies", "cache"])
def test_no_order_of_events_gives_up_what_is_needed_or_keeps_what_is_not(caches: bool) -> None:
    seen, ends = set(), 0
    todo: list[tuple[tuple[str, str], ...]] = [()]
    while todo:
        events = todo.pop()
        engine = replayed(caches, events)
        if engine.picture() in seen:
            continue
        seen.add(engine.picture())
        following = list(engine.events())
        todo += [(*events, event) for event in following]
        if not following:
            ends += 1
            assert not engine.fetches, "something is waited for for ever"
            engine.fetches.forget_used()
            assert not engine.fetches._of_prompt
    assert len(seen) > 500 and ends > 10, (len(seen), ends)


@pytest.mark.parametrize(
    ("first", "end", "can_join"), [(0, 39, False), (16, 39, True), (32, 39, True), (16, 38, False)]
)
def test_a_request_joins_a_fetch_that_brings_all_it_lacks(first: int, end: int, can_join: bool) -> None:
    fetch = Fetch(msgspec.structs.replace(want_of(1, 39), first_token=16), {})
    assert fetch.brings(first, end) is can_join
    fetch.is_over = True
    assert not fetch.brings(first, end)
