"""SGLang's bootstrap server, which also knows where each prefill rank's agent is.

Anybody who reaches its port may ask and register: what is out of bounds is answered 400, and changes nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from ...oneline import plain
from .messages import Host, Port
from .servers import AgentAddress, RankNumber, Size, check_ranks

MOST_AGENTS = 16384  # ranks of all replicas
NUMBER = re.compile(r"-?[0-9]{1,9}", re.ASCII)
AGENT = "kvbridge_agent"  # key in a rank's registration, and in the answer to those who ask for the rank
RANKS = "/kvbridge/ranks"


class Registration(msgspec.Struct, frozen=True):
    """What a rank says of itself, as far as SGLang or we act on it."""

    attn_tp_size: Size
    attn_tp_rank: RankNumber
    attn_cp_size: Size
    attn_cp_rank: RankNumber
    attn_dp_size: Size
    attn_dp_rank: RankNumber
    pp_size: Size
    pp_rank: RankNumber
    system_dp_size: Size
    system_dp_rank: RankNumber
    rank_ip: Host
    rank_port: Port
    kvbridge_agent: AgentAddress = ""

    def __post_init__(self) -> None:
        check_ranks(self.attn_tp_size, self.pp_size)

    @property
    def place(self) -> tuple[int, int, int]:
        """Replica, pipeline rank, tensor rank."""
        replica = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        return replica, self.pp_rank, self.attn_tp_rank


class KVBridgeBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]  # SGLang is not there for the checker
    """Runs in the prefill server's main process; its handlers run on its own loop."""

    def __init__(self, host: str, port: int) -> None:
        self._agents: dict[tuple[int, int, int], str] = {}  # by replica, pipeline rank, tensor rank
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(RANKS, self._tell_ranks)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            said = msgspec.json.decode(await request.read(), type=Registration)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return web.Response(text=plain(str(error), 300), status=400)
        if said.place not in self._agents and len(self._agents) >= MOST_AGENTS:
            return web.Response(text=f"ranks: {MOST_AGENTS} are registered", status=400)
        answer: web.Response = await super()._handle_route_put(request)
        if answer.status == 200 and said.attn_cp_rank == 0:
            if said.place in self._agents:
                self._registered_count -= 1  # a rank that registers again is counted already
            self._agents[said.place] = said.kvbridge_agent
        return answer

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        if not all(NUMBER.fullmatch(each) for each in request.query.values()):
            return web.Response(text="numbers are asked for", status=400)
        answer: web.Response = await super()._handle_route_get(request)
        asked = [request.query.get(name, "-1") for name in ("prefill_dp_rank", "target_pp_rank", "target_tp_rank")]
        if answer.status != 200 or "-1" in asked:
            return answer
        replica, pp_rank, tp_rank = map(int, asked)
        told: dict[str, Any] = json.loads(answer.text or "{}")
        return web.json_response(told | {AGENT: self._agents.get((replica, pp_rank, tp_rank), "")})

    async def _tell_ranks(self, request: web.Request) -> web.Response:
        """Answer with the agents of one replica: [[pipeline rank, tensor rank, address], ...]."""
        replica = request.query.get("replica", "")
        ranks = [[pp, tp, address] for (of, pp, tp), address in sorted(self._agents.items()) if str(of) == replica]
        return web.json_response(ranks)
