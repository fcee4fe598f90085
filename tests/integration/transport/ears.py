"""Listeners for tests of controls: one that reads events, a second process, a stranger who says anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
from kvbridge_proto.framing import encode
from kvbridge_proto.peer import Body, Cancel, Envelope

from kvbridge.transport.control import Control
from kvbridge.transport.link import Event, Link, Lost, Reached, Retried, Settings
from kvbridge.transport.trust import Trust
from testing.nursery import PipedChild

ROOT = Path(__file__).parents[3]
LOOPBACK = "tcp://127.0.0.1:0"
QUICK = Settings(connect_s=0.6, silence_s=0.8)
HASTY = Settings(connect_s=60.0, silence_s=0.8)  # with who is silent, once met
E = TypeVar("E", bound=Event)


class Ear:
    """Reads one control's events."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def next(self, within_s: float = 60.0) -> Event:
        async with asyncio.timeout(within_s):
            async for event in self._control.events():
                if not isinstance(event, Reached | Retried):
                    return event
        raise AssertionError("the control closed")

    async def hear(self, kind: type[E], within_s: float = 60.0) -> E:
        """The next event, which must be of this kind."""
        event = await self.next(within_s)
        assert isinstance(event, kind), event
        return event

    async def loses(self, code: str, link: Link | None = None) -> Lost:
        """The next event, which must be this loss."""
        lost = await self.hear(Lost)
        assert lost.code == code and link in (None, lost.link), lost
        return lost

    async def silence(self, for_s: float) -> None:
        with pytest.raises(TimeoutError):
            raise AssertionError(await self.next(for_s))


async def until(holds: Callable[[], object]) -> None:
    """A link has no event for what is waited for."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def two(
    *trusts: Trust, settings: Settings | None = None, of_sender: Settings | None = None
) -> AsyncIterator[tuple[Control, Ear, Control, Ear]]:
    """A receiver and a sender with these settings, and a trust each; the sender may have other settings."""
    receivers, senders = trusts or (None, None)
    async with (
        Control("receiver", settings=settings, trust=receivers) as receiver,
        Control("sender", LOOPBACK, settings=of_sender or settings, trust=senders) as sender,
    ):
        yield receiver, Ear(receiver), sender, Ear(sender)


@contextlib.contextmanager
def remote(incarnation: str, listen: str = LOOPBACK, dial: str = "") -> Iterator[tuple[PipedChild, str]]:
    """A `control_peer.py`; ended, stopped or not, on leaving."""
    with contextlib.closing(PipedChild("tests.integration.transport.control_peer", incarnation, listen, dial)) as child:
        yield child, child.stdout.readline().decode().strip()


@contextlib.contextmanager
def stranger(address: str) -> Iterator[Callable[..., None]]:
    """A socket that can say anything to a control."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(address)
        yield lambda *frames: dealer.send_multipart(frames)


def envelope(number: int = 0, body: Body | None = None, **other: Any) -> bytes:
    fields = {"version": 1, "sender": "stranger", "receiver": "", "number": number, "body": body or cancel("t")}
    return encode(Envelope(**{**fields, **other}))


def cancel(transfer: str) -> Cancel:
    return Cancel(transfer=transfer, code="c")
