"""The agent's options, each spelled once: name, default, bounds and what it is for. Reads file, environment, flags.

A flag beats `KVBRIDGE_<NAME>` in the environment, which beats the file, which beats the default here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from kvbridge_proto.door import DOOR_SUFFIX
from kvbridge_proto.peer import Route
from msgspec import Meta, inspect

from .errors import OperatorError

ENVIRONMENT_PREFIX = "KVBRIDGE_"
# Of failpoints.py, of adapters, of tests.
NO_OPTIONS = ("KVBRIDGE_FAILPOINTS", "KVBRIDGE_ENGINE_", "KVBRIDGE_TEST_", "KVBRIDGE_SITE", "KVBRIDGE_COMMIT")
# What Kubernetes tells every pod of a service whose name begins with kvbridge.
SERVICE = re.compile(
    r"KVBRIDGE_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
SOCKET_PATH_BYTES = 107  # what the kernel takes for a unix socket
DEVICE_WORDS = "auto, cpu, cuda, cuda:N or a GPU's UUID"
DEVICES = r"^(auto|cpu|cuda(:[0-9]{1,3})?|GPU-[0-9a-fA-F-]{36})$"
FILES_OF_KEYS = ("key", "peers")  # who sets one to the key itself must not find that in the log
LogLevel = Literal["debug", "info", "warning", "error"]
Verify = Literal["always", "sampled", "never"]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set."""

    name: Annotated[str, Meta(min_length=1, max_length=64, description="What this agent is called in logs")] = "agent-0"
    socket: Annotated[str, Meta(description="Unix socket for the engine and `kvbridge status`")] = (
        "/run/kvbridge/agent-0.sock"
    )
    listen: Annotated[str, Meta(description="Where other agents reach us; port 0 takes any")] = "tcp://127.0.0.1:7700"
    advertise: Annotated[str, Meta(description="The address told to others; empty: the one we listen on")] = ""
    allow_wildcard: Annotated[bool, Meta(description="Let `listen` name every interface (0.0.0.0, *, ::)")] = False
    key: Annotated[
        str, Meta(max_length=4096, description="File of our secret key (kvbridge keygen); empty: loopback only")
    ] = ""
    peers: Annotated[
        str,
        Meta(max_length=4096, description="File or folder of public keys that may connect; empty: our own alone"),
    ] = ""
    dial: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(max_length=256, description="HOST:PORT patterns: what may be dialled, nothing else; empty: loopback only"),
    ] = ()
    allow_unauthenticated: Annotated[
        bool, Meta(description="Serve others, and dial those in `dial`, without keys: whoever reaches us may fetch KV")
    ] = False
    allowed_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(max_length=64, description="Users whose engines may attach; empty: our own and root"),
    ] = ()
    share_memory: Annotated[
        bool, Meta(description="Hand the engine's memory to agents of this host, which pull from it; off: to nobody")
    ] = True
    share_memory_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(max_length=64, description="Users whose agents it is handed to; empty: our own and root"),
    ] = ()
    verify: Annotated[
        Verify,
        Meta(description="Which pulled chunks are compared with the sender's: always, sampled (1 in 64), never"),
    ] = "sampled"
    device: Annotated[str, Meta(pattern=DEVICES, description=f"Where the engine's memory is: {DEVICE_WORDS}")] = "auto"
    routes: Annotated[
        tuple[Route, ...],
        Meta(min_length=1, max_length=4, description="Ways to a peer, the best first: pull, direct, nixl, host"),
    ] = ("pull", "direct", "nixl", "host")
    pull_ctas: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="CTAs of a kernel that pulls, at most; unset: 33 under MPS, beside the engine's, else all"),
    ] = None
    slot_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 16, le=1 << 30)] | None,
        Meta(description="Size of a staging slot, the largest piece in flight; unset: 128 MiB on a GPU, else 4 MiB"),
    ] = None
    inbound_slots: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="Slots that other agents write into; unset: 6 on a GPU, else 32"),
    ] = None
    outbound_slots: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="Slots that we send from; unset: 2 on a GPU, else 16"),
    ] = None
    net_devices: Annotated[
        str,
        Meta(
            max_length=256,
            description="Network devices of the data, as UCX names them (a,b; all); empty: loopback, no other host",
        ),
    ] = ""
    connect_s: Annotated[float, Meta(gt=0, le=600, description="How long to try to reach another agent")] = 5.0
    silence_s: Annotated[float, Meta(ge=1, le=600, description="A peer silent for so long is lost")] = 15.0
    write_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="A write that takes longer fails its transfer; its slots stay locked")
    ] = 30.0
    rebuild_s: Annotated[
        float,
        Meta(gt=0, le=86400, description="Once half the slots of one kind were quarantined so long, make all anew"),
    ] = 60.0
    linger_s: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="How long threads look for more work before they sleep; unset: 0.03 on a GPU, else 0"),
    ] = None
    drain_s: Annotated[float, Meta(ge=0, le=3600, description="How long transfers may go on after SIGTERM")] = 10.0
    metrics: Annotated[str, Meta(description="host:port for Prometheus; empty: off")] = "127.0.0.1:9400"
    log_level: Annotated[LogLevel, Meta(description="debug, info, warning or error")] = "info"


