"""SGLang's bootstrap server, which also knows where each prefill rank's agent is.

Anybody who reaches its port may ask and register: what is out of bounds is answered 400, and changes nothing.
"""

from __future__ import annotations

import re

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from ...oneline import plain
from .messages import Host, Port
from .servers import RANKS, AgentAddress, RankAnswer, RankNumber, Size, check_ranks

MOST_RANKS = 16384  # of all replicas
NUMBER = re.compile(r"-?[0-9]{1,9}", re.ASCII)


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
        self._ranks: dict[tuple[int, int, int], RankAnswer] = {}  # by replica, pipeline rank, tensor rank
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(RANKS, self._tell_ranks)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            said = msgspec.json.decode(await request.read(), type=Registration)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return web.Response(text=plain(str(error), 300), status=400)
        if said.place not in self._ranks and len(self._ranks) >= MOST_RANKS:
            return web.Response(text=f"ranks: {MOST_RANKS} are registered", status=400)
        answer: web.Response = await super()._handle_route_put(request)
        if answer.status == 200 and said.attn_cp_rank == 0:
            if said.place in self._ranks:
                self._registered_count -= 1  # a rank that registers again is counted already
            where = said.kvbridge_agent, said.rank_ip, said.rank_port
            self._ranks[said.place] = RankAnswer(said.pp_rank, said.attn_tp_rank, *where)
        return answer

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        if not all(NUMBER.fullmatch(each) for each in request.query.values()):
            return web.Response(text="numbers are asked for", status=400)
        answer: web.Response = await super()._handle_route_get(request)
        return answer

    async def _tell_ranks(self, request: web.Request) -> web.Response:
        """Answer with the ranks of one replica: [[pipeline rank, tensor rank, agent, address, port], ...]."""
        replica = request.query.get("replica", "")
        ranks = [rank for (of, _, _), rank in sorted(self._ranks.items()) if str(of) == replica]
        return web.Response(body=msgspec.json.encode(ranks), content_type="application/json")
