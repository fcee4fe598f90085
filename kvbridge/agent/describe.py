"""Describes a session for the log and for `kvbridge status`."""

from __future__ import annotations

import logging

from ..exchange.session import Session
from ..geometry.compat import Convertible
from ..routes.rate import is_slow

log = logging.getLogger("kvbridge.peers")


def described(session: Session) -> str:
    return f"{route_of(session)}, {verdict_of(session)}"


def route_of(session: Session) -> str:
    """The route, its measured rate, and why better routes were rejected."""
    route, why, rate = session.routed.route, session.routed.why, session.routed.rate
    said = f" {rate.bytes_per_s / 1e9:.3g} GB/s in {rate.size_bytes >> 10} KiB" if rate else ""
    return f"{route}{said}" + (f" ({why})" if why else "")


def warn_of_route(name: str, session: Session) -> None:
    rate = session.routed.rate
    if rate is not None and is_slow(rate):
        log.warning("slow route: peer=%s %s", name, route_of(session))


def verdict_of(session: Session) -> str:
    found = session.verdict
    return "converting " + "; ".join(found.changes) if isinstance(found, Convertible) else "same on both sides"
