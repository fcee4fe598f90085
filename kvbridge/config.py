"""Reads the options from file, environment and flags, and says where each value came from.

A flag beats `KVBRIDGE_<NAME>` in the environment, which beats the file, which beats the default in options.py.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from kvbridge_proto.door import DOOR_SUFFIX

from .errors import OperatorError, did_you_mean
from .options import (
    ENVIRONMENT_PREFIX,
    AgentConfig,
    Supervision,
    allowed,
    defaults,
    flag_of,
    hint_of,
    off_flag_of,
    variable_of,
)

# Variables of failpoints.py, of adapters and of tests.
NO_OPTIONS = ("KVBRIDGE_FAILPOINTS", "KVBRIDGE_ENGINE_", "KVBRIDGE_TEST_", "KVBRIDGE_SITE", "KVBRIDGE_COMMIT")
# Variables that Kubernetes sets in pods for a service whose name begins with kvbridge.
SERVICE = re.compile(
    r"KVBRIDGE_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
SOCKET_PATH_BYTES = 107  # what the kernel takes for a unix socket
FILES_OF_KEYS = ("key", "peers")  # one may be set to the key itself by mistake, which the log must not show
LIST_OPTIONS = ("allowed_uids", "share_memory_uids", "routes", "dial", "meet")
OF_LIBRARIES = ("UCX_", "NIXL_", "PYTORCH_", "CUDA_")  # variables that change what our libraries do
Origin = Literal["default", "file", "environment", "flag"]


class Given(NamedTuple):
    """One value as it was given, and its place: the file's path, the variable or the flag; "" for a default."""

    value: Any
    origin: Origin
    place: str


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA names them; empty if all."""
    return list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))


def load(
    path: str | None = None,
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AgentConfig:
    """The checked options. Raises OperatorError naming the option, the value and its origin."""
    return resolve(path, flags, environment)[0]


def resolve(
    path: str | None = None,
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[AgentConfig, dict[str, Given]]:
    """The checked options, and where each value came from. Raises as `load` does."""
    environment = os.environ if environment is None else environment
    _check_variables(environment)
    given: dict[str, Given] = {}
    if path is not None:
        given |= {name: Given(value, "file", path) for name, value in _file(path).items()}
    for name, default in defaults().items():
        variable = variable_of(name)
        if variable in environment:
            given[name] = Given(environment[variable], "environment", variable)
        flag = (flags or {}).get(name)
        if flag is not None:
            value = str(Path.cwd() / flag) if name == "socket" and flag else flag
            is_off = isinstance(default, bool) and flag.lower() == "false"
            given[name] = Given(value, "flag", off_flag_of(name) if is_off else flag_of(name))
    config = AgentConfig(**{name: _typed(name, each) for name, each in given.items()})
    _check(config)
    return config, {name: given.get(name, Given(default, "default", "")) for name, default in defaults().items()}


def socket_folders() -> list[Path]:
    """The folders where agents of this host usually listen: the default's, and that of KVBRIDGE_SOCKET."""
    named = [AgentConfig().socket, os.environ.get(ENVIRONMENT_PREFIX + "SOCKET", "")]
    return list(dict.fromkeys(Path(path).parent for path in named if path.startswith("/")))


def of_libraries() -> dict[str, str]:
    """The variables that the libraries beneath us read, for `kvbridge doctor`. They are no options of ours."""
    return {name: value for name, value in os.environ.items() if name.startswith(OF_LIBRARIES)}


def supervision(environment: Mapping[str, str] | None = None) -> Supervision | None:
    """What systemd told this process; None if it did not start us or does not listen."""
    environment = os.environ if environment is None else environment
    if not (address := environment.get("NOTIFY_SOCKET", "")):
        return None
    is_watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return Supervision(address, int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if is_watched else 0.0)


def _check_variables(environment: Mapping[str, str]) -> None:
    """Refuse variables that only look like options: they would silently change nothing."""
    known = [variable_of(name) for name in AgentConfig.__struct_fields__]
    unknown = []
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in known or variable.startswith(NO_OPTIONS):
            continue
        if SERVICE.fullmatch(variable) or (variable.endswith("_PORT") and SERVICE_URL.match(value)):
            continue
        unknown.append(
            f"{variable}: no such option in the environment; {did_you_mean(variable, known, ENVIRONMENT_PREFIX)}"
        )
    if unknown:
        raise OperatorError("bad_option", *unknown)


def _file(path: str) -> dict[str, Any]:
    try:
        given = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:  # tomllib's own, too: on 5000 digits or 500 brackets
        raise OperatorError("bad_config_file", f"config: cannot read {path}: {error}") from None
    known = AgentConfig.__struct_fields__
    unknown = [f"{name}: no such option in {path}; {did_you_mean(name, known)}" for name in given if name not in known]
    if unknown:
        raise OperatorError("bad_option", *unknown)
    return given


def _typed(name: str, given: Given) -> Any:
    """The value as the option's type. Text from a flag or the environment is converted leniently."""
    value, origin, place = given
    is_text = isinstance(value, str)
    if is_text and not value.isprintable():  # no NUL for the kernel, no undecodable bytes, no newline for the log
        raise OperatorError("bad_option", f"{name}: got {_shown(name, value)} from {place}: must be printable text")
    plain: Any = value
    if is_text and name in LIST_OPTIONS:
        plain = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(plain, hint_of(name), strict=origin == "file")
    except msgspec.ValidationError:
        wrong = f"{name}: got {_shown(name, value)} from {place}: must be {allowed(name)}"
        raise OperatorError("bad_option", wrong) from None


def _shown(name: str, value: Any) -> str:
    return "what is not shown, it may be a key itself," if name in FILES_OF_KEYS else repr(value)


def _check(config: AgentConfig) -> None:
    """Check what concerns several options or their meaning. Addresses are checked where they are bound."""
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
