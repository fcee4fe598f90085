"""The name of the weights that an engine computes rows with. Pure.

Engines exchange rows only under the same name (`Weights` in kvbridge_proto/engine.py). After a cache reset that nobody
explains, an engine may have other weights than before. Nothing tells it whether the other engine has the same ones: one
of them may have been reset without new weights, and the other one with. So the weights have no name then, until
somebody who knows names them. A count of resets could not replace the name.
"""

from __future__ import annotations

from .prompts import MOST_CHARACTERS, name_digest, short

UNNAMED = ""
NAME_FORM = f"text of 1 to {MOST_CHARACTERS} printable ASCII characters"


def weights_name(version: object) -> str:
    """The version that a user gave, as a name that fits into a message. Never `UNNAMED`."""
    text = str(version)
    return short(text) if text and text.isprintable() else name_digest(text)
