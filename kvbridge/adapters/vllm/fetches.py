"""Requests of one engine that want the same rows share one fetch: answers to one prompt (`n`), retries. Pure.

An offer serves one want. The first request fetches. If vLLM caches prefixes, the others wait, and find the rows there:
no row is kept twice. Without a prefix cache, and if the first one has ended before its rows came, others join, where
all layers keep all rows: they get blocks of their own, and each worker copies the rows there once they have come,
before any of these requests runs.

What others were offered under the same id is given back once the fetch is over: before, it could be taken in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvbridge_proto.engine import Abandon, Want


@dataclass(slots=True, eq=False)
class Fetch:
    """A want, and by its number and theirs the requests whose blocks get its rows. `waiting` have no blocks yet.

    `is_kept`: it is of what another engine keeps, not of a prompt prefilled for these requests.
    `is_over` once all workers have reported it; `has_failed` if one did not get the rows. `returns` are empty wants.
    """

    want: Want
    requests: dict[int, Any]
    is_kept: bool = False
    waiting: set[str] = field(default_factory=set)
    returns: list[Want] = field(default_factory=list)
    is_over: bool = False
    has_failed: bool = False

    @property
    def is_good(self) -> bool:
        return self.is_over and not self.has_failed

    def brings(self, first_token: int, end_token: int) -> bool:
        """Whether it is under way, and these tokens are its last: then a request for them may join."""
        return not self.is_over and self.want.first_token <= first_token and self.want.end_token == end_token


class Fetches:
    """Those under way. `is_waiting` says whether a request has blocks, and waits for its rows or to run with them."""

    def __init__(self, is_waiting: Callable[[Any], bool]) -> None:
        self._is_waiting = is_waiting
        self._of_prompt: dict[tuple[str, str], Fetch] = {}
        self._of_request: dict[str, tuple[int, Fetch]] = {}  # until its rows are reported: its number, its fetch

    def __len__(self) -> int:
        return len(self._of_request)

    def __contains__(self, request_id: str) -> bool:
        """Whether rows of this request may still be written."""
        return request_id in self._of_request

    def begin(self, request: Any, want: Want, is_kept: bool = False) -> None:
        """This want is sent."""
        fetch = Fetch(want, {want.number: request}, is_kept)
        self._of_request[request.request_id] = want.number, fetch
        self._of_prompt[want.sender, want.rendezvous] = fetch

    def find(self, want: Want, before: Fetch | None) -> Fetch | None:
        """The fetch of the same rows that is under way. None if this request has shared another one `before`."""
        fetch = self._of_prompt.get((want.sender, want.rendezvous))
        if fetch is None or before not in (None, fetch) or self._is_used_up(fetch):
            return None
        return fetch

    def is_needed(self, fetch: Fetch) -> bool:
        """Whether a request has blocks for its rows, and waits for them or to be run with them."""
        return any(self._is_waiting(request) for request in fetch.requests.values())

    def join(self, request: Any, want: Want, fetch: Fetch, returned: Want) -> None:
        """Its blocks get copies of these rows. `returned` is what it gives back."""
        fetch.waiting.discard(request.request_id)
        fetch.requests[want.number] = request
        fetch.returns.append(returned)
        self._of_request[request.request_id] = want.number, fetch

    def stop_waiting(self, request_id: str, fetch: Fetch, reason: str) -> list[Abandon]:
        """This request waits for its rows no more. The want is given up if nobody does."""
        fetch.waiting.discard(request_id)
        return self._unneeded(fetch, reason)

    def ended(self, request_id: str, reason: str) -> list[Abandon]:
        """This request is over (`is_waiting` knows). If others need its rows, they come: its blocks stay until then."""
        number, fetch = self._of_request.get(request_id, (0, None))
        if fetch is None or fetch.is_over:
            return []
        is_joined = number != fetch.want.number
        left = [Abandon(number=number, reason=reason)] if is_joined else []
        return left + self._unneeded(fetch, reason)

    def _unneeded(self, fetch: Fetch, reason: str) -> list[Abandon]:
        key = fetch.want.sender, fetch.want.rendezvous
        if fetch.is_over or fetch.waiting or self.is_needed(fetch):
            return []
        if self._of_prompt.get(key) is fetch:
            del self._of_prompt[key]
        return [Abandon(number=fetch.want.number, reason=reason)]

    def failed(self, request_ids: Set[str], blocks: Set[int]) -> list[tuple[str, Fetch]]:
        """A worker did not get these requests' rows, or, as vLLM before 0.30 is told, not those of these blocks.

        Returns the requests whose fetch has failed so far, of all that is under way.
        """
        for request_id, (number, fetch) in self._of_request.items() if request_ids or blocks else ():
            if number == fetch.want.number:
                ids = chain.from_iterable(piece.ids for piece in fetch.want.blocks)
                fetch.has_failed |= request_id in request_ids or not blocks.isdisjoint(ids)
        return [(request_id, fetch) for request_id, (_, fetch) in self._of_request.items() if fetch.has_failed]

    def reported(self, request_id: str) -> tuple[list[int], list[Want]]:
        """All workers have reported it. Returns the number of a fetch that is over, and what is given back."""
        number, fetch = self._of_request.pop(request_id, (0, None))
        if fetch is None or number != fetch.want.number:
            return [], []
        fetch.is_over = True
        return [number], fetch.returns

    def end_all(self) -> None:
        """Rows that come from now on are of no use to anybody else."""
        self._of_prompt.clear()

    def forget_used(self) -> None:
        """Once a step: forget those whose requests run."""
        self._of_prompt = {key: fetch for key, fetch in self._of_prompt.items() if not self._is_used_up(fetch)}

    def _is_used_up(self, fetch: Fetch) -> bool:
        return fetch.is_over and not self.is_needed(fetch)
