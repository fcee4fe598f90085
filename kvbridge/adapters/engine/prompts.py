"""What both engines read of a request: the name under which its offer and its want meet, and the client's span. Pure.

A name has a digest, the same for one prompt in any engine. A room (`bootstrap_room`) is just a number that a client may
choose. So each engine computes the digest from its own request: whatever room a client or a router gives, two requests
meet only if their KV is the same.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

MOST_CHARACTERS = 200
DIGEST_BYTES = 20  # 160 bits: a client can search for two prompts of one digest, so 2^80 tries must be out of reach
ROOMS = range(1, 1 << 63)  # what `bootstrap_room` may be
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)  # W3C Trace Context


def call(room: int) -> str:
    """The name of a router's call (`NoOffer.call`): what the rendezvous ids of its prompts begin with."""
    return f"room/{room}"


def rendezvous(room: int, digest: str) -> str:
    """The rendezvous id of an offer and a want that a router gave one `bootstrap_room`."""
    return f"{call(room)}/{digest}"


def is_in(name: str, room: int) -> bool:
    """Whether this is the rendezvous id of some prompt in that room."""
    start = rendezvous(room, "")
    digest = name.removeprefix(start)
    return digest != name and len(digest) == 2 * DIGEST_BYTES and not set(digest) - set("0123456789abcdef")


def short(text: str) -> str:
    """This name, or a digest of it if it is long or not ASCII: it may be a client's."""
    if len(text) <= MOST_CHARACTERS and text.isascii():
        return text
    return name_digest(text)


def name_digest(text: str) -> str:
    """Stands for a name that does not fit into a message."""
    return "long-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class PromptDigest:
    """Digest of all that decides a prompt's KV. Fields are added in one order; an engine leaves out what it lacks."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._hasher = blake2b(digest_size=DIGEST_BYTES)
        self.add("tokens", struct.pack(f"{len(tokens)}q", *tokens))  # twice as fast as an array of a list

    def add(self, *words: str | int | bytes) -> None:
        """Add a field; its first word names it. Words carry their length, so no two prompts hash the same bytes."""
        for word in words:
            written = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self._hasher.update(len(written).to_bytes(8, "little"))
            self._hasher.update(written)

    def add_adapter(self, name: str, path: str) -> None:
        """Add a LoRA, by its name and the last part of its path.

        Hosts keep adapters in different places. But when a name is pointed at another adapter, the last part usually
        changes. Adapter numbers are of no use: they differ between engines.
        """
        self.add("lora", name, path.rstrip("/").rpartition("/")[2])

    def text(self) -> str:
        return self._hasher.hexdigest()

    def prefixes(self, tokens: Sequence[int], size: int, most: int) -> tuple[bytes, ...]:
        """A digest for each of the first `most` multiples of `size` tokens, of all added so far and of those tokens."""
        found = []
        for first in range(0, min(len(tokens) // size, most) * size, size):
            self.add("prefix", struct.pack(f"{size}q", *tokens[first : first + size]))
            found.append(self._hasher.digest())
        return tuple(found)


def traceparent(*told: object) -> str:
    """The first valid `traceparent` in these mappings, or "". A client may have put anything there."""
    for each in told:
        found = each.get("traceparent") if isinstance(each, Mapping) else None
        if isinstance(found, str) and _TRACEPARENT.fullmatch(found):
            return found
    return ""
