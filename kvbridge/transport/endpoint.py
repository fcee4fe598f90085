"""Which ZeroMQ addresses an agent may listen on and dial. Resolves names only when it listens.

An address is `tcp://host:port`, or `tcp://host:port#KEY` if the agent there has a key, which says whom to expect. The
key is public; our own list decides whether we trust it.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..errors import OperatorError, PeerError

# No `;` (ZeroMQ's source address), no `*`, no spaces: what we dial comes from requests.
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]+|\*):(?P<port>\d{1,5}|\*)", re.ASCII)
_PLACE = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(/\d{1,3})?\]|[0-9.]+/\d{1,2}|[A-Za-z0-9._*-]+):(?P<port>\d{1,5}|\*)", re.ASCII
)


@functools.lru_cache(maxsize=1024)  # each want and each claim names one
def canonical(address: str) -> str:
    """The one spelling of an address, so that it is never taken for two. Malformed ones are returned unchanged.

    Names are not resolved: two names of one host are two addresses.
    """
    endpoint, _, key = address.partition("#")
    found = _TCP.fullmatch(endpoint)
    if not found or not found["port"].isdigit():
        return address
    return with_key(f"tcp://{_canonical_host(found['host'])}:{int(found['port'])}", key)


def check_dialled(address: str) -> None:
    """Raises PeerError `bad_address` unless it is `tcp://host:port` of one host."""
    found = _TCP.fullmatch(address)
    if not found or not found["port"].isdigit() or not 0 < int(found["port"]) < 65536:
        raise PeerError("bad_address", f"address: got {address!r}, need tcp://host:port")
    if _is_wildcard(found["host"]):
        raise PeerError("bad_address", f"address: {address!r} names every host, not one")


def check_listened(address: str, *, allow_wildcard: bool, is_guarded: bool = True) -> None:
    """Raises OperatorError unless we may listen there. Port 0 means any.

    `bad_address` is malformed, `wildcard_listen` every interface without `allow_wildcard`, `unauthenticated_listen` an
    address that other hosts can reach while `is_guarded` is false.
    """
    found = _TCP.fullmatch(address)
    if not found or (found["port"].isdigit() and int(found["port"]) > 65535):
        raise OperatorError("bad_address", f"listen: got {address!r}, need tcp://host:port")
    if not allow_wildcard and _opens_everything(found["host"]):
        raise OperatorError(
            "wildcard_listen",
            f"listen: {address!r} opens every interface to whoever reaches it; name one address, or allow_wildcard",
        )
    if not is_guarded and not _resolves_to_loopback(found["host"]):
        raise OperatorError(
            "unauthenticated_listen",
            f"listen: {address!r} is reached from other hosts, and no key is set: whoever connects could fetch KV; "
            "make a key with `kvbridge keygen` and set `key`, listen on loopback, or say allow_unauthenticated",
        )


def check_metrics(address: str, *, allow_wildcard: bool) -> None:
    """Raises OperatorError `wildcard_metrics` for host:port of every interface without `allow_wildcard`."""
    host = address.rpartition(":")[0]
    if not allow_wildcard and _opens_everything(host):
        raise OperatorError(
            "wildcard_metrics",
            f"metrics: {address!r} opens every interface to whoever reaches it; name one address, or allow_wildcard",
        )


def check_place(place: str) -> None:
    """Raises OperatorError `bad_option` unless it is HOST:PORT, HOST a name (with *), an IP or a CIDR, PORT or *."""
    found = _PLACE.fullmatch(place)
    try:
        if found is None or (found["port"].isdigit() and int(found["port"]) > 65535):
            raise ValueError("need HOST:PORT, with * for any")
        if "/" in found["host"]:
            ipaddress.ip_network(found["host"].strip("[]"))
    except ValueError as error:
        raise OperatorError("bad_option", f"dial: got {place!r}: {error}") from None


def is_place(endpoint: str, place: str) -> bool:
    """Whether `tcp://host:port` matches the pattern `host:port`.

    A network matches addresses only: a name could resolve to another one after we looked.
    """
    there, meant = _TCP.fullmatch(endpoint), _PLACE.fullmatch(place)
    assert there is not None and meant is not None, (endpoint, place)
    if meant["port"] not in ("*", there["port"].lstrip("0")):
        return False
    host, pattern = there["host"].strip("[]").lower(), meant["host"].strip("[]").lower()
    address = _address(host)
    if address is None:
        return fnmatchcase(host, pattern)
    try:
        return address in ipaddress.ip_network(pattern)
    except ValueError:
        return pattern == "*"


def is_local_place(place: str) -> bool:
    """Whether the pattern `host:port` matches places on this host only."""
    found = _PLACE.fullmatch(place)
    assert found is not None, place
    host = found["host"].strip("[]").lower()
    try:
        return ipaddress.ip_network(host).is_loopback
    except ValueError:
        return host == "localhost"


def beyond_loopback(listen: str, advertise: str, places: Sequence[str]) -> list[str]:
    """Which of these options let agents of other hosts be served or dialled, with their values. `places` are `dial`."""
    served = {"listen": listen, "advertise": advertise or listen}
    where = [f"{name}: {address}" for name, address in served.items() if not is_loopback(address)]
    return where + [f"dial: {place}" for place in places if not is_local_place(place)]


def place_of(endpoint: str) -> str:
    """The pattern that matches only `tcp://host:port`, for an operator to add so that it may be dialled."""
    return re.sub(r"%\w+", "", canonical(endpoint).removeprefix("tcp://"))


def with_key(address: str, key: str) -> str:
    """The address as it is told to others, with the key if there is one."""
    return f"{address}#{key}" if key and "#" not in address else address


def is_loopback(endpoint: str) -> bool:
    """Whether `tcp://host:port` can only be on this host. Does not resolve: a name could mean anything."""
    found = _TCP.fullmatch(endpoint)
    if not found:
        return False
    address = _address(found["host"].strip("[]"))
    return found["host"].lower() == "localhost" if address is None else address.is_loopback


def name_in(endpoint: str) -> str:
    """The host of `tcp://host:port` if it is a name, "" if it is an address."""
    found = _TCP.fullmatch(endpoint)
    return "" if found is None or _address(found["host"].strip("[]")) is not None else found["host"]


def numeric(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port` with an address for its host."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found  # ::ffff:10.0.0.1 is 10.0.0.1


def _canonical_host(host: str) -> str:
    address = _address(host.strip("[]"))
    if address is None:
        return host.lower()
    _, percent, zone = host.strip("[]").partition("%")
    return f"[{address}{percent}{zone}]" if address.version == 6 else str(address)


def _is_wildcard(host: str) -> bool:
    address = _address(host.strip("[]"))
    return host == "*" or (address is not None and address.is_unspecified)


def _opens_everything(host: str) -> bool:
    """`0` and names that resolve to 0.0.0.0 are wildcards too. Interface names do not resolve and are fine."""
    return _is_wildcard(host) or any(_is_wildcard(place) for place in _resolved(host))


def _resolves_to_loopback(host: str) -> bool:
    places = [_address(place) for place in _resolved(host)]
    return bool(places) and all(place is not None and place.is_loopback for place in places)


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(place[0]) for *_, place in found]
