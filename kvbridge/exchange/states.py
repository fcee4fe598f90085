"""State machines as tables: one dict from (state, event) to state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalEvent(Exception):
    """This event cannot happen in this state; nothing was changed."""

    def __init__(self, state: Enum, event: Enum) -> None:
        super().__init__(f"{event.name} in state {state.name}")
        self.state = state
        self.event = event


class StateTable(Generic[S, E]):
    """What state follows; read it as the picture of the machine."""

    def __init__(self, rows: Mapping[tuple[S, E], S]) -> None:
        self._rows = dict(rows)

    def after(self, state: S, event: E) -> S:
        """The next state. Raises IllegalEvent."""
        try:
            return self._rows[state, event]
        except KeyError:
            raise IllegalEvent(state, event) from None

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self._rows
