"""A prefilled request, as SGLang's prefill scheduler sees it: chunks become one offer, and it ends when all have it."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import Any

import zmq
from kvbridge_proto.engine import Offer
from kvbridge_proto.words import Blocks
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from .manager import KVBridgeManager, endpoints
from .messages import Row
from .prompts import rendezvous

log = logging.getLogger("sglang.srt.disaggregation.kvbridge")

COMPUTING_S = 600.0  # an offer is held while the rest of its prompt is computed, however long a step takes


class KVBridgeSender(CommonKVSender):  # type: ignore[misc]  # SGLang is not there for the checker
    """Called on the scheduler's thread. SGLang counts pages, we count tokens: `tokens` of them were sent."""

    kv_mgr: KVBridgeManager

    def __init__(
        self,
        mgr: KVBridgeManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if obstacle := mgr.enter(bootstrap_room, self):
            self.conclude_state = KVPoll.Failed
        self._obstacle = obstacle  # to its having a room at all
        self._early_send_wait_event: Any
        self._transfer_start_time: float | None
        self._name = ""  # of the offer
        self._first_token = self._tokens = 0
        self._is_row_sent = False

    def bind(self, req: Any) -> None:
        """Whose request this is. What the decode side asked may be there already."""
        if self._obstacle:
            return
        self.kv_mgr.room(self.bootstrap_room).prompt = self.kv_mgr.digest(req)
        self.kv_mgr.meet(self.bootstrap_room)

    def pop_decode_prefix_len(self) -> int:
        """From where on we are given pages: the decode side's prefix, in whole pages of ours."""
        prefix, page = super().pop_decode_prefix_len(), self.kv_mgr.kv_args.page_size
        self._first_token = self._tokens = prefix - prefix % page
        return int(self._tokens)

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        if self.conclude_state is not None or self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed:
            return
        pages, _, is_last, is_skipped = self._prepare_send_indices(kv_indices, state_indices)
        if is_skipped:
            return
        assert num_kv_tokens is not None
        self._begin_clock()
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if is_last:
            self._send_row()
        self._offer(pages.tolist(), self._tokens + num_kv_tokens, is_last, event)
        self._record_transfer_indices(pages, None)

    def _begin_clock(self) -> None:
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()

    def _offer(self, pages: list[int], tokens: int, is_last: bool, event: Any) -> None:
        manager, talk = self.kv_mgr, self.kv_mgr.talk
        if talk is None:
            return self._fail("no memory is attached to an agent")
        if not self._name:
            self._name = str(self.bootstrap_room)
            manager.watch(self._name)
        page = manager.kv_args.page_size
        blocks = (Blocks(0, self._tokens // page, tuple(pages)),) if pages else ()
        talk.offer(
            Offer(
                room=rendezvous(self.bootstrap_room, manager.room(self.bootstrap_room).prompt),
                request=self._name,
                first_token=self._first_token,
                tokens=tokens,
                blocks=blocks,
                is_last=is_last,
                hold_s=manager.options.hold_s if is_last else COMPUTING_S,
                fence=manager.mark_computed(event),
            )
        )
        self._tokens = tokens

    def _send_row(self) -> None:
        """The auxiliary row goes to whoever asked; they use it when the KV is there. Every stage has one, the last's
        counts."""
        manager = self.kv_mgr
        self._is_row_sent = True
        if not manager.pp_group.is_last_rank:
            return
        args, room = manager.kv_args, manager.room(self.bootstrap_room)
        places = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
        fields = tuple(ctypes.string_at(start + self.aux_index * size, size) for start, size in places)
        row = Row(room=self.bootstrap_room, prompt=room.prompt, fields=fields)
        try:
            for endpoint, port in endpoints(room.asked.values()):
                manager.send_to(endpoint, port, row)
        except zmq.ZMQError as error:
            self._fail(f"the auxiliary row could not be sent: {error}")

    def poll(self) -> int:
        self._advance()
        return int(super().poll())

    def poll_pp_consensus(self) -> int:
        self._advance()
        return int(super().poll_pp_consensus())

    def _advance(self) -> None:
        """What the agent said becomes SGLang's status: Success only when nobody reads the pages any more."""
        manager = self.kv_mgr
        manager.look()
        if self.conclude_state is not None:
            return
        if not self._name:
            if manager.request_status.get(self.bootstrap_room) == KVPoll.Bootstrapping:
                manager.meet(self.bootstrap_room)  # our agent may be here by now
            return
        if (ended := manager.ended(self._name)) is None:
            return
        if ended.is_good and self._is_row_sent:
            manager.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(f"{ended.code}: {ended.reason}")

    def _fail(self, reason: str) -> None:
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason=reason)

    def abort(self) -> None:
        """The pages are given to others as soon as this returns."""
        if self._obstacle:
            return
        super().abort()
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="Aborted by AbortReq.")
        self._take_back("aborted")

    def clear(self) -> None:
        if self._obstacle:
            return
        self._take_back("the request is over")
        failure = self.kv_mgr.failure_records.get(self.bootstrap_room, "")
        super().clear()
        self.kv_mgr.leave(self.bootstrap_room, self, failure)

    def failure_exception(self) -> None:
        if self._obstacle:
            raise KVTransferError(self.bootstrap_room, self._obstacle)
        super().failure_exception()

    def _take_back(self, reason: str) -> None:
        """Return when nothing reads the pages any more."""
        talk = self.kv_mgr.talk
        if self._name and talk is not None and talk.is_open(self._name):
            talk.withdraw(self._name, reason)
            talk.wait_for_readers([self._name])
        if self._name:
            self.kv_mgr.unwatch(self._name)
            self._name = ""
