"""Run where the only name server never answers: what one agent dials by name delays none of its other links.

Prints how each try ended.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from kvbridge_proto.peer import Goodbye

from kvbridge.transport.control import Control
from kvbridge.transport.link import Arrived, Link, Lost, Settings
from kvbridge.transport.trust import Trust

PLACES = Trust(places=("*:*",), allow_unauthenticated=True)


async def main() -> None:
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 53))
    settings = Settings(connect_s=60.0)
    async with (
        Control("served", "tcp://127.0.0.1:0") as served,
        Control("dialler", trust=PLACES, settings=settings) as dialler,
    ):
        port = served.address.rpartition(":")[2]
        heard: dict[str, asyncio.Future[str]] = {}

        async def listen(control: Control) -> None:
            async for event in control.events():
                if isinstance(event, Arrived) and isinstance(event.envelope.body, Goodbye):
                    heard[event.envelope.body.reason].set_result("arrived")
                elif isinstance(event, Lost) and event.link.address in heard:
                    heard[event.link.address].set_result(event.code)

        async def ended(what: str, link: Link | None) -> None:
            """Print how this ends, in the time that a slow machine may take: the resolver waits four times as long."""
            heard[what] = asyncio.get_running_loop().create_future()
            if link is not None:
                link.send(Goodbye(reason=what))
            print(what.partition(":")[0], await asyncio.wait_for(heard[what], 30.0), flush=True)

        listening = [asyncio.create_task(listen(each)) for each in (served, dialler)]
        by_address = dialler.dial(served.address)
        await ended("first", by_address)
        for index in range(3):
            dialler.dial(f"tcp://slow{index}.example:7000")
        await asyncio.sleep(1.0)  # ZeroMQ's thread would ask by now
        await ended("another link", by_address)
        await ended("another name", dialler.dial(f"tcp://localhost:{port}"))
        print(sum(not link.is_up for link in dialler.links), "wait for their name", flush=True)
        for each in listening:
            each.cancel()


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
