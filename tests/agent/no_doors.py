"""The doors of an agent that shares no memory and is offered none."""

from __future__ import annotations

from typing import Any


class _NoDoors:
    def let_in(self, session: Any) -> Any:
        raise AssertionError("a session came about by a route that we do not have")

    def see_off(self, session: Any) -> None: ...
    def share(self, attached: Any) -> None: ...
    def withdraw(self, attached: Any, reason: str) -> None: ...

    async def enter(self, session: Any, card: Any) -> None:
        raise AssertionError("a session came about by a route that we do not have")


NO_DOORS = _NoDoors()
