"""SGLang's decode side of a request: one want for the KV, and then the first token (metadata.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Expect, Want
from msgspec.structs import asdict, replace
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from ..engine.conversation import Ended
from ..engine.prompts import is_in, rendezvous, short, traceparent
from . import compressed, foreign, metadata, states, windows
from .held_pages import CHANGES
from .manager import KVBridgeManager, attempt, is_foreign
from .messages import Asked, pack
from .rooms import OTHER_PROMPT
from .servers import RankAnswer, ranks, why_no_server

AGENT_S = 10.0  # how long a request waits for an agent that is away
LOOK_AGAIN_S = 0.5
DECLINE_S = 30.0  # how long the other engine's agents may take to hear that nothing is needed


class KVBridgeReceiver(CommonKVReceiver):  # type: ignore[misc]  # SGLang is not there for the checker
    """Called on the scheduler's thread. An exception there would end the server, so an error fails the request."""

    kv_mgr: KVBridgeManager

    def __init__(self, mgr: KVBridgeManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self._replica: int | None = None  # of the prefill server, while it is asked where its ranks are
        self._ranks: list[RankAnswer] = []  # what it has answered
        self._number = 0  # of the want, once it is sent
        self._want: Want | None = None  # until its scores are finished
        self.ended: Ended | None = None  # how it did
        self._prompt = self._traceparent = self._common = ""
        self._tokens = 0  # that we have pages for
        self._aux_index = -1
        self._pages: list[int] | None = None  # allocated to us, and not asked for yet
        self._states: list[Any] | None = None  # what SGLang has allocated beside the pages
        self._first_token = 0
        self._is_wanted = False  # all is asked for: `_poll` waits for the want and the metadata
        self._expected: Want | None = None  # empty, of what another engine holds for us while the request queues
        self._prefilled: tuple[foreign.Prefilled, list[tuple[float, int]]] | None = None  # by another engine
        self._obstacle = why_no_server(bootstrap_addr)  # why it has no room, or ""
        self._obstacle = self._obstacle or mgr.rooms.enter(bootstrap_room, self, time.monotonic())
        if self._obstacle:
            self.kv_mgr, self.bootstrap_room, self.bootstrap_addr = mgr, bootstrap_room, bootstrap_addr
            self.conclude_state, self.abort_notified, self.require_staging = KVPoll.Failed, False, False
        else:
            super().__init__(mgr, bootstrap_addr, bootstrap_room)

    @property
    def _has_room(self) -> bool:
        """Whether the room is still ours. Once our failure is told another request may have it."""
        return self.kv_mgr.rooms.is_of(self.bootstrap_room, self)

    def queued(self, req: Any) -> None:
        """The request has no pages yet. Ask another engine's agent to hold its prefill; a mismatch fails in `bind`."""
        if self._has_room and is_foreign(self.bootstrap_addr):
            attempt(req, "nothing is held for it", self._expect)

    def _expect(self, req: Any) -> None:
        talk, room = self.kv_mgr.talk, self.bootstrap_room
        prompt, reason = self.kv_mgr.name(req)
        if reason or talk is None:
            return
        told, _ = foreign.prefilled(req, self.kv_mgr.vocabulary)
        self._common = short(req.rid)
        ours = rendezvous(room, prompt)
        if told.rendezvous in ("", ours):
            self._expected = want = self._nothing(ours, told.sender)
            talk.send(Expect(number=want.number, rendezvous=ours, sender=told.sender))
        elif is_in(told.rendezvous, room):
            talk.want(self._nothing(told.rendezvous, told.sender))

    def bind(self, req: Any, tokens: int) -> None:
        """The request has pages for `tokens` tokens. Fails it if its prompt is not carried or does not match."""
        if not self._has_room:
            return
        self._tokens = tokens
        setattr(req, CHANGES, self.kv_mgr.weights_changes)
        self._traceparent = traceparent(foreign.custom_params(req))
        self._prompt, reason = self.kv_mgr.name(req)
        if not reason and is_foreign(self.bootstrap_addr):
            reason = self._read_foreign(req)
        if not reason and not tokens:
            reason = states.copy_prefix(self.kv_mgr.queue, req)
        if reason:
            return self._fail(reason)
        self._common = short(req.rid)
        self.kv_mgr.rooms.bind(self.bootstrap_room, self, self._prompt)

    def _read_foreign(self, req: Any) -> str:
        """Read what the router said of another engine's prefill. Returns why it does not fit, or ""."""
        told, reason = attempt(req, "custom_params", lambda req: foreign.prefilled(req, self.kv_mgr.vocabulary))
        if told is None:
            return reason
        self._prefilled = told
        theirs, ours = self._prefilled[0].rendezvous, rendezvous(self.bootstrap_room, self._prompt)
        return f"{OTHER_PROMPT}: prefill {theirs!a}, decode {ours}" if theirs not in ("", ours) else ""

    def init(self, prefill_dp_rank: int) -> None:
        """Which replica prefills is known. It stays `Bootstrapping` until its ranks are known as well."""
        self._replica = prefill_dp_rank
        self._guard("no way to the prefill server", self._begin)

    def _begin(self) -> None:
        if self._has_failed or self.conclude_state is not None:
            self._replica = None
        elif not (self._lacks_ranks() and self._is_asking_ranks()):
            replica, self._replica = self._replica, None
            super().init(replica)

    def _guard(self, failure: str, act: Callable[[], None]) -> None:
        """An error in `act` fails the request."""
        _, reason = attempt(self, failure, lambda _: act())
        if reason:
            self._fail(reason)

    def _lacks_ranks(self) -> bool:
        """Whether SGLang would ask where the prefill server's ranks are."""
        info = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if info is None or is_foreign(self.bootstrap_addr):
            return False
        pool, of = self.kv_mgr.connection_pool, f"{self.bootstrap_addr}_{self._replica}"
        with self.kv_mgr.connection_lock:
            return any(f"{of}_{cp}_{info.target_tp_rank}" not in pool for cp in info.target_cp_ranks)

    def _is_asking_ranks(self) -> bool:
        """Ask where they are. Returns whether to wait for the answer; if not, it is in `_ranks`, unless it is bad."""
        manager, address, replica = self.kv_mgr, self.bootstrap_addr, self._replica
        assert replica is not None
        found = manager.ask((address, replica), address, lambda: ranks(address, replica), bad=[])
        self._ranks = found or []
        return found is None

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        place = target_pp_rank, target_tp_rank
        return next((asdict(rank) for rank in self._ranks if (rank.pp_rank, rank.tp_rank) == place), None)

    def _setup_bootstrap_infos(self) -> None:
        if is_foreign(self.bootstrap_addr):
            self.bootstrap_infos: list[dict[str, Any]] = []  # no server to ask
        else:
            super()._setup_bootstrap_infos()

    def _register_kv_args(self) -> bool:
        """Nothing to register: the agents know each other."""
        return True

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """The pages are allocated: ask the prefill server to begin, and our agent to fetch."""
        if self.conclude_state is not None or self._has_failed:
            return
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            return self._fail("only pages on the device can be written")
        self._aux_index = -1 if aux_index is None else aux_index
        self._first_token = decode_prefix_len or 0
        self._pages, self._states = kv_indices.tolist(), state_indices
        self.init_time = time.time()
        self._guard("not asked for", self._ask_soon)

    def _ask_soon(self) -> None:
        """Ask once both sides have agents. Fails the request if that takes longer than AGENT_S."""
        assert self._pages is not None and self.init_time is not None
        if self._has_failed:
            return
        lacks = "no agent has our memory" if not self.kv_mgr.is_attached else self._lacks_theirs()
        if self.conclude_state is not None:
            return
        if not lacks:
            pages, self._pages = self._pages, None
            self._ask(pages, self._first_token)
        elif time.time() - self.init_time > AGENT_S:
            self._pages = None
            self._fail(f"{lacks}, since {AGENT_S:g} s")

    def _lacks_theirs(self) -> str:
        """Why the prefill server's agents are not known, or "". Asks its bootstrap server again every LOOK_AGAIN_S."""
        if self._agent():
            return ""
        if self._replica is None and self.kv_mgr.may_ask_again(self.bootstrap_addr, LOOK_AGAIN_S):
            self._replica = self.prefill_dp_rank
        if self._replica is not None and not self._is_asking_ranks():
            self._replica = None
            self.invalidate_cached_bootstrap_infos()
            self._setup_bootstrap_infos()
        return "" if self._agent() else f"the prefill server at {self.bootstrap_addr} has no agent"

    @property
    def _has_failed(self) -> bool:
        """Whether the status says so. Another thread may have set it."""
        return bool(self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed)

    def _agent(self) -> str:
        """The address of one of the prefill server's agents, "" if none is known."""
        if self._prefilled is not None:
            return self._prefilled[0].sender
        return next((info["agent"] for info in self.bootstrap_infos or () if info["agent"]), "")

    def _ask(self, pages: list[int], first: int) -> None:
        manager, talk, room = self.kv_mgr, self.kv_mgr.talk, self.bootstrap_room
        assert talk is not None
        args, end = manager.kv_args, first + self._tokens
        late = windows.wanted(args, self._states, end)
        late += compressed.beside(manager.queue.token_to_kv_pool, late, args, self._states, end, is_decoder=True)
        late += states.slot(args, self._states)
        for info in self.bootstrap_infos:
            asked = Asked(
                room=room,
                prompt=self._prompt,
                first_token=first,
                endpoint=manager.local_ip,
                dst_port=manager.rank_port,
                rank=manager.attn_tp_rank,
                ranks=manager.askers(info["tp_rank"], self.prefill_info.attn_tp_size),
            )
            if not self._send_bootstrap_message(bootstrap_info=info, message=pack(asked), operation="send_metadata"):
                self.invalidate_cached_bootstrap_infos()
                return
        self._is_wanted = True
        page = args.page_size
        want = replace(
            self._expected or self._nothing(rendezvous(room, self._prompt), self._agent()),
            first_token=first,
            end_token=end,
            blocks=(Blocks(0, first // page, tuple(pages)), *late) if pages else (),
            deadline_s=min(float(manager.waiting_timeout), 86400.0),
            fence=manager.mark_free(),
            traceparent=self._traceparent,
            # Another engine's prefill has answered. SGLang's own runs beside us: its offer may come after our want.
            is_offered=self._prefilled is not None,
        )
        if self._tokens:
            self._number, self._want = want.number, want
            manager.owners[want.number] = self
        self._expected = None
        talk.want(want)

    def _poll(self) -> int:
        manager = self.kv_mgr
        manager.look()
        if self._replica is not None and self._pages is None:
            self._guard("no way to the prefill server", self._begin)
        if self.conclude_state is None and (self._is_wanted or self._pages is not None):
            self._guard("not received", self._advance)
        status = super()._poll()
        if status == KVPoll.Failed:
            self._abandon("the request has failed")
        return int(status)

    def _advance(self) -> None:
        """Succeed once the KV is in our pages and the first token has come."""
        if self._pages is not None:
            return self._ask_soon()
        if (ended := self.ended) is not None and not ended.is_good:
            self.invalidate_cached_bootstrap_infos()  # the prefill server's agents may have moved
            return self._fail(f"{ended.code}: {ended.reason}")
        if ended is None and self._number:
            return
        if ended is not None and ended.other_scores and self._want is not None:
            self._finish_scores(self._want)
        place = self.kv_mgr.queue.metadata_buffers, self._aux_index
        if self._prefilled is not None:
            said, top = self._prefilled
            metadata.write(*place, self.bootstrap_room, said.first_token, said.logprob, top)
        elif (sent := self.kv_mgr.rooms.metadata(self.bootstrap_room)) is None:
            return
        elif reason := metadata.take(sent, self.kv_mgr.kv_args, *place):
            return self._fail(reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def _finish_scores(self, want: Want) -> None:
        """Once, before the scheduler hears that the rows are there."""
        assert self.kv_mgr.scores is not None
        self._want = None
        self.kv_mgr.scores.finish(want)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.fail(self.bootstrap_room, reason)

    def abort(self) -> None:
        """May run on another thread: `_poll` tells our agent."""
        if self._has_room:
            super().abort()

    def failure_exception(self) -> None:
        if self._obstacle:
            raise KVTransferError(self.bootstrap_room, self._obstacle)
        self._abandon("the request has failed")
        super().failure_exception()

    def clear(self) -> None:
        """SGLang calls this twice for a failed request: when it reports the failure, and when it frees the pages."""
        self._abandon("the request is over")
        if self._has_room:
            self.kv_mgr.leave(self.bootstrap_room, self, "", super().clear)

    def _abandon(self, reason: str) -> None:
        """Idempotent. The pages stay ours until the agent has ended the want (`is_abort_release_safe`)."""
        talk = self.kv_mgr.talk
        if self._is_wanted and self._number and talk is not None and talk.is_open(self._number):
            talk.abandon(self._number, reason)
        if self._expected is not None and talk is not None:  # no want follows: the other engine need not hold it
            talk.want(self._expected)
        self._is_wanted, self._pages, self._expected = False, None, None

    def _nothing(self, rendezvous_id: str, sender: str) -> Want:
        """An empty want: the other engine may free its blocks."""
        assert self.kv_mgr.talk is not None
        return Want(
            number=self.kv_mgr.talk.new_number(),
            request=self._common or str(self.bootstrap_room),
            rendezvous=rendezvous_id,
            sender=sender,
            first_token=0,
            end_token=0,
            blocks=(),
            deadline_s=DECLINE_S,
            common=self._common,
        )
