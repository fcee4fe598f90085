"""The options that both engines' adapters have, and how options are checked, once, at start-up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, get_type_hints

import msgspec
from msgspec import Meta

from ...errors import OperatorError

Seconds = Annotated[float, Meta(gt=0, le=86400)]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set on both engines.

    socket       the agent's unix socket, an absolute path; `{rank}` is the rank's number among this engine's ranks on
                 this host, and in SGLang `{gpu}` the number of its GPU
    agent_uids   users whose agents may have this engine's memory, besides our own user and root
    allow_unwatched  attach also to an agent whose end cannot be seen: before Linux 6.5, one in another PID namespace.
                 When it dies, blocks count as free a second later, although its kernels may still write them
    hold_s       how long a prefilled prompt is kept for a decode engine that says nothing about it; it is kept longer
                 while a request waits for it there
    connect_s    how long start-up waits for the agent; without one the engine starts anyway
    model_name   what both engines call the model; the last part of the model's path if not set
    draft_name   the same for the draft model. Modules of the model itself (MTP) are called as the model is
    """

    socket: Annotated[str, Meta(pattern="^/")] = "/run/kvbridge/agent-{rank}.sock"
    agent_uids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    allow_unwatched: bool = False
    hold_s: Seconds = 30.0
    connect_s: Seconds = 30.0
    model_name: str = ""
    draft_name: str = ""

    @classmethod
    def checked(cls, given: Mapping[str, Any], spelled: Callable[[str], str], *, is_text: bool = False) -> Self:
        """`given` by name; `spelled` is how an operator writes a name. `is_text`: values are text, lists have commas.

        Raises OperatorError for an unknown name or a bad value.
        """
        hints, found = get_type_hints(cls, include_extras=True), {}
        for name, value in given.items():
            if name not in cls.__struct_fields__:
                known = ", ".join(map(spelled, cls.__struct_fields__))
                raise OperatorError("option_unknown", f"{spelled(name)}: not an option, known are {known}")
            is_list = is_text and isinstance(getattr(cls(), name), tuple)
            words = [part.strip() for part in value.split(",") if part.strip()] if is_list else value
            try:
                found[name] = msgspec.convert(words, hints[name], strict=not is_text)
            except msgspec.ValidationError as error:
                raise OperatorError("option_invalid", f"{spelled(name)}: {value!r:.60}: {error}") from None
        return cls(**found)

    def socket_of(self, rank: int, gpu: int = 0) -> str:
        """The socket of one rank's agent."""
        return self.socket.replace("{rank}", str(rank)).replace("{gpu}", str(gpu))
