"""Checks of an agent's options: keys, sockets, ports."""

from __future__ import annotations

import errno
import http.client
import os
import socket
import stat
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import zmq
from kvbridge_proto.status import Status

from ..agent.daemon import trust_of
from ..errors import OperatorError
from ..local_agents import ask, found
from ..options import AgentConfig
from ..transport.endpoint import check_metrics, place_of
from ..transport.lock import check_folder
from .finding import Finding, Subject, failed, ok, warning

LIBZMQ = (4, 3, 5)  # earlier ones can be crashed from outside, even with CURVE
ASKED_S = 2.0
BUILD = b"kvbridge_build_info"  # every agent serves it
SERVED_BYTES = 1 << 20


def keys(subject: Subject) -> Finding:
    """Key files, their owners and modes, and the addresses that may be dialled."""
    config = subject.config
    if zmq.zmq_version_info() < LIBZMQ or not zmq.has("curve"):
        return failed(f"libzmq {zmq.zmq_version()}, curve {zmq.has('curve')}", "install pyzmq 27 or newer")
    try:
        trust = trust_of(config)
        trust.check_listened(config.listen, allow_wildcard=config.allow_wildcard)
        trust.data_devices(config.listen, config.advertise, config.net_devices)
    except OperatorError as error:
        return failed(f"{error.code}: {error}", "do what the line says; keys are made by `kvbridge keygen`")
    if trust.keys is None and config.allow_unauthenticated:
        return warning(trust.description, "set `key` unless this is an isolated test network")
    return ok(f"{trust.description} (libzmq {zmq.zmq_version()})")


def sockets(subject: Subject) -> Finding:
    """The folder of the unix socket and, if an agent has made the socket, its mode."""
    config, path = subject.config, Path(subject.config.socket)
    try:
        check_folder(path)
    except OperatorError as error:
        return failed(str(error), "give the folder to the agent's user, mode 0750")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and config.socket == AgentConfig().socket:
            reason = f"{path.parent} is not there: no agent starts with the default socket"
            return warning(reason, "start agents by the systemd unit, which makes it, or name another --socket")
        return failed(f"{path.parent}: {error.strerror}", f"as the agent's user: mkdir -p -m 750 {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return failed(f"{path.parent}: may not be written to by uid {os.geteuid()}", "run as the agent's user")
    folder = f"{path.parent} has mode {stat.S_IMODE(path.parent.stat().st_mode):04o}"
    if not path.exists():
        return ok(f"{folder}; no agent has made {path.name} yet")
    made, wanted = path.stat(), 0o666 if config.allowed_uids else 0o600
    mode = stat.S_IMODE(made.st_mode)
    if not stat.S_ISSOCK(made.st_mode) or mode & ~wanted:
        return failed(f"{path} has mode {mode:04o}, should be {wanted:04o}", "start the agent again, which makes it")
    if dead := [each.name for each in sorted(path.parent.glob("*.sock")) if not _is_listening(each)]:
        reason = f"{folder}; nobody listens at {', '.join(dead)}: the agent there was killed"
        return warning(
            reason, f"start it again, or remove what it left: rm {' '.join(str(path.parent / n) for n in dead)}"
        )
    return ok(f"{folder}, {path.name} {mode:04o}")


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as tried:
        tried.settimeout(ASKED_S)
        try:
            tried.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOTSOCK)
    return True


def listen(subject: Subject) -> Finding:
    """Whether the address for other agents is free, or used by our agent."""
    if subject.status is not None:
        return ok(f"the agent {subject.status.agent.name} listens at {subject.status.agent.address}")
    host, _, port = subject.config.listen.removeprefix("tcp://").rpartition(":")
    return _free("listen", host.strip("[]"), port, lambda: _listens_at(port))


def metrics(subject: Subject) -> Finding:
    """The same for the address for Prometheus."""
    place = subject.config.metrics if subject.status is None else subject.status.metrics
    if not place:
        return warning("metrics: off", "set `metrics`, or nobody sees what the agent does")
    if subject.status is not None:
        return ok(f"the agent {subject.status.agent.name} serves at {place}")
    check_metrics(subject.config.metrics, allow_wildcard=subject.config.allow_wildcard)
    host, _, port = subject.config.metrics.rpartition(":")
    return _free("metrics", host.strip("[]"), port, lambda: _serves_metrics(host, port))


def _listens_at(port: str) -> str:
    """The agent that listens at `port`, if `kvbridge status` finds it and may ask it, or ""."""
    for status in _answers():
        if place_of(status.agent.address).endswith(f":{port}"):
            return f"the agent {status.agent.name}"
    return ""


def _answers() -> Iterator[Status]:
    with suppress(OperatorError):
        for path in found():
            with suppress(OperatorError):
                yield ask(path, ASKED_S)


def _serves_metrics(host: str, port: str) -> str:
    """Returns "an agent" if an agent's metrics are served there, otherwise ""."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=ASKED_S) as answer:
            return "an agent" if BUILD in answer.read(SERVED_BYTES) else ""
    except (OSError, http.client.HTTPException):
        return ""


def _free(option: str, host: str, port: str, holder: Callable[[], str]) -> Finding:
    """Whether the address can be bound. `holder` names the agent that has it, or returns ""."""
    where = f"{option}: {host}:{port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            "0.0.0.0" if host == "*" else host, 0 if port == "*" else int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (agent := holder()):
            remedy = f"to check that agent name its --socket; for another one take another port (set {option})"
            return warning(f"{where}: {agent} has it", remedy)
        return failed(
            f"{where}: {error.strerror}",
            f"take another port, or an address of this host; `ss -ltnp` says who has it (set {option})",
        )
    return ok(f"{where} is free")
