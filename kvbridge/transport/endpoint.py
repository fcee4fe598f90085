"""Which ZeroMQ addresses an agent may listen on and dial. Resolves names only when it listens."""

from __future__ import annotations

import ipaddress
import re
import socket

from ..errors import OperatorError, PeerError

# No `;` (ZeroMQ's source address), no `*`, no spaces: what we dial comes from requests.
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]+|\*):(?P<port>\d{1,5}|\*)")


def check_dialled(address: str) -> None:
    """Raises PeerError `bad_address` unless it is `tcp://host:port` of one host."""
    found = _TCP.fullmatch(address)
    if not found or not found["port"].isdigit() or not 0 < int(found["port"]) < 65536:
        raise PeerError("bad_address", f"address: got {address!r}, need tcp://host:port")
    if _is_wildcard(found["host"]):
        raise PeerError("bad_address", f"address: {address!r} names every host, not one")


def check_listened(address: str, *, allow_wildcard: bool) -> None:
    """Raises OperatorError `bad_address`, or `wildcard_listen` unless every interface is really meant. Port 0: any."""
    found = _TCP.fullmatch(address)
    if not found or (found["port"].isdigit() and int(found["port"]) > 65535):
        raise OperatorError("bad_address", f"listen: got {address!r}, need tcp://host:port")
    if allow_wildcard or not (_is_wildcard(found["host"]) or _resolves_to_wildcard(found["host"])):
        return
    raise OperatorError(
        "wildcard_listen",
        f"listen: {address!r} opens every interface to whoever reaches it; name one address, or allow the wildcard",
    )


def is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def _is_wildcard(host: str) -> bool:
    try:
        return host == "*" or ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_unspecified
    except ValueError:
        return False


def _resolves_to_wildcard(host: str) -> bool:
    """`0` and names that mean 0.0.0.0 are wildcards as well; names of interfaces do not resolve and are fine."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_wildcard(str(place[0])) for *_, place in found)
