"""The options that both engines' adapters have, and how options are checked, once, at start-up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ...errors import OperatorError

# A description completes the sentence "must be ...".
Seconds = Annotated[float, Meta(gt=0, le=86400, description="a number of seconds in (0, 86400]")]
Flag = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(description="text")]
Path = Annotated[str, Meta(pattern="^/", description="an absolute path")]
Uid = Annotated[int, Meta(ge=0)]
Uids = Annotated[tuple[Uid, ...], Meta(description="a list of users' numbers")]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set on both engines.

    socket       the agent's unix socket, an absolute path; `{rank}` is the rank's number among this engine's ranks on
                 this host, and in SGLang `{gpu}` the number of its GPU
    agent_uids   users whose agents may have this engine's memory, besides our own user and root
    allow_unwatched  attach also to an agent whose end cannot be seen: before Linux 6.5, one in another PID namespace.
                 When it dies, blocks count as free a second later, although its kernels may still write them
    hold_s       how long a prefilled prompt is kept for a decode engine that says nothing about it; it is kept longer
                 while a request waits for it there
    return_s     how long KV is kept, after its request or its last fetch, for others that begin with the same tokens:
                 answers for their conversation's next turn, and prompts for equal engines; 0: not
    connect_s    how long start-up waits for the agent; without one the engine starts anyway
    model_name   what both engines call the model; the last part of the model's path if not set
    draft_name   the same for the draft model. Modules of the model itself (MTP) are called as the model is
    """

    socket: Path = "/run/kvbridge/agent-{rank}.sock"
    agent_uids: Uids = ()
    allow_unwatched: Flag = False
    hold_s: Seconds = 30.0
    return_s: Annotated[float, Meta(ge=0, le=86400, description="a number of seconds in [0, 86400]")] = 0.0
    connect_s: Seconds = 30.0
    model_name: Text = ""
    draft_name: Text = ""

    @classmethod
    def checked(
        cls,
        given: Mapping[str, Any],
        spelled: Callable[[str], str],
        read: Callable[[Any, object], object] = lambda value, default: value,
    ) -> Self:
        """`given` by the names that the operator wrote; `spelled` is how one writes a field's name.

        `read` makes a field's value of what was written. It is told the field's default, and raises ValueError with
        what the value must be. Raises OperatorError for an unknown name or a bad value.
        """
        known, hints = {spelled(name): name for name in cls.__struct_fields__}, get_type_hints(cls, include_extras=True)
        defaults, found = cls(), {}
        for written, value in given.items():
            if written not in known:
                raise OperatorError("option_unknown", f"{written}: not an option, known are {', '.join(known)}")
            name = known[written]
            try:
                found[name] = msgspec.convert(read(value, getattr(defaults, name)), hints[name])
            except (msgspec.ValidationError, ValueError) as error:
                must_be = _description(hints[name]) if isinstance(error, msgspec.ValidationError) else error
                raise OperatorError("option_invalid", f"{written}: {value!r:.60}, must be {must_be}") from None
        return cls(**found)

    def socket_of(self, rank: int, gpu: int | None = None) -> str:
        """The socket of one rank's agent. Without `gpu`, `{gpu}` stays as it is."""
        path = self.socket.replace("{rank}", str(rank))
        return path if gpu is None else path.replace("{gpu}", str(gpu))


def _description(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return str(hint.__metadata__[-1].description)
    return " or ".join(get_args(hint))
