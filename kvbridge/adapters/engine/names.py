"""What both engines call a model, its draft model, and the weights that rows are computed with. Pure.

Engines exchange rows only under the same name of weights (`Weights` in kvbridge_proto/engine.py). After a cache reset
that nobody explains, an engine may have other weights than before. Nothing tells it whether the other engine has the
same ones: one of them may have been reset without new weights, and the other one with. So the weights have no name
then, until somebody who knows names them. A count of resets could not replace the name.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .prompts import MOST_CHARACTERS, name_digest, short

UNNAMED = ""
WeightsName = Annotated[  # what `weights_name` leaves as it is
    str,
    Meta(
        pattern=rf"^[ -~]{{1,{MOST_CHARACTERS}}}\Z",
        description=f"text of 1 to {MOST_CHARACTERS} printable ASCII characters",
    ),
]


def weights_name(version: object) -> str:
    """The version that a user gave, as a name that fits into a message. Never `UNNAMED`."""
    text = str(version)
    return short(text) if text and text.isprintable() else name_digest(text)


def model_name(path: str) -> str:
    """The last part of a model's path."""
    return path.rstrip("/").rpartition("/")[2]


def draft_name(model: str, model_path: str, draft_path: str) -> str:
    """What a draft model is called. Modules of the model itself (MTP) are called as the model is, `model`."""
    return model if draft_path.rstrip("/") == model_path.rstrip("/") else model_name(draft_path)