def load(
    path: str | None = None,
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AgentConfig:
    """What the operator said, checked. Raises OperatorError naming the option, the value and its origin."""
    environment = os.environ if environment is None else environment
    _check_variables(environment)
    said: dict[str, tuple[Any, str]] = {}
    if path is not None:
        said |= {name: (value, path) for name, value in _file(path).items()}
    for name in options():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            said[name] = (environment[variable], variable)
        flag = (flags or {}).get(name)
        if flag is not None:
            said[name] = (str(Path.cwd() / flag) if name == "socket" and flag else flag, flag_of(name))
    config = AgentConfig(**{name: _typed(name, value, origin) for name, (value, origin) in said.items()})
    _check(config)
    return config


def options() -> dict[str, str]:
    """Every option's name and what it is for."""
    hints = get_type_hints(AgentConfig, include_extras=True)
    return {name: get_args(hints[name])[-1].description for name in AgentConfig.__struct_fields__}


def defaults() -> dict[str, Any]:
    """Every option's default."""
    return msgspec.structs.asdict(AgentConfig())


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def socket_folders(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Where agents of this host listen, as far as we are told: the default's folder, and that of KVBRIDGE_SOCKET."""
    environment = os.environ if environment is None else environment
    named = [AgentConfig().socket, environment.get(ENVIRONMENT_PREFIX + "SOCKET", "")]
    return list(dict.fromkeys(Path(path).parent for path in named if path.startswith("/")))


def _check_variables(environment: Mapping[str, str]) -> None:
    """A variable that only looks like an option would change nothing, and nobody would know."""
    known = {ENVIRONMENT_PREFIX + name.upper() for name in AgentConfig.__struct_fields__}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in known or variable.startswith(NO_OPTIONS):
            continue
        if SERVICE.fullmatch(variable) or (variable.endswith("_PORT") and SERVICE_URL.match(value)):
            continue
        spelled = ", ".join(sorted(known))
        raise OperatorError("bad_option", f"{variable}: no such option in the environment; there are {spelled}")


def _file(path: str) -> dict[str, Any]:
    try:
        said = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:  # of tomllib's own, too: 5000 digits, 500 brackets
        raise OperatorError("bad_config_file", f"config: cannot read {path}: {error}") from None
    for name in said:
        if name not in AgentConfig.__struct_fields__:
            known = ", ".join(AgentConfig.__struct_fields__)
            raise OperatorError("bad_option", f"{name}: no such option in {path}; there are {known}")
    return said


def _typed(name: str, value: Any, origin: str) -> Any:
    """`value` as the option's type; text is read leniently where it comes from a flag or the environment."""
    hint = get_type_hints(AgentConfig, include_extras=True)[name]
    is_text = isinstance(value, str)
    if is_text and not value.isprintable():  # no NUL for the kernel, no bytes that are no text, no line for the log
        raise OperatorError("bad_option", f"{name}: got {_shown(name, value)} from {origin}: must be printable text")
    plain: Any = value
    if is_text and name in ("allowed_uids", "share_memory_uids", "routes", "dial"):
        plain = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(plain, hint, strict=not is_text or origin.endswith(".toml"))
    except msgspec.ValidationError:
        meant = f"{name}: got {_shown(name, value)} from {origin}: must be {_allowed(inspect.type_info(hint))}"
        raise OperatorError("bad_option", meant) from None


def _allowed(kind: inspect.Type) -> str:
    """What a value of this kind may be, for people."""
    match kind:
        case inspect.Metadata(type=inner):
            return _allowed(inner)
        case inspect.UnionType(types=types):
            return _allowed(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return f"a list of {least or 0} to {most}, each {_allowed(item)}"
        case inspect.StrType(pattern=str()):
            return DEVICE_WORDS
        case inspect.StrType(min_length=least, max_length=most):
            return "text" if most is None else f"text of {least or 0} to {most} characters"
        case inspect.IntType() | inspect.FloatType():
            return ("a whole number" if isinstance(kind, inspect.IntType) else "a number") + _bounds(kind)
    return "true or false"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    said = [f"{word} {getattr(kind, name):.10g}" for name, word in words.items() if getattr(kind, name) is not None]
    return f", {', '.join(said)}" if said else ""


def _shown(name: str, value: Any) -> str:
    return "what is not shown, it may be a key itself," if name in FILES_OF_KEYS else repr(value)


def _check(config: AgentConfig) -> None:
    """What no single option can know. Addresses are checked where they are bound."""
    path = config.socket
    if not path.startswith("/"):
        raise OperatorError(
            "bad_option", f"socket: got {path!r}, must be an absolute path (only --socket may be relative)"
        )
    limit = SOCKET_PATH_BYTES - (len(DOOR_SUFFIX) if "pull" in config.routes else 0)  # the door's is longer
    if len(path.encode()) > limit:
        raise OperatorError("bad_option", f"socket: got {len(path.encode())} bytes, limit {limit}: {path}")
    if len(set(config.routes)) < len(config.routes):
        raise OperatorError("bad_option", f"routes: got {', '.join(config.routes)}, each must be named once")
    if config.slot_bytes is not None and config.slot_bytes % 4096:
        raise OperatorError("bad_option", f"slot_bytes: got {config.slot_bytes}, must be a multiple of 4096")
    if config.allow_wildcard and not config.advertise:
        raise OperatorError("bad_option", "advertise: got '', must be set with allow_wildcard: others need one address")
    if config.peers and not config.key:
        raise OperatorError("bad_option", "peers: is set, but no key of our own is")
    if config.key and config.allow_unauthenticated:
        raise OperatorError("bad_option", "allow_unauthenticated: got true, but a key is set: it would change nothing")
    if config.metrics:
        host, _, port = config.metrics.rpartition(":")
        if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
            raise OperatorError("bad_option", f"metrics: got {config.metrics!r}, must be host:port or empty")
