"""Whom this agent lets in and whom it may dial. Requests name addresses, so dialling must be restricted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import OperatorError, PeerError
from .endpoint import (
    beyond_loopback,
    check_dialled,
    check_listened,
    check_place,
    is_local_place,
    is_loopback,
    is_place,
    place_of,
)
from .keys import Keys

DEVICE_FOLDERS = (Path("/sys/class/net"), Path("/sys/class/infiniband"))
ALL_DEVICES = "all"  # UCX's word


@dataclass(frozen=True, slots=True)
class Trust:
    """`places` say what may be dialled, `keys` whom we speak to, whichever side dials.

    `places` are HOST:PORT patterns. Only what they match is dialled; without any, only loopback. Without keys (None:
    nobody proves who they are) we dial and serve loopback only, unless `allow_unauthenticated`. Raises OperatorError
    for a malformed pattern.
    """

    keys: Keys | None = None
    places: Sequence[str] = ()
    allow_unauthenticated: bool = False

    def __post_init__(self) -> None:
        for place in self.places:
            check_place(place)

    @property
    def description(self) -> str:
        """What protects the links to other agents, for people to read."""
        dialled = f"dials {len(self.places)} patterns" if self.places else "dials loopback only"
        if self.keys is not None:
            return f"curve, own key {self.keys.public}, {len(self.keys.names)} keys allowed, {dialled}"
        if self.allow_unauthenticated:
            return f"NONE: anybody may connect (allow_unauthenticated), {dialled}"
        return "loopback only"

    @property
    def _is_guarded(self) -> bool:
        """Whether other hosts may be dialled and served; else only loopback."""
        return self.keys is not None or self.allow_unauthenticated

    def check_places(self) -> None:
        """Raises OperatorError if a place is beyond loopback while nothing guards us: it would not be dialled."""
        for place in self.places:
            if not self._is_guarded and not is_local_place(place):
                raise OperatorError(
                    "bad_option",
                    f"dial: {place} reaches beyond loopback, and no key is set, so it would not be dialled; "
                    "make a key with `kvbridge keygen` and set `key`, name loopback, or say allow_unauthenticated",
                )

    def check_listened(self, address: str, *, allow_wildcard: bool) -> None:
        """Raises OperatorError unless we may listen there."""
        check_listened(address, allow_wildcard=allow_wildcard, is_guarded=self._is_guarded)

    def data_devices(self, listen: str, advertise: str, named: str) -> str:
        """The network devices for the data, as UCX names them: `named`, else loopback.

        UCX trusts everyone who reaches its ports, with a key or without. So the operator must name the devices if
        agents of other hosts are served or dialled. Raises OperatorError `no_net_devices` if they are not named,
        `bad_option` if this host does not have them.
        """
        _check_devices(named)
        if named or not self._is_guarded:
            return named or "lo"
        if where := beyond_loopback(listen, advertise, self.places):
            raise OperatorError(
                "no_net_devices",
                f"net_devices: got '', but other hosts are served or dialled ({where[0]}); name the network devices "
                f"of the data, or all: UCX asks nobody there for a key; this host has {', '.join(_devices_here())}",
            )
        return "lo"

    def check_dialled(self, address: str) -> tuple[str, str]:
        """Endpoint and server key ("" for none) of an address that may be dialled.

        Raises PeerError `bad_address` if it is malformed, `peer_not_allowed` if the configuration does not allow it.
        """
        endpoint, _, key = address.partition("#")
        check_dialled(endpoint)
        is_local = is_loopback(endpoint)
        if not self._is_guarded and not is_local:
            reason = f"key: none is set, so only loopback may be dialled, not {endpoint}; see `kvbridge keygen`"
            raise PeerError("peer_not_allowed", reason)
        if not (any(is_place(endpoint, place) for place in self.places) if self.places else is_local):
            where = "on loopback, dial is set" if is_local else "beyond loopback"
            reason = f'dial: {endpoint} is {where} and no pattern of dial names it; add "{place_of(endpoint)}"'
            raise PeerError("peer_not_allowed", reason)
        return endpoint, self._server_key(endpoint, key, self.keys) if self.keys is not None else ""

    def name_of(self, key: str) -> str | None:
        """The name of the key's owner; None if we must not speak to it. Without keys the name is empty."""
        return self.keys.names.get(key) if self.keys is not None else ""

    def _server_key(self, endpoint: str, named: str, keys: Keys) -> str:
        key = named or keys.one
        if not key:
            reason = f"peers: {len(keys.names)} keys, and the address {endpoint} does not say which: append #PUBLICKEY"
            raise PeerError("peer_not_allowed", reason)
        if key not in keys.names:
            raise PeerError("peer_not_allowed", f"peers: {endpoint} is said to have key {key[:40]}, which is not there")
        return key


def _devices_here() -> list[str]:
    """Network interfaces and InfiniBand devices of this host; none if the kernel does not show them."""
    return sorted({path.name for folder in DEVICE_FOLDERS if folder.is_dir() for path in folder.iterdir()})


def _check_devices(named: str) -> None:
    """UCX would start without a device that it does not find, and fail at the first transfer."""
    here = _devices_here()
    unknown = [
        each for each in named.split(",") if each not in ("", ALL_DEVICES) and each.partition(":")[0] not in here
    ]
    if unknown and here:
        raise OperatorError("bad_option", f"net_devices: got {', '.join(unknown)}, this host has {', '.join(here)}")
