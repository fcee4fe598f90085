"""Which prefixes of prompts other engines keep, of what they have prefilled or answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvbridge_proto.common import PREFIX_TOKENS
from kvbridge_proto.engine import KeptBy

MOST_ANSWERS = 4096
KEPT_SHARE = 0.5  # of an engine's blocks: if more hold kept answers, the oldest are released
KEPT_DEADLINE_S = 5.0  # a fetch of what is kept must not take longer than computing it


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """The first `tokens` tokens of a request can be fetched from `sender` under this id."""

    rendezvous: str
    sender: str
    tokens: int


class KeptPrefixes:
    """An answer is found by its longest prefix that a prompt begins with."""

    def __init__(self) -> None:
        self._host: str | None = None
        self._answers: dict[str, KeptBy] = {}  # by rendezvous id, oldest first
        # The same ids, by length and digest of each prefix, and by whether they are kept at our agent's host.
        self._with: dict[tuple[int, bytes, bool], dict[str, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._answers)

    def __contains__(self, rendezvous: str) -> bool:
        return rendezvous in self._answers

    def told_by(self, agent: str) -> None:
        """Forget all: an agent at this address tells us from now on, and tells all of it again."""
        self._host = _host_of(agent)
        self._answers.clear()
        self._with.clear()

    def heard(self, kept: KeptBy) -> None:
        self.gone(kept.rendezvous)
        if not kept.prefixes:
            return
        if len(self._answers) >= MOST_ANSWERS:
            self.gone(next(iter(self._answers)))
        self._answers[kept.rendezvous] = kept
        for prefix in self._keys(kept):
            self._with.setdefault(prefix, {})[kept.rendezvous] = None

    def gone(self, rendezvous: str) -> None:
        """It is kept no longer, or did not come."""
        if (kept := self._answers.pop(rendezvous, None)) is not None:
            for prefix in self._keys(kept):
                del self._with[prefix][rendezvous]
                if not self._with[prefix]:
                    del self._with[prefix]

    def _keys(self, kept: KeptBy) -> Iterator[tuple[int, bytes, bool]]:
        is_here = _host_of(kept.sender) == self._host
        return ((count, digest, is_here) for count, digest in enumerate(kept.prefixes, 1))

    def find(self, prefixes: Sequence[bytes]) -> KeptPrefix | None:
        """The longest of these prefixes of a prompt that is kept.

        By several: by one at our agent's host, so that no other host is read twice; of those by the last heard of.
        """
        for count in range(len(prefixes), 0, -1):
            digest = prefixes[count - 1]
            if ids := self._with.get((count, digest, True)) or self._with.get((count, digest, False)):
                rendezvous = next(reversed(ids))
                return KeptPrefix(rendezvous, self._answers[rendezvous].sender, count * PREFIX_TOKENS)
        return None


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:  # another agent said so
        return None
