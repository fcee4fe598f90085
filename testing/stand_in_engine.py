"""Stands in for an engine in a pod: attaches where the engine's own command line and environment say.

It has as many ranks as vLLM would have, with `--nnodes` in several pods, of which the first leads. Over HTTP: GET
/health, once all ranks are attached; POST /offer, which answers an agent's address; POST /want with the address of an
agent to fetch from, which answers what is wrong, if anything. The pods of one engine ask each other so, too. POST
/v1/completions is one of these two, as the request's `kv_transfer_params` say; whatever the prompt, one of 128 tokens.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from http.server import HTTPServer
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from kvbridge_proto.engine import Attached

from kvbridge.device.handles import export_all
from kvbridge.loopback.messages import directory_of
from kvbridge.unix_socket import close_fds
from testing.agents import ANSWER_S, AgentProcess, OracleEngine
from testing.nursery import Child
from testing.oracle import Held, Shape, build_all, fill, mismatch
from testing.serving import Answers

TABLE, TOKENS = [3, 4, 5, 6, 7, 8, 9, 10], 128
PORT = 8000


def socket_of(arguments: str, rank: int) -> Path:
    """Where vLLM's connector, or SGLang's backend, would look for the agent of this rank."""
    found = re.search(r'"kvbridge_socket": "(.+?)"', arguments)
    return Path((found[1] if found else os.environ["KVBRIDGE_ENGINE_SOCKET"]).replace("{rank}", str(rank)))


def uids_of(arguments: str) -> list[int]:
    """Whose agents they would give their memory to."""
    found = re.search(r'"kvbridge_agent_uids": \[(.+?)\]', arguments)
    return [int(each) for each in (found[1] if found else os.environ["KVBRIDGE_ENGINE_AGENT_UIDS"]).split(",")]


def number_of(arguments: str, option: str, default: int) -> int:
    found = re.search(rf"--{option}=(\d+)", arguments)
    return int(found[1]) if found else default


def asked(address: str, what: str, said: str) -> str:
    """The answer of the pod at this address, which may be starting still."""
    end = time.monotonic() + ANSWER_S
    while True:
        try:
            with urlopen(f"http://{address}:{PORT}/{what}", said.encode(), ANSWER_S) as answer:
                return str(answer.read().decode())
        except URLError as error:
            if isinstance(error, HTTPError) or time.monotonic() > end:
                raise
            time.sleep(0.2)


class Rank:
    def __init__(self, held: Held, socket: Path, uids: list[int]) -> None:
        self.engine = OracleEngine(AgentProcess(Child(os.getpid()), socket, socket), held, uids)
        _, fds = export_all(region.untyped_storage() for region in self.engine.regions)
        for fd in fds:
            os.fchmod(fd, 0o666)  # the GPU memory that this stands for is no user's
        close_fds(fds)
        assert isinstance(answer := self.engine.attach(), Attached), answer
        self._table = TABLE[: TOKENS // held.pool.groups[0].block_tokens]

    def offer(self, name: str) -> None:
        fill(self.engine.held, self._table, range(TOKENS))
        self.engine.offer(name, self._table, TOKENS)

    def want(self, name: str, sender: str) -> str:
        for region in self.engine.held.memory:
            region[:] = 0  # what an earlier one brought
        before = self.engine.held.copy()
        self.engine.want(name, sender, self._table, range(TOKENS))
        self.engine.done(name)
        return mismatch(self.engine.held, before, self._table, range(TOKENS))


class StandIn:
    """The ranks of this pod. The first pod learns where the engine's others are, and tells all of all agents."""

    def __init__(self, arguments: str) -> None:
        shape = Shape(
            "nhd",
            block_tokens=number_of(arguments, "block-size", 16),
            tp_size=number_of(arguments, "tensor-parallel-size", 1),
        )
        self._tp_size, self._pods = shape.tp_size, number_of(arguments, "nnodes", 1)
        pod, here = number_of(arguments, "node-rank", 0), shape.tp_size // self._pods
        uids, pools = uids_of(arguments), build_all(shape)[pod * here : (pod + 1) * here]
        self.ranks = [Rank(held, socket_of(arguments, i), uids) for i, held in enumerate(pools)]
        self._agents = {pod: [each.engine.agent.address for each in self.ranks]}
        self._others: list[str] = []
        self._is_introduced = False
        if pod:
            (leader,) = re.findall(r'--master-addr=([^"]+)', arguments)
            asked(leader, "join", json.dumps([pod, self._agents[pod]]))

    def join(self, address: str, said: str) -> str:
        pod, agents = json.loads(said)
        self._agents[pod] = agents
        self._others.append(address)
        return ""

    def is_healthy(self) -> bool:
        """Whether all pods are there; then each agent has been told of the others."""
        if len(self._agents) == self._pods and not self._is_introduced:
            self.introduce(json.dumps(list(chain.from_iterable(self._agents[pod] for pod in range(self._pods)))))
        return self._is_introduced

    def introduce(self, said: str) -> str:
        for each in self.ranks:
            each.engine.client.send(directory_of(json.loads(said), self._tp_size))
        self._is_introduced = True
        return "".join(self._by_others("introduce", said))

    def offer(self, name: str) -> str:
        for each in self.ranks:
            each.offer(name)
        self._by_others("offer", name)
        return self.ranks[0].engine.agent.address

    def want(self, said: str) -> str:
        name, sender = json.loads(said)
        return "".join([*(each.want(name, sender) for each in self.ranks), *self._by_others("want", said)])

    def complete(self, params: dict[str, Any]) -> dict[str, Any]:
        """As vLLM answers a proxy's prefill leg or its decode leg."""
        answer: dict[str, Any] = {"choices": [{"index": 0, "text": " be", "finish_reason": "length", "token_ids": [7]}]}
        if params.get("do_remote_decode"):
            name = str(params["bootstrap_room"])
            place = urlsplit(self.offer(name))
            told = {"remote_host": place.hostname, "remote_port": place.port, "remote_request_id": name}
            return answer | {"kv_transfer_params": {"do_remote_prefill": True, **told}}
        sender = f"tcp://{params['remote_host']}:{params['remote_port']}"
        assert (wrong := self.want(json.dumps([params["remote_request_id"], sender]))) == "", wrong
        return answer

    def _by_others(self, what: str, said: str) -> list[str]:
        return [asked(each, what, said) for each in self._others]


def main() -> None:
    engine = StandIn(json.dumps(sys.argv[1:]).replace('\\"', '"'))

    class Asked(Answers):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/health" and engine.is_healthy() else 503, "")

        def do_POST(self) -> None:
            said = self.body.decode()
            try:
                if self.path == "/join":
                    self.answer(200, engine.join(self.client_address[0], said))
                elif self.path == "/v1/completions":
                    self.answer(200, engine.complete(json.loads(said)["kv_transfer_params"]))
                else:
                    do = {"/introduce": engine.introduce, "/offer": engine.offer, "/want": engine.want}[self.path]
                    self.answer(200, do(said))
            except (AssertionError, HTTPError) as error:
                self.answer(500, str(error))

    HTTPServer(("0.0.0.0", PORT), Asked).serve_forever()


if __name__ == "__main__":
    main()
