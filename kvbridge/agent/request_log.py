"""Log lines about requests: each has the ids of the request and of its transfers, as far as they are known."""

from __future__ import annotations

import logging

from ..oneline import plain
from .request_names import RequestNames


class RequestLog:
    """Adds `request=` and `transfer=` to each line. The caller names an offer or want by its number, or a transfer.

    A line about a request with several transfers names them all, with commas. What is not known is left out.
    """

    def __init__(self, log: logging.Logger, names: RequestNames) -> None:
        self._log = log
        self._names = names

    def debug(self, event: str, text: str = "", *args: object, number: int = 0, transfer: str = "") -> None:
        self._say(logging.DEBUG, event, text, args, number, transfer)

    def warning(self, event: str, text: str = "", *args: object, number: int = 0, transfer: str = "") -> None:
        self._say(logging.WARNING, event, text, args, number, transfer)

    def _say(self, level: int, event: str, text: str, args: tuple[object, ...], number: int, transfer: str) -> None:
        if not self._log.isEnabledFor(level):
            return
        request = self._names.request_of(number, transfer)
        transfer = transfer or ",".join(self._names.transfers_of(number))
        known = {name: value for name, value in (("request", request), ("transfer", transfer)) if value}
        said = " ".join((*(f"{name}=%s" for name in known), text)).rstrip()
        self._log.log(level, f"{event}: {said}", *map(plain, known.values()), *args)
