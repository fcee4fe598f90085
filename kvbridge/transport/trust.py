"""Whom this agent lets in and whom it may dial: requests name addresses, and must not choose them freely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OperatorError, PeerError
from .endpoint import check_dialled, check_listened, check_place, is_local_place, is_loopback, is_place, place_of
from .keys import Keys


@dataclass(frozen=True, slots=True)
class Trust:
    """`places` say where may be dialled, `keys` who is spoken to there and here.

    `places` are HOST:PORT patterns, and nothing but what they name is dialled; without any it is loopback. Without keys
    (None: nobody proves who they are) it is loopback as well, both ways, unless `allow_unauthenticated`. Raises
    OperatorError if a pattern is not one.
    """

    keys: Keys | None = None
    places: Sequence[str] = ()
    allow_unauthenticated: bool = False

    def __post_init__(self) -> None:
        for place in self.places:
            check_place(place)

    @property
    def description(self) -> str:
        """For people: what protects the links to other agents."""
        dialled = f"dials {len(self.places)} patterns" if self.places else "dials loopback only"
        if self.keys is not None:
            return f"curve, own key {self.keys.public}, {len(self.keys.names)} keys allowed, {dialled}"
        if self.allow_unauthenticated:
            return f"NONE: anybody may connect (allow_unauthenticated), {dialled}"
        return "loopback only"

    @property
    def _is_guarded(self) -> bool:
        """Whether other hosts may be dealt with; else it is loopback, both ways."""
        return self.keys is not None or self.allow_unauthenticated

    def check_places(self) -> None:
        """Raises OperatorError unless the places can be dialled as they are named: beyond loopback needs a guard."""
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
        """The network devices for the data, as UCX names them: the `named`, else loopback.

        UCX believes whoever reaches its ports, key or none. So where agents of other hosts are served or dialled, those
        who run this one must say by which networks. Raises OperatorError `no_net_devices` if they have not.
        """
        if named or not self._is_guarded:
            return named or "lo"
        served = {"listen": listen, "advertise": advertise or listen}
        where = [f"{name}: {address}" for name, address in served.items() if not is_loopback(address)]
        where += [f"dial: {place}" for place in self.places if not is_local_place(place)]
        if where:
            raise OperatorError(
                "no_net_devices",
                f"net_devices: got '', but other hosts are meant ({where[0]}); name the network devices of the data, "
                "as eth1 or mlx5_0:1, or all: UCX asks nobody there for a key",
            )
        return "lo"

    def check_dialled(self, address: str) -> tuple[str, str]:
        """Endpoint and server key ("": none) of an address that may be dialled. Raises PeerError.

        `bad_address` is not one at all; `peer_not_allowed` is one that the configuration does not let us dial.
        """
        endpoint, _, said = address.partition("#")
        check_dialled(endpoint)
        is_local = is_loopback(endpoint)
        if not self._is_guarded and not is_local:
            reason = f"key: none is set, so only loopback may be dialled, not {endpoint}; see `kvbridge keygen`"
            raise PeerError("peer_not_allowed", reason)
        if not (any(is_place(endpoint, place) for place in self.places) if self.places else is_local):
            where = "on loopback, dial is set" if is_local else "beyond loopback"
            reason = f'dial: {endpoint} is {where} and no pattern of dial names it; add "{place_of(endpoint)}"'
            raise PeerError("peer_not_allowed", reason)
        return endpoint, self._server_key(endpoint, said, self.keys) if self.keys is not None else ""

    def name_of(self, key: str) -> str | None:
        """Whose key this is; None if its holder is not to be spoken to. Without keys nobody has one."""
        return self.keys.names.get(key) if self.keys is not None else ""

    def _server_key(self, endpoint: str, said: str, keys: Keys) -> str:
        key = said or keys.one
        if not key:
            reason = f"peers: {len(keys.names)} keys, and the address {endpoint} does not say which: append #PUBLICKEY"
            raise PeerError("peer_not_allowed", reason)
        if key not in keys.names:
            raise PeerError("peer_not_allowed", f"peers: {endpoint} is said to have key {key[:40]}, which is not there")
        return key
