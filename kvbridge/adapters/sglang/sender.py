"""SGLang's prefill side of a request: its chunks become one offer, which ends when all receivers have read it."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import zmq
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import NoOffer, Offer, Release
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from ...oneline import plain
from ..engine.conversation import COMPUTING_S, Ended
from ..engine.prompts import call, rendezvous, short, traceparent
from . import compressed, foreign, metadata, states, windows
from .held_pages import CHANGES
from .manager import KVBridgeManager, attempt
from .prompts import prompt_tokens

log = logging.getLogger("sglang.srt.disaggregation.kvbridge")


class KVBridgeSender(CommonKVSender):  # type: ignore[misc]  # SGLang is not there for the checker
    """Called on the scheduler's thread. SGLang counts pages, we count tokens: the offer ends at `_tokens`."""

    kv_mgr: KVBridgeManager

    def __init__(
        self,
        mgr: KVBridgeManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._why = mgr.rooms.enter(bootstrap_room, self, time.monotonic())  # why it failed, or ""
        self._is_over = bool(self._why)  # the room is not ours, or not any more
        if self._is_over:
            self.kv_mgr, self.bootstrap_room, self.conclude_state = mgr, bootstrap_room, KVPoll.Failed
            return
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._early_send_wait_event: Any
        self._transfer_start_time: float | None
        self._number = 0  # of the offer, once there is one
        self.ended: Ended | None = None  # how it did
        self.is_whole = False  # its last part is with the agent
        self._prompt = self._traceparent = self._name = ""
        self._first_token = self._tokens = 0
        self._is_metadata_sent = False
        self._length = 0  # of the prompt
        self._changes = 0  # of the weights, when its request came
        self._is_fetched_elsewhere = self._was_offered = False
        self._earlier = 0  # the number of a want: of what others keep of its beginning
        self._req: Any = None

    def bind(self, req: Any) -> None:
        """Take the prompt from SGLang's request. Fails it if the prompt is not carried or the parameters are bad."""
        if self._is_over:
            return
        self._req, self._changes = req, self.kv_mgr.weights_changes
        setattr(req, CHANGES, self._changes)
        is_fetched_elsewhere, bad_params = attempt(req, "custom_params", foreign.is_fetched_elsewhere)
        self._is_fetched_elsewhere = is_fetched_elsewhere is not False  # nonsense is said of another engine too
        self._prompt, reason = self.kv_mgr.name(req)
        if reason:
            return self._fail(reason)
        self._name = short(req.rid)
        self._traceparent = traceparent(foreign.custom_params(req))
        if bad_params:
            return self._fail(bad_params)
        pool = self.kv_mgr.queue.token_to_kv_pool
        if is_fetched_elsewhere and (states.has_states(pool) or compressed.is_compressed(pool)):
            foreign.shorten(req)
        self._length = len(prompt_tokens(req))
        self._earlier = attempt(req, "its beginning is computed", self.kv_mgr.kept.begin)[0] or 0
        self.kv_mgr.bind(self.bootstrap_room, self, self._prompt, is_open=bool(is_fetched_elsewhere))

    def pop_decode_prefix_len(self) -> int:
        """The first token to send: the prefix that the decode side has, rounded down to whole pages of ours."""
        prefix, page = min(super().pop_decode_prefix_len(), self._length), self.kv_mgr.kv_args.page_size
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
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if is_last and not self._send_metadata():
            return
        self._offer(pages.tolist(), self._tokens + num_kv_tokens, is_last, event, state_indices)
        self._record_transfer_indices(pages, None)

    def _offer(self, pages: list[int], tokens: int, is_last: bool, event: Any, state_indices: list[Any] | None) -> None:
        manager, talk = self.kv_mgr, self.kv_mgr.talk
        if talk is None:
            return self._fail("no memory is attached to an agent")
        if self._changes != manager.weights_changes:
            return self._fail("other_weights: the weights have changed since the request came")
        read = partial(self._late, tokens=tokens, state_indices=state_indices)
        late, reason = attempt(self._req, "its window has no blocks", read) if is_last else ((), "")
        if reason:
            return self._fail(reason)
        if is_new := not self._number:
            self._number, self._was_offered = talk.new_number(), True
            manager.owners[self._number] = self
        page = manager.kv_args.page_size
        blocks = (Blocks(0, self._tokens // page, tuple(pages)),) if pages else ()
        talk.offer(
            Offer(
                number=self._number,
                rendezvous=rendezvous(self.bootstrap_room, self._prompt),
                request=self._name or str(self.bootstrap_room),
                first_token=self._first_token,
                tokens=tokens,
                blocks=(*blocks, *(late or ())),
                is_last=is_last,
                is_more=not is_new,
                hold_s=manager.options.hold_s if is_last else COMPUTING_S,
                fence=manager.mark_computed(event),
                traceparent=self._traceparent,
            )
        )
        if is_last:
            self.is_whole = True
            if manager.gives_up_at_once:
                talk.send(Release())
        self._tokens = tokens

    def _late(self, req: Any, tokens: int, state_indices: list[Any] | None) -> tuple[Blocks, ...]:
        """What is offered once all of the prompt's `tokens` tokens are computed. Raises EngineError."""
        queue, args = self.kv_mgr.queue, self.kv_mgr.kv_args
        window = windows.offered(queue, req, tokens)
        beside = compressed.beside(queue.token_to_kv_pool, window, args, state_indices, tokens, is_decoder=False)
        return (*window, *beside, *states.slot(args, state_indices))

    def _send_metadata(self) -> bool:
        """Send the first token to all ranks that asked, from the last pipeline stage only. False if that failed."""
        manager = self.kv_mgr
        self._is_metadata_sent = True
        if not manager.pp_group.is_last_rank:
            return True
        said = metadata.read(manager.kv_args, self.aux_index, self.bootstrap_room, self._prompt)
        try:
            manager.send_metadata(said, manager.rooms.whole(self.bootstrap_room) or ())
        except zmq.ZMQError as error:
            self._fail(f"the metadata buffer could not be sent: {error}")
            return False
        return True

    def poll(self) -> int:
        """Its prefill does not begin before what others keep of its beginning has come."""
        self._advance()
        status = int(super().poll())
        waits = status == KVPoll.WaitingForInput and self.kv_mgr.kept.is_open(self._earlier)
        return int(KVPoll.Bootstrapping) if waits else status

    def poll_pp_consensus(self) -> int:
        self._advance()
        return int(super().poll_pp_consensus())

    def _advance(self) -> None:
        """Turn what the agent said into SGLang's status: Success only when nobody reads the pages any more."""
        manager = self.kv_mgr
        manager.look()
        if self.conclude_state is not None:
            return
        if not self._number:
            manager.meet(self.bootstrap_room)  # our agent may have come
            return
        if (ended := self.ended) is None:
            return
        if ended.is_good and self._is_metadata_sent:
            manager.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(f"{ended.code}: {ended.reason}")

    def _fail(self, reason: str) -> None:
        self.kv_mgr.fail(self.bootstrap_room, reason)

    def abort(self) -> None:
        """SGLang may reuse the pages as soon as this returns, and may never mention the request again."""
        if not self._is_over:
            super().abort()
            self._end("Aborted by AbortReq.")

    def clear(self) -> None:
        if not self._is_over:
            has_failed = KVPoll.Failed in (self.conclude_state, self.kv_mgr.request_status.get(self.bootstrap_room))
            self._end("the prefill has failed" if has_failed else "")

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed
        self._end("")
        if hasattr(self, "trace_ctx"):
            self.trace_ctx.trace_req_finish()
        raise KVTransferError(
            self.bootstrap_room,
            self._why or "Failed due to an unknown reason from another rank",
            is_from_another_rank=not self._why,
        )

    def _end(self, failure: str) -> None:
        """Withdraw the offer and leave the room. Idempotent. A recorded cause takes precedence over `failure`."""
        if self._is_over:
            return
        self._is_over, self._req = True, None
        manager, number = self.kv_mgr, self.bootstrap_room
        manager.kept.abandon(self._earlier)
        self._take_back(failure or "the request is over")
        with manager.failure_lock:
            self._why = manager.failure_records.pop(number, "") or failure
        has_failed = bool(self._why) or self.conclude_state == KVPoll.Failed
        said = self._why or ("another prefill rank has failed" if has_failed else "")
        if said and self._is_fetched_elsewhere and not self._was_offered and manager.talk is not None:
            # A decode rank of SGLang hears of it on its own socket; another engine waits at our agent.
            manager.talk.send(NoOffer(call=call(number), code="prefill_refused", reason=plain(said)[:1024]))
        manager.leave(number, self, said, self._forget)

    def _forget(self) -> None:
        """SGLang's records, and a cause that came since `_end` took its own: it is not the next request's."""
        super().clear()
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def _take_back(self, reason: str) -> None:
        """Withdraw the offer. Returns when nothing reads the pages any more."""
        number, self._number = self._number, 0
        talk = self.kv_mgr.talk
        if not number or talk is None:
            return
        if talk.is_open(number):
            talk.withdraw(number, reason)
            talk.wait_for_readers([number])
