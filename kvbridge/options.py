"""The agent's options, each spelled once: name, type, default, bounds and what it is for.

Flags, variables, `deploy/kvbridge.toml` and `docs/configuration.md` are made from what is written here. Pure.
"""

from __future__ import annotations

import functools
import inspect
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from kvbridge_proto.peer import ROUTES, Route
from msgspec import Meta
from msgspec.inspect import (
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

ENVIRONMENT_PREFIX = "KVBRIDGE_"
DEVICE_WORDS = "auto, cpu, cuda, cuda:N or a GPU's UUID"
DEVICES = r"^(auto|cpu|cuda(:[0-9]{1,3})?|GPU-[0-9a-fA-F-]{36})$"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Verify = Literal["always", "sampled", "never"]

# The first option of each part.
SECTIONS = {
    "name": "This agent",
    "key": "Other agents",
    "allowed_uids": "The engine and its memory",
    "routes": "Routes and staging",
    "connect_s": "Waiting",
    "metrics": "Metrics, spans and logs",
}


def _option(meaning: str, about: str = "", *, sample: Any = None, **bounds: Any) -> Meta:
    """`meaning`: the line of `--help`; `about`: what else there is to know; `sample`: shown for a default of None."""
    return Meta(description=meaning, extra={"about": inspect.cleandoc(about), "sample": sample}, **bounds)


class Supervision(NamedTuple):
    """What systemd told us, not an option: its address, and its watchdog's limit in seconds (0: no watchdog)."""

    address: str
    watchdog_s: float


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set."""

    name: Annotated[
        str, _option("What this agent is called in logs and in `kvbridge status`", min_length=1, max_length=64)
    ] = "agent-0"
    socket: Annotated[
        str,
        _option(
            "Unix socket for the engine and `kvbridge status`",
            """
            Its folder should be private (0750). Who may speak is decided by uid.
            """,
        ),
    ] = "/run/kvbridge/agent-0.sock"
    listen: Annotated[
        str,
        _option(
            "Where other agents reach us; port 0 takes any",
            "Loopback is enough for engines on one host. Across hosts name one interface's address, and set `key`.",
        ),
    ] = "tcp://127.0.0.1:7700"
    advertise: Annotated[
        str,
        _option(
            "The address told to others; empty: the one we listen on",
            "Set it where others reach us at another address (NAT, a name, a wildcard).",
        ),
    ] = ""
    allow_wildcard: Annotated[
        bool,
        _option("Let `listen` name every interface (0.0.0.0, *, ::)", "Then `advertise` must be set as well."),
    ] = False
    key: Annotated[
        str,
        _option(
            "File of our secret key (kvbridge keygen); empty: loopback only",
            """
            Agents then speak encrypted, and only to who proves a key of `peers` (KV bytes are not encrypted:
            SECURITY.md). The simplest fleet has the same file on every host, and needs no `peers`.
            """,
            max_length=4096,
        ),
    ] = ""
    peers: Annotated[
        str,
        _option(
            "File or folder of public keys that may connect; empty: only our own",
            """
            Lines `NAME PUBLICKEY` (what keygen prints), or *.pub files of them. Only root or our user may be able to
            write it. `systemctl reload` (SIGHUP) reads it again.
            """,
            max_length=4096,
        ),
    ] = ""
    dial: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        _option(
            "HOST:PORT patterns of what may be dialled; empty: loopback only",
            """
            Set it on the decode side, across hosts, with a `key` (or `allow_unauthenticated`); loopback then has to be
            named too. What patterns mean: SECURITY.md.
            """,
            max_length=256,
        ),
    ] = ()
    meet: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        _option(
            "Agents to meet before a request needs them: tcp://HOST:PORT, dns://NAME:PORT or file:///PATH",
            """
            For agents that fetch, which dial: decode agents, and those of equal engines. They open sessions with all
            ranks of the engine there, and compile kernels for them. `dns` means every IPv4 address of a name, as a
            headless Service has; a file has such lines. Both are looked at again every 5 s. `dial` must allow each
            address; with several keys append #PUBLICKEY.
            """,
            max_length=64,
        ),
    ] = ()
    allow_unauthenticated: Annotated[
        bool,
        _option(
            "Serve others, and dial those in `dial`, without keys: whoever reaches us may fetch KV",
            "For isolated test networks.",
        ),
    ] = False
    allowed_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        _option(
            "Other users whose engines may attach and who may ask for the status, besides our own and root",
            "An engine of another user must also name our uid, in `kvbridge_agent_uids`.",
            max_length=64,
        ),
    ] = ()
    share_memory: Annotated[
        bool,
        _option(
            "Hand the engine's memory to agents of this host, which pull from it",
            """
            The fastest route. Each must first prove a session, and be of the same user (docs/threat-model.md). If it is
            off, this agent reads no other engine's memory either: rows go by slots both ways.
            """,
        ),
    ] = True
    share_memory_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        _option("Users whose agents may be handed that memory; empty: our own and root", max_length=64),
    ] = ()
    verify: Annotated[
        Verify,
        _option(
            "Which pulled chunks are compared with the sender's: always, sampled (1 in 64), never",
            """
            A sample begins with the first chunk. The sender reads the same rows again, at the cost of the transfer. If
            the digests differ, the request fails with digest_mismatch.
            """,
        ),
    ] = "sampled"
    device: Annotated[
        str,
        _option(
            f"Where the engine's memory is: {DEVICE_WORDS}",
            """
            A UUID means the same GPU whatever CUDA_VISIBLE_DEVICES says; "auto" the first GPU if there is one.
            """,
            pattern=DEVICES,
        ),
    ] = "auto"
    routes: Annotated[
        tuple[Route, ...],
        _option(
            f"Ways to a peer, the best first: {', '.join(ROUTES)}",
            "Each is proved before it is used (docs/architecture.md). Name one alone to force it.",
            min_length=1,
            max_length=len(ROUTES),
        ),
    ] = ROUTES
    pull_ctas: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        _option(
            "CTAs of a kernel that pulls, at most; unset: 33 under MPS, else all",
            """
            33 reach nearly all of NVLink; under MPS the engine runs beside them. Without MPS the two take turns. If a
            number is set, or under MPS, pulls use one stream instead of two.
            """,
            sample=33,
        ),
    ] = None
    slot_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 16, le=1 << 30)] | None,
        _option(
            "Size of a staging slot, the largest piece in flight; unset: 128 MiB on a GPU, else 4 MiB",
            """
            A multiple of 4096. Staging takes (receive_slots + send_slots + 2) * slot_bytes: 200 MiB of host memory
            without a GPU; on a GPU 1.4 GiB and, unless `routes` leaves out "host", as much pinned host memory. It is
            made at the start; on loopback, with "pull" as the first route and `share_memory`, when the first session
            needs it (by pull, never). Larger slots suit fast links, more slots many requests at once.
            """,
            sample=4 << 20,
        ),
    ] = None
    receive_slots: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        _option(
            "Slots that other agents write into; unset: 6 on a GPU, else 32",
            "An agent that stands still keeps two thirds of them at most. Of fewer than 3 it may keep all.",
            sample=32,
        ),
    ] = None
    send_slots: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        _option("Slots that we send from; unset: 3 on a GPU, else 16", "As `receive_slots`.", sample=16),
    ] = None
    net_devices: Annotated[
        str,
        _option(
            "Network devices that carry KV, as UCX names them (a,b; all); empty: loopback only",
            """
            Such as mlx5_0:1 or eth0; needed to serve or dial other hosts. UCX believes whoever reaches it: only the
            fleet may be on that network.
            """,
            max_length=256,
        ),
    ] = ""
    connect_s: Annotated[float, _option("How long to try to reach another agent", gt=0, le=600)] = 5.0
    silence_s: Annotated[
        float,
        _option(
            "A peer that is silent for so long counts as lost",
            "So does one whose host has acknowledged nothing for 3 s. Its transfers fail; the next request dials anew.",
            ge=1,
            le=600,
        ),
    ] = 15.0
    write_timeout_s: Annotated[
        float,
        _option(
            "A write that takes longer fails its transfer; its slots are quarantined",
            "The deadline never frees memory that may still be written.",
            gt=0,
            le=600,
        ),
    ] = 30.0
    rebuild_s: Annotated[
        float,
        _option(
            "After how long all slots are replaced, if half of the receive_slots are quarantined",
            "Fewer after ten times as long: docs/guarantees.md, G6.",
            gt=0,
            le=86400,
        ),
    ] = 60.0
    linger_s: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        _option(
            "How long threads look for more work before they sleep; unset: 0.03 on a GPU, else 0",
            """
            A thread that sleeps starts late. Costs up to two cores while requests come (docs/timeouts.md), and none
            otherwise; without a GPU, they are the engine's.
            """,
            sample=0.0,
        ),
    ] = None
    drain_s: Annotated[
        float,
        _option(
            "How long transfers may go on after SIGTERM",
            "Keep it below the service manager's own limit.",
            ge=0,
            le=3600,
        ),
    ] = 10.0
    metrics: Annotated[
        str,
        _option("host:port for Prometheus; empty: off", "Keep it on loopback or behind something that authenticates."),
    ] = "127.0.0.1:9400"
    status_page: Annotated[
        bool,
        _option(
            "Serve /status at `metrics`, too: what `kvbridge status --fleet` asks",
            """
            It tells whoever reaches that port names, addresses, sessions and refusals of this agent, but nothing of
            requests (docs/threat-model.md, T28).
            """,
        ),
    ] = True
    kept_page: Annotated[
        bool,
        _option(
            "Serve /kept at `metrics`, too: how much of a prompt the engine keeps for others, for schedulers",
            """
            Whoever reaches that port can then find out whether a prompt that he guesses was here, unless it has a salt
            (docs/threat-model.md, T28).
            """,
        ),
    ] = False
    otlp_endpoint: Annotated[
        str,
        _option(
            "Where spans go, http://HOST:PORT/v1/traces; empty: none are made",
            "By OTLP over HTTP. Needs kvbridge[otel] (docs/metrics.md).",
            sample="http://127.0.0.1:4318/v1/traces",
            max_length=1024,
        ),
    ] = ""
    log_level: Annotated[LogLevel, _option("debug, info, warning or error")] = "info"
    log_format: Annotated[
        LogFormat,
        _option(
            "text or json",
            """
            On stderr. In JSON each value that a message names is also a field. Of lines that differ only in their
            values 50 are logged in 10 seconds; the next says how many were left out.
            """,
            sample="json",
        ),
    ] = "text"


def options() -> dict[str, str]:
    """Every option's name and what it is for, in one line."""
    return {name: meta_of(name).description or "" for name in AgentConfig.__struct_fields__}


def section_of(name: str) -> str:
    """The section of the options that this one is in."""
    names = AgentConfig.__struct_fields__
    first = max((each for each in SECTIONS if names.index(each) <= names.index(name)), key=names.index)
    return SECTIONS[first]


def defaults() -> dict[str, Any]:
    """Every option's default; None where it depends on the device."""
    return msgspec.structs.asdict(AgentConfig())


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def off_flag_of(name: str) -> str:
    """The flag that turns a boolean option off."""
    return "--no-" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def hint_of(name: str) -> Any:
    """The option's type with its bounds, as msgspec reads it."""
    return _hints()[name]


def choices(name: str) -> tuple[str, ...]:
    """The words an option may be, if it is one of a few or a list of those; otherwise empty."""
    kind = type_info(hint_of(name))
    while isinstance(kind, Metadata | VarTupleType):
        kind = kind.type if isinstance(kind, Metadata) else kind.item_type
    return tuple(map(str, kind.values)) if isinstance(kind, LiteralType) else ()


def allowed(name: str) -> str:
    """What an option may be, for people: "a whole number, at least 1, at most 4096"."""
    return _allowed(type_info(hint_of(name)))


@functools.cache
def _hints() -> dict[str, Any]:
    """The hints of all options. Cached, because evaluating them takes 5 ms."""
    return get_type_hints(AgentConfig, include_extras=True)


def meta_of(name: str) -> Meta:
    """What `_option` was given."""
    meta: Meta = get_args(hint_of(name))[-1]
    return meta


def _allowed(kind: Type) -> str:
    match kind:
        case Metadata(type=inner):
            return _allowed(inner)
        case UnionType(types=types):
            return _allowed(next(each for each in types if not isinstance(each, NoneType)))
        case LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case VarTupleType(item_type=item, min_length=least, max_length=most):
            return f"a list of {least or 0} to {most}, each {_allowed(item)}"
        case StrType(pattern=str()):
            return DEVICE_WORDS
        case StrType(min_length=least, max_length=most):
            return "text" if most is None else f"text of {least or 0} to {most} characters"
        case IntType() | FloatType():
            return ("a whole number" if isinstance(kind, IntType) else "a number") + _bounds(kind)
    return "true or false"


def _bounds(kind: IntType | FloatType) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [f"{word} {getattr(kind, name):.10g}" for name, word in words.items() if getattr(kind, name) is not None]
    return f", {', '.join(bounds)}" if bounds else ""
