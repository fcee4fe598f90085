"""SGLang's bootstrap server, which also knows where each prefill rank's agent is."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

AGENT = "kvbridge_agent"  # key in a rank's registration, and in the answer to those who ask for the rank
RANKS = "/kvbridge/ranks"


class KVBridgeBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]  # SGLang is not there for the checker
    """Runs in the prefill server's main process; its handlers run on its own loop."""

    def __init__(self, host: str, port: int) -> None:
        self._agents: dict[tuple[int, int, int], str] = {}  # by replica, pipeline rank, tensor rank
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(RANKS, self._tell_ranks)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        answer: web.Response = await super()._handle_route_put(request)
        said = await request.json()
        if answer.status == 200 and said["attn_cp_rank"] == 0:
            replica = said["attn_dp_rank"] if said["system_dp_size"] == 1 else said["system_dp_rank"]
            rank = (replica, said["pp_rank"], said["attn_tp_rank"])
            if rank in self._agents:
                self._registered_count -= 1  # a rank that registers again is counted already
            self._agents[rank] = str(said.get(AGENT, ""))
        return answer

    async def _handle_route_get(self, request: web.Request) -> web.Response:
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
