"""What is made once and never changed: the records that the parts of an agent hand each other. Pure."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec
from msgspec.structs import replace as replace


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True):
    """Base of such records. With `eq=False` two of them are equal only if they are one; `replace` makes a changed one.

    A frozen dataclass takes ten times as long to make, and a request makes some hundred.
    """
