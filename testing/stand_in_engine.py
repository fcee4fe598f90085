"""Stands in for an engine in a pod: attaches where the engine's own command line and environment say.

Over HTTP: GET /health, once it is attached; POST /offer, which answers its agent's address; POST /want with the address
of an agent to fetch from, which answers "Done", or what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import sys
from http.server import HTTPServer
from pathlib import Path

from kvbridge_proto.engine import Attached

from kvbridge.device.handles import export_all
from kvbridge.unix_socket import close_fds
from testing.agents import AgentProcess, OracleEngine
from testing.nursery import Child
from testing.oracle import Shape, build, fill, mismatch
from testing.serving import Answers

TABLE, TOKENS = [3, 4, 5, 6, 7, 8, 9, 10], 128


def socket_of(arguments: str) -> Path:
    """Where vLLM's connector, or SGLang's backend, would look for the agent of rank 0."""
    found = re.search(r'"kvbridge_socket": "(.+?)"', arguments)
    return Path((found[1] if found else os.environ["KVBRIDGE_ENGINE_SOCKET"]).replace("{rank}", "0"))


def uids_of(arguments: str) -> list[int]:
    """Whose agents they would give their memory to."""
    found = re.search(r'"kvbridge_agent_uids": \[(.+?)\]', arguments)
    return [int(each) for each in (found[1] if found else os.environ["KVBRIDGE_ENGINE_AGENT_UIDS"]).split(",")]


class StandIn:
    def __init__(self, arguments: str) -> None:
        block_tokens = re.search(r"--block-size=(\d+)", arguments)
        shape = Shape("nhd", block_tokens=int(block_tokens[1]) if block_tokens else 16)
        socket = socket_of(arguments)
        self.engine = OracleEngine(AgentProcess(Child(os.getpid()), socket, socket), build(shape), uids_of(arguments))
        _, fds = export_all(region.untyped_storage() for region in self.engine.regions)
        for fd in fds:
            os.fchmod(fd, 0o666)  # the GPU memory that this stands for is no user's
        close_fds(fds)
        assert isinstance(answer := self.engine.attach(), Attached), answer
        self._table = TABLE[: TOKENS // shape.block_tokens]

    def offer(self) -> str:
        fill(self.engine.held, self._table, range(TOKENS))
        self.engine.offer("r", self._table, TOKENS)
        return self.engine.agent.address

    def want(self, sender: str) -> str:
        before = self.engine.held.copy()
        self.engine.want("r", sender, self._table, range(TOKENS))
        self.engine.done("r")
        return mismatch(self.engine.held, before, self._table, range(TOKENS)) or "Done"


def main() -> None:
    engine = StandIn(json.dumps(sys.argv[1:]).replace('\\"', '"'))

    class Asked(Answers):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/health" else 404, "")

        def do_POST(self) -> None:
            body = self.body.decode()
            try:
                self.answer(200, engine.offer() if self.path == "/offer" else engine.want(body))
            except AssertionError as error:
                self.answer(500, str(error))

    HTTPServer(("0.0.0.0", 8000), Asked).serve_forever()


if __name__ == "__main__":
    main()
