"""An agent's control in a process of its own.

`python -m tests.integration.transport.control_peer INCARNATION LISTEN [DIAL]` prints its address, then answers each
Cancel with a Drained of the same transfer. With DIAL it sends a Cancel there.
"""

from __future__ import annotations

import asyncio
import sys

from kvbridge_proto.peer import Cancel, Drained

from kvbridge.transport.control import Control
from kvbridge.transport.link import Arrived


async def main(incarnation: str, listen: str, dial: str = "") -> None:
    async with Control(incarnation, listen) as control:
        print(control.address, flush=True)
        if dial:
            control.dial(dial).send(Cancel(transfer=incarnation, code="hello"))
        async for event in control.events():
            if isinstance(event, Arrived) and isinstance(event.envelope.body, Cancel):
                event.link.send(Drained(transfer=event.envelope.body.transfer))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
