"""Checks of what an agent is set to: keys, sockets, ports."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import zmq

from ..agent.daemon import trust_of
from ..errors import OperatorError
from ..options import AgentConfig
from ..transport.endpoint import check_metrics
from ..transport.lock import check_folder
from .finding import Finding, Subject, failed, ok, warning

LIBZMQ = (4, 3, 5)  # those before can be made to fall over from outside, with CURVE too


def keys(subject: Subject) -> Finding:
    """Key files, their owners and modes, and where may be dialled."""
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
    """The folder of the unix socket and, where an agent has made it, the socket's mode."""
    config, path = subject.config, Path(subject.config.socket)
    try:
        check_folder(path)
    except OperatorError as error:
        return failed(str(error), "give the folder to the agent's user, mode 0750")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and config.socket == AgentConfig().socket:
            reason = f"{path.parent} is not there: no agent starts with the default socket"
            return warning(reason, "start agents by the systemd unit, which makes it, or name another --socket")
        return failed(f"{path.parent}: {error.strerror}", "make it, owned by the agent's user, mode 0750")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return failed(f"{path.parent}: may not be written to by uid {os.geteuid()}", "run as the agent's user")
    folder = f"{path.parent} has mode {stat.S_IMODE(path.parent.stat().st_mode):04o}"
    if not path.exists():
        return ok(f"{folder}; no agent has made {path.name} yet")
    found, wanted = path.stat(), 0o666 if config.allowed_uids else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISSOCK(found.st_mode) or mode & ~wanted:
        return failed(f"{path} has mode {mode:04o}, should be {wanted:04o}", "start the agent again, which makes it")
    return ok(f"{folder}, {path.name} {mode:04o}")


def listen(subject: Subject) -> Finding:
    """Whether the address for other agents is free, or our agent's."""
    if subject.status is not None:
        return ok(f"the agent {subject.status.agent.name} listens at {subject.status.agent.address}")
    host, _, port = subject.config.listen.removeprefix("tcp://").rpartition(":")
    return _bound("listen", host.strip("[]"), port)


def metrics(subject: Subject) -> Finding:
    """The same of the address for Prometheus."""
    if not subject.config.metrics:
        return warning("metrics: off", "set `metrics`, or nobody sees what the agent does")
    if subject.status is not None:
        return ok(f"the agent {subject.status.agent.name} runs; meant is {subject.config.metrics}")
    check_metrics(subject.config.metrics, allow_wildcard=subject.config.allow_wildcard)
    host, _, port = subject.config.metrics.rpartition(":")
    return _bound("metrics", host.strip("[]"), port)


def _bound(option: str, host: str, port: str) -> Finding:
    """Bind it and let it go."""
    where = f"{option}: {host}:{port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            "0.0.0.0" if host == "*" else host, 0 if port == "*" else int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
    except OSError as error:
        return failed(
            f"{where}: {error.strerror}",
            f"take another port, or an address of this host; `ss -ltnp` says who has it (set {option})",
        )
    return ok(f"{where} is free")
