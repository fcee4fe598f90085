"""KV that engines keep for others that begin with the same tokens: ours, and what other agents have told us of.

Our engine's is told to every agent that we fetch from, on the link that is there: its engine prefills the next turn. So
engines of one role fetch from each other if their agents `meet` each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs

from kvbridge_proto import engine, peer
from kvbridge_proto.common import MOST_PREFIXES, PREFIX_TOKENS
from kvbridge_proto.status import KeptOfPrompt
from msgspec import json

from ..errors import PeerError
from ..exchange.session import Session
from ..transport.endpoint import canonical, check_dialled

PREFIX_BYTES = 20
MOST_KEPT = 1024  # of our engine, and of each other agent; the oldest are forgotten, and end by themselves
# A want that ends so waited for up to `connect_s`, and the next would again.
UNREACHABLE = ("peer_unreachable", "peer_not_allowed", "key_refused", "key_not_allowed", "bad_address")


class KeptAnswers:
    """`tell_senders` reaches all agents that we fetch from, `tell_engine` our engine."""

    def __init__(
        self, tell_senders: Callable[[peer.Keeps], None], tell_engine: Callable[[engine.KeptBy], None]
    ) -> None:
        self._tell_senders = tell_senders
        self._tell_engine = tell_engine
        # By the number of the offer, oldest first: what an agent has to hear that we begin to fetch from.
        self.ours: dict[int, peer.Keeps] = {}
        self._unreachable: set[str] = set()  # incarnations that reach us, and not we them
        self._theirs: dict[str, dict[str, str]] = {}  # by incarnation: the address of its agent, by rendezvous id

    def offered(self, offer: engine.Offer) -> None:
        """Our engine keeps an answer."""
        if len(self.ours) >= MOST_KEPT:
            self.released(next(iter(self.ours)))
        kept = self.ours[offer.number] = peer.Keeps(rendezvous=offer.rendezvous, prefixes=offer.prefixes)
        self._tell_senders(kept)

    def released(self, number: int) -> None:
        """This offer, one of ours, has ended."""
        self._tell_senders(peer.Keeps(rendezvous=self.ours.pop(number).rendezvous))

    def tokens_of(self, prefixes: Sequence[bytes]) -> int:
        """How many tokens of a prompt with these prefixes our engine keeps. Callable from any thread."""
        found = (_common(kept.prefixes, prefixes) for kept in list(self.ours.values()))
        return max(found, default=0) * PREFIX_TOKENS

    def clear(self) -> None:
        """Our engine has left, and with it all sessions."""
        self.ours.clear()

    def heard(self, session: Session, kept: peer.Keeps) -> None:
        """Another agent's engine keeps an answer, or no longer."""
        incarnation, address = session.peer.incarnation, canonical(session.peer.address)
        theirs = self._theirs.setdefault(incarnation, {})
        if incarnation in self._unreachable:
            return
        try:
            check_dialled(address.partition("#")[0])
        except PeerError:  # the other agent named itself so: our engine could fetch nothing from there
            return
        if kept.prefixes:
            if len(theirs) >= MOST_KEPT:
                self._gone(theirs, next(iter(theirs)))
            theirs[kept.rendezvous] = address
            self._tell_engine(engine.KeptBy(sender=address, rendezvous=kept.rendezvous, prefixes=kept.prefixes))
        elif kept.rendezvous in theirs:
            self._gone(theirs, kept.rendezvous)

    def unreachable(self, address: str, code: str) -> None:
        """The agent at this address could not be dialled: nothing that it keeps can be fetched, now or later."""
        if code in UNREACHABLE:
            for incarnation, theirs in self._theirs.items():
                if address in theirs.values():
                    self._unreachable.add(incarnation)
                    for rendezvous in list(theirs):
                        self._gone(theirs, rendezvous)

    def lost(self, incarnation: str) -> None:
        """That agent's session has ended: it cannot be asked as fast as a prompt is computed."""
        self._unreachable.discard(incarnation)
        theirs = self._theirs.pop(incarnation, {})
        for rendezvous in list(theirs):
            self._gone(theirs, rendezvous)

    def _gone(self, theirs: dict[str, str], rendezvous: str) -> None:
        self._tell_engine(engine.KeptBy(sender=theirs.pop(rendezvous), rendezvous=rendezvous))


def _common(kept: Sequence[bytes], prefixes: Sequence[bytes]) -> int:
    """How many they begin with alike. Each stands for all before it, too."""
    return bisect_left(range(min(len(kept), len(prefixes))), True, key=lambda at: kept[at] != prefixes[at])


def kept_page(kept: KeptAnswers, query: str) -> bytes:
    """The page /kept. Raises ValueError, with what is wrong with the query."""
    try:
        text = parse_qs(query, max_num_fields=1).get("prefixes", [""])[0]
    except ValueError:  # splitting thousands holds the interpreter
        raise ValueError("got several parameters, need prefixes alone") from None
    count, rest = divmod(len(text), 2 * PREFIX_BYTES)
    if rest or count > MOST_PREFIXES:
        raise ValueError(f"prefixes: got {len(text)} digits, need {2 * PREFIX_BYTES} for each, {MOST_PREFIXES} at most")
    try:
        joined = bytes.fromhex(text)
    except ValueError:
        raise ValueError("prefixes: need hexadecimal digits") from None
    prefixes = [joined[at : at + PREFIX_BYTES] for at in range(0, len(joined), PREFIX_BYTES)]
    return json.encode(KeptOfPrompt(tokens=kept.tokens_of(prefixes)))
