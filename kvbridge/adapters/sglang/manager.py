"""The manager of one SGLang rank: owns the conversation with its agent and the control socket to the other server.

A scheduler polls its senders and receivers in each turn. All that we tell the agent about a request, or hear from it,
happens there, on the scheduler's thread. Beside it one thread of ours reads SGLang's control socket. On the prefill
side another keeps the bootstrap server and our agent informed of where the agents are. What these threads learn about a
request they record in its room and its status; the scheduler's thread acts on it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import msgspec
import requests
import torch
import zmq
from kvbridge_proto.common import Rank
from kvbridge_proto.engine import READERS_S, KeptBy, Release, Weights
from kvbridge_proto.pool import Shard
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    AbortNotification,
    CommonKVManager,
    PrefillServerInfo,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.mem_cache.kv_cache_builder import validate_decode_radix_cache
from sglang.srt.runtime_context import get_device, get_parallel, get_serving, linear_attn_tp_size
from sglang.srt.utils.network import NetworkAddress

from ...errors import EngineError, KVBridgeError, OperatorError
from ...oneline import plain
from ...values import Value
from ..engine.client import EngineClient
from ..engine.conversation import Conversation, Ended
from ..engine.memory import Memory
from ..engine.names import UNNAMED, model_name, weights_name
from . import drafts, foreign, states
from .building import TESTED, building
from .held_pages import HELD, HeldPages, why_none
from .kept_fetches import KeptFetches
from .messages import STATUS_TAG, TAG, Asked, BadMessage, pack, shares, unknown, unpack
from .metadata import Metadata
from .options import SGLangOptions
from .pool import describe, moved
from .prompts import prefixes, prompt_digest, why_not_carried
from .release import of_all_ranks
from .rooms import OTHER_PROMPT, Rooms, endpoints
from .servers import BadAnswer, Questions, ranks, replicas, server, why_no_server

log = logging.getLogger("sglang.srt.disaggregation.kvbridge")

T = TypeVar("T")

TURN_S = 0.0002  # a scheduler's turn polls every request, but one look at the agent is enough for all
# A scheduler with nothing to compute spins. While it waits for its agent it may as well leave the core to it: it wakes
# at the agent's next message.
IDLE_REST_S = 0.0005
REGISTER_S = 1.0  # how soon the bootstrap server hears of a new or moved agent
REPLICAS_S = 0.02  # before a server is asked again for rooms that it did not know
BAD_ANSWER_S = 1.0  # the same, after a bad answer
RANKS_S = 5.0  # how often we ask for the other ranks' agents once all are known
EARLY_S = 0.1  # the same, until all are known
LET_GO_S = 10.0  # how long the server stands still for an agent that does not let go; then the release is refused
SEND_S = 1.0  # how long a server that does not read may block our scheduler
RECONNECT_S, RECONNECT_MOST_S = 0.1, 10.0  # between tries to connect to a server that is away
MOST_CONTROL_BYTES = 1 << 16  # of SGLang's own messages: numbers, and one reason
THREADS_END_S = 10.0  # for all threads of a manager that ends: one may wait so long for a server's answer
TOLD_MS = 1000  # for what was said last to leave
HANDED = "kvbridge_handed"  # an attribute of the scheduler, while its role changes


class Handed(Value):
    """What a manager leaves to that of the next role: the socket whose port other servers know, and the weights."""

    context: Any
    socket: Any
    port: int
    weights: str
    next_weights: str


class KVBridgeManager(CommonKVManager):  # type: ignore[misc]  # SGLang is not there for the checker
    """Made on the scheduler's thread of each rank."""

    supports_deferred_decode_kv_release = True
    kv_status_msg_tag = STATUS_TAG
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        queue = building.get()
        if queue is None:
            reason = "_init_kv_manager of its queue is not hooked: this SGLang is not the one that this adapter knows"
            raise OperatorError("hook_missing", f"{reason} ({TESTED})")
        _check_version()
        _check_parallel(disaggregation_mode, states.has_states(queue.token_to_kv_pool))
        self.options = SGLangOptions.read(os.environ)
        self.rooms = Rooms()
        self.queue = queue
        self.is_decoder = disaggregation_mode == DisaggregationMode.DECODE
        self.owners: dict[int, Any] = {}  # senders and receivers, by the numbers of their offers and wants: see `ended`
        self._handed: Handed | None = queue.scheduler.__dict__.pop(HANDED, None)
        self._weights = weights_name(get_serving().weight_version)
        self.weights_changes = 0
        self.gives_up_at_once = False  # whether prompts are not held: a flush waits for their end
        self.next_weights = UNNAMED  # what they are called once the update that is under way has ended
        if self._handed is not None:
            self._weights, self.next_weights = self._handed.weights, self._handed.next_weights
        self._look_at = 0.0
        self._replica = _replica()
        self._shard = _shard()
        self._engine_id = _common_id()
        self._bootstrap_url = ""
        self._row: dict[str, Any] = {}  # our registration in the bootstrap server
        self._registered = ""
        self._ranks: tuple[Rank, ...] = ()  # all of this replica's that are known
        self._status_lock = threading.Lock()  # held from reading a request's status until it is changed
        self._questions = Questions()
        self._met: set[str] = set()  # prefill servers that have answered once
        self._routes: dict[str, float] = {}  # by prefill server: when we last asked again for its ranks
        self._fence_stream: Any = None
        self.talk: Conversation | None = None
        self.held: HeldPages | None = None  # what is kept for others, if that is chosen
        self.kept = KeptFetches(self)
        self._is_over = threading.Event()  # the server has another role, and another manager
        self._attach()
        try:
            self._begin(args, disaggregation_mode, server_args, is_mla_backend)
        except BaseException:
            if self.talk is not None:
                self.talk.close()
            raise

    def _begin(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool) -> None:
        """What SGLang's own manager does, and our threads."""
        queue = self.queue
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._kv_replica_factor = 1  # the agents count what they move
        self.enable_deferred_decode_kv_release = True
        if self.attn_cp_size > 1 and self.enable_all_cp_ranks_for_transfer:
            reason = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER: on, must be off"
            raise OperatorError("context_parallel_unsupported", reason)
        self._take_port()
        hear = self._hear_decode if self.is_decoder else self._hear_prefill
        self._threads = [_thread("kvbridge-control", lambda: self._serve(hear))]
        if not self.is_decoder:
            self._threads.append(_thread("kvbridge-registry", self._keep_registered))
        else:
            self.prefill_info_table: Any = PrefillServers()
            # A timer must not give back pages that our agent may still write.
            queue.transfer_queue.enable_deferred_kv_release = True
            queue.transfer_queue.deferred_kv_release_timeout = float("inf")
            self._threads.append(self._start_heartbeat_checker_thread())

    # The other role:

    @property
    def supports_role_switch(self) -> bool:
        """Whether this server's cache can be carried in the other role, too. SGLang asks first: it has no way back."""
        other = DisaggregationMode.PREFILL if self.is_decoder else DisaggregationMode.DECODE
        try:
            _check_parallel(other, states.has_states(self.queue.token_to_kv_pool))
            self._described(is_decoder=not self.is_decoder)
            if not self.is_decoder:
                _check_prefix_cache(self.queue)
        except KVBridgeError as error:
            log.error("this server cannot %s: %s: %s", other.value, error.code, error)
            return False
        except Exception:  # here it would end the server
            log.exception("this server cannot %s", other.value)
            return False
        return True

    def teardown(self) -> None:
        """SGLang changes the server's role. No request is under way; the next manager is made right after this.

        Raises EngineError if a rank's agent may still write pages, or a thread of ours uses the socket that is handed
        on: the server cannot go on then.
        """
        self._is_over.set()
        if self.held is not None:
            self.held.give_back_all()
            setattr(self.queue.scheduler.tree_cache, HELD, None)
        reason = self.let_go("our role changes")
        may_write = bool(self.kept or (self.is_decoder and self.owners))
        if any(reasons := of_all_ranks(self.queue.scheduler, reason if may_write else "")):
            raise EngineError("not_let_go", next(filter(None, reasons)))
        if reason:
            assert self.talk is not None
            log.warning("the role changes, as nothing is open that the agent could write: %s", reason)
            self.talk.close()
        if self.is_decoder:
            self._heartbeat_shutdown.set()
            if self._prefill_recompute_executor is not None:
                self._prefill_recompute_executor.shutdown(wait=False)
        end = time.monotonic() + THREADS_END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._threads[0].is_alive():
            raise EngineError("threads_left", f"the control socket is still used after {THREADS_END_S:g} s")
        for number, asked in self.rooms.waiting():  # whose prompts have not come, or another server's
            self._tell_failed(number, asked, "this server's role changes")
        for connection in self._socket_cache.values():
            connection.close(linger=TOLD_MS)
        for session in self.session_pool.values() if self.is_decoder else ():
            session.close()
        handed = Handed(self._zmq_ctx, self.server_socket, self.rank_port, self._weights, self.next_weights)
        setattr(self.queue.scheduler, HANDED, handed)

    def register_to_bootstrap(self) -> None:
        self._take_port()
        super().register_to_bootstrap()

    def _take_port(self) -> None:
        """Go on with the control socket of the server's last role: others keep its port, and would not ask again."""
        if (handed := self._handed) is not None:
            self._handed = None
            self._zmq_ctx.destroy(linger=0)
            self._zmq_ctx: Any = handed.context
            self.server_socket, self.rank_port = handed.socket, handed.port

    # Our agent:

    def _attach(self) -> None:
        """Share the memory with the agent. Without one the engine still starts, and requests fail until one comes."""
        if self.is_silent:
            return
        memory = self._described(self.is_decoder)
        self.scores = memory.scores
        path = self.options.socket_of(_local_rank(), int(get_device().gpu_id or 0))
        options = self.options
        client = EngineClient(path, agent_uids=options.agent_uids, allow_unwatched=options.allow_unwatched)
        talk = Conversation(client, memory, log, takes_kept=self._begin_turns(memory))
        if self._ranks:
            talk.share(self._ranks)
        self.talk = talk
        if memory.device.type == "cpu":
            for pool in (self.queue.token_to_kv_pool, *drafts.pools(self.queue)):
                moved(pool)
        self.talk.start(self.options.connect_s)

    def _described(self, is_decoder: bool) -> Memory:
        """Raises OperatorError."""
        name = self.options.model_name or model_name(self.queue.scheduler.server_args.model_path)
        ids = {"model_name": name, "engine_id": self._engine_id, "weights": self._weights}
        ids |= {"draft": self.options.draft_name}
        return describe(self.queue, self._shard, is_decoder=is_decoder, replica=self._replica, **ids)

    def _begin_turns(self, memory: Memory) -> bool:
        """Keep what is computed, if that is chosen. Returns whether we want to hear what others keep."""
        tree, reason = self.queue.scheduler.tree_cache, why_none(self.queue, memory.pool.groups, _ranks())
        if self.options.return_s and reason:
            log.warning("nothing is kept for other requests (return_s): %s", reason)
        elif self.options.return_s and self.held is None:
            self.held = HeldPages(self)
            setattr(tree, HELD, self.held)
        return not self.is_decoder and not reason and bool(tree.supports_prefix_sharing())

    @property
    def weights(self) -> str:
        """The name of the weights that rows are computed with."""
        return self._weights

    @property
    def engine_id(self) -> str:
        """Of all ranks of this replica, and no other engine's."""
        return self._engine_id

    @property
    def is_silent(self) -> bool:
        """Whether another rank of the context-parallel group sends this prefill rank's rows."""
        return bool(get_parallel().attn_cp_rank)

    @property
    def agent_address(self) -> str:
        return "" if self.talk is None else self.talk.address

    @property
    def is_attached(self) -> bool:
        """Whether an agent has our memory now."""
        return self.talk is not None and self.talk.attached is not None

    @property
    def vocabulary(self) -> int:
        """How many tokens the model's vocabulary has."""
        return int(self.queue.scheduler.model_config.vocab_size)

    def let_go(self, why: str = "our memory is about to go away") -> str:
        """Have our agent let go of the memory. Returns why it has not within LET_GO_S, or "".

        Pages that a stopped agent may still write must not become anything else's.
        """
        if self.talk is None:
            return ""
        try:
            self.talk.detach(LET_GO_S, why)
        except EngineError as error:
            return f"{error.code}: {error}"
        self.talk = None
        self.owners.clear()
        return ""

    def deregister_buffer_to_engine(self) -> None:
        """SGLang frees its memory: our agent has let go of it already (`release.py`)."""
        assert self.talk is None

    def register_buffer_to_engine(self) -> None:
        """SGLang has memory again: attach it."""
        if self.talk is None:
            self._attach()

    def weights_are(self, version: str) -> None:
        """Rows are computed with other weights from now on. What is open ends, even if its rows have come already."""
        self.next_weights = UNNAMED
        if version == self._weights:
            return
        log.info("weights: %a, before %a", version, self._weights)
        self._weights = version
        self.weights_changes += 1
        if self.held is not None:
            self.held.give_back_all()
        if self.talk is not None:
            self.talk.send(Weights(version=version))

    def release(self) -> None:
        """Have what nobody has claimed given up. Returns once the agent has answered, or after READERS_S.

        An offer whose prompt is still being computed is not given up, so nobody waits for its end.
        """
        talk, end = self.talk, time.monotonic() + READERS_S
        if talk is None:
            return
        offers = [number for number, owner in self.owners.items() if owner.is_whole]
        talk.send(Release())
        self.look_until(lambda: not any(map(talk.is_open, offers)), end - time.monotonic())
        self._look_at = 0.0  # whoever asks next hears of it

    def look_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Listen to the agent until then, for so long at most."""
        end = time.monotonic() + seconds
        while (talk := self.talk) is not None and not is_over() and (left := end - time.monotonic()) > 0:
            talk.rest(min(left, IDLE_REST_S))
            self.look_now()

    def look_now(self) -> None:
        self._look_at = 0.0
        self.look()

    def look(self) -> None:
        """Listen to the agent, at most once in TURN_S."""
        now = time.monotonic()
        if self.talk is None or now < self._look_at:
            return
        self.kept.attached_to(self.talk.attached)
        heard = self.talk.turn()
        if not heard and self.queue.scheduler._sched_idled and self.talk.is_waiting:
            self.talk.rest(IDLE_REST_S)
            heard = self.talk.turn()
        self._look_at = time.monotonic() + TURN_S
        for each in heard:
            if isinstance(each, KeptBy):
                self.kept.heard(each)
            elif isinstance(each, Ended) and (owner := self.owners.pop(each.number, None)) is not None:
                owner.ended = each
            elif isinstance(each, Ended):
                self.kept.over(each)

    def mark_free(self) -> int:
        """A want's fence, behind the steps under way: these may still write the pages of a finished request."""
        return self._mark(is_behind_steps=True)

    def mark_computed(self, event: Any) -> int:
        """An offer's fence: reached once the rows are there. A cached prefix sent early is there after `event`.

        Without pipeline stages SGLang sends only rows of a result that it has waited for, so there is nothing to wait
        for. The forward that runs by then is the next prompt's.
        """
        if self.pp_size == 1 and event is None:
            return 0
        return self._mark(is_behind_steps=self.pp_size > 1, event=event)

    def _mark(self, is_behind_steps: bool, event: Any = None) -> int:
        """Mark a stream of our own that waits for the scheduler's streams, if `is_behind_steps`, and for `event`."""
        if self.talk is None or self.talk.memory.device.type != "cuda":
            return 0
        if self._fence_stream is None:
            self._fence_stream = torch.cuda.Stream(self.talk.memory.device)
        if is_behind_steps:
            self._fence_stream.wait_stream(torch.cuda.current_stream())
            self._fence_stream.wait_stream(self.queue.scheduler.forward_stream)
        if event is not None:
            self._fence_stream.wait_event(event)
        with torch.cuda.stream(self._fence_stream):
            return self.talk.mark()

    def name(self, req: Any) -> tuple[str, str]:
        """The digest of the request's prompt; or "", and why the prompt is not carried."""
        if reason := why_not_carried(req):
            return "", reason
        digest, reason = attempt(req, "its prompt has no name", self.digest)
        return digest or "", reason

    def digest(self, req: Any) -> str:
        """The digest of the request's prompt. A LoRA goes in by name and path: its id is this server's own."""
        return prompt_digest(req, self._lora(req))

    def prefixes(self, req: Any, end: int) -> tuple[bytes, ...]:
        """Digests of the request's beginnings, up to token `end`."""
        return prefixes(req, self._lora(req), end)

    def _lora(self, req: Any) -> tuple[str, str]:
        lora = getattr(self.queue.scheduler.tp_worker.model_runner, "lora_manager", None)
        ref = getattr(lora, "lora_refs", {}).get(req.lora_id)
        return (req.lora_id or "", "") if ref is None else (ref.lora_name, ref.lora_path)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """SGLang logs the reason as it is, and others may have chosen its words."""
        super().record_failure(bootstrap_room, plain(failure_reason))

    def fail(self, number: int, reason: str) -> None:
        """Fail the request in this room. The scheduler sees its status, and asks for the reason.

        The first cause stays: later ones may follow from it. Of a room that is cleared nothing is recorded, or the next
        request in it would fail for that.
        """
        if number in self.request_status:
            with self.failure_lock:
                self.failure_records.setdefault(number, plain(reason))
            self.update_status(number, KVPoll.Failed)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """SGLang's own digest is of whole pages. Ours of rows: the rest of a page need not travel (option `verify`)."""
        return False

    # A request's room:

    def leave(self, number: int, owner: object, failure: str, forget: Callable[[], None]) -> None:
        """The request is over. `forget` removes SGLang's own records of it. Ranks that asked are told of a failure."""
        with self._status_lock:
            if not self.rooms.is_of(number, owner):
                return
            forget()
            asked = self.rooms.leave(number, owner, failure, time.monotonic())
        self._tell_failed(number, asked, failure)

    def may_ask_again(self, bootstrap_addr: str, after_s: float) -> bool:
        """Whether a prefill server may be asked for its ranks again: once in `after_s`, for all requests together.

        A server that the heartbeat has given up on may not.
        """
        now = time.monotonic()
        if bootstrap_addr not in self.prefill_info_table or now - self._routes.get(bootstrap_addr, 0.0) < after_s:
            return False
        self._routes[bootstrap_addr] = now
        return True

    def _tell_failed(self, number: int, asked: Iterable[Asked], reason: str) -> None:
        if targets := endpoints(asked):
            self.send_kv_status_message(
                targets=targets, bootstrap_room=number, status=KVPoll.Failed, failure_reason=reason
            )

    # The control socket:

    def _serve(self, hear: Callable[[list[bytes]], None]) -> None:
        receive = self._make_worker_recv(self.server_socket)
        while not self._is_over.is_set():
            if (frames := receive()) is None:
                continue
            try:
                if frames[0] != TAG and (size := sum(map(len, frames))) > MOST_CONTROL_BYTES:
                    raise BadMessage(f"control message: {size} bytes, limit {MOST_CONTROL_BYTES}")
                hear(frames)
            except BadMessage as error:
                log.warning("dropped what came on the control socket: %s", error)
            except Exception:
                log.exception("an error on the control socket's thread, which goes on")

    # Prefill's side of it:

    def bind(self, number: int, owner: object, prompt: str, is_open: bool) -> None:
        """Set the digest of the request's prompt. Decode ranks may have asked already, also for another prompt."""
        strangers = self.rooms.bind(number, owner, prompt, is_open)
        self._tell_failed(number, strangers, f"bootstrap_room {number}: {OTHER_PROMPT}")
        self.meet(number)

    def meet(self, number: int) -> None:
        """Let the prefill begin, if the request, all questions for it and our agent are there."""
        if not (self.is_attached or self.is_silent):
            return
        with self._status_lock:
            asked = self.rooms.whole(number)
            if asked is None or self.request_status.get(number) != KVPoll.Bootstrapping:
                return
            self.req_to_decode_prefix_len[number] = min((each.first_token for each in asked), default=0)
            self.update_status(number, KVPoll.WaitingForInput)

    def _hear_prefill(self, frames: list[bytes]) -> None:
        if frames[0] == TAG:
            self._hear_asked(unpack(frames, Asked))
        elif frames[0] == b"ABORT" and (said := AbortNotification.from_zmq(frames)) is not None:
            self._hear_abort(said)
        else:
            raise unknown(frames)

    def _hear_asked(self, asked: Asked) -> None:
        if reason := self.rooms.ask(asked, time.monotonic()):
            self._tell_failed(asked.room, [asked], reason)
        else:
            self.meet(asked.room)

    def _hear_abort(self, said: Any) -> None:
        """Fail the request: the scheduler sees the status and withdraws the offer. Ignored if that rank did not ask."""
        number = said.room
        with self._status_lock:
            if not self.rooms.unask(number, (said.decode_ip, said.decode_port)):
                return
            if self.request_status.get(number) != KVPoll.Success:
                self.fail(number, "Aborted by the decode side.")

    # Decode's:

    def _hear_decode(self, frames: list[bytes]) -> None:
        if frames[0] == TAG:
            said: Asked | Metadata = unpack(frames, Asked | Metadata)
            if isinstance(said, Metadata):
                self.rooms.put(said)
            else:  # it knows us from another role
                self._tell_failed(said.room, [said], "this server decodes: it prefills nothing")
        elif (status := self.parse_kv_status_message(frames)) is not None:
            number, said, rank, reason = status
            if said == KVPoll.Failed:
                self.apply_prefill_status(bootstrap_room=number, status=said, prefill_rank=rank, failure_reason=reason)
        else:
            raise unknown(frames)

    def send_metadata(self, said: Metadata, asked: Iterable[Asked]) -> None:
        """Send the first token to every rank that asked. Raises zmq.ZMQError."""
        for endpoint, port in endpoints(asked):
            address = NetworkAddress(endpoint, port)
            self._send_multipart_locked(address.to_tcp(), pack(said), is_ipv6=address.is_ipv6)

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> Any:
        """Connect to a decode rank. SGLang's own socket silently gives up for good after one refused connection."""
        with self._socket_lock:
            if endpoint not in self._socket_cache:
                made = self._zmq_ctx.socket(zmq.PUSH)
                for option, value in (
                    (zmq.IPV6, int(is_ipv6)),
                    (zmq.LINGER, 0),
                    (zmq.SNDTIMEO, int(SEND_S * 1e3)),
                    (zmq.RECONNECT_IVL, int(RECONNECT_S * 1e3)),
                    (zmq.RECONNECT_IVL_MAX, int(RECONNECT_MOST_S * 1e3)),
                    (zmq.TCP_KEEPALIVE, 1),
                    (zmq.TCP_KEEPALIVE_IDLE, 30),
                    (zmq.TCP_KEEPALIVE_INTVL, 5),
                    (zmq.TCP_KEEPALIVE_CNT, 3),
                ):
                    made.setsockopt(option, value)
                made.connect(endpoint)
                self._socket_send_locks.setdefault(endpoint, threading.Lock())
                self._socket_cache[endpoint] = made
            return self._socket_cache[endpoint]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether the pages of an aborted request may be reused: once no want for its room is open at our agent.

        Only our own agent writes our pages, so we need no acknowledgement from remote ranks.
        """
        self.look()
        return all(owner.bootstrap_room != bootstrap_room for owner in self.owners.values())

    # Who is where:

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        """Register this prefill rank with the bootstrap server, and its agent's address with it."""
        self._bootstrap_url, self._row = url.removesuffix("/route"), payload
        self._registered = self.agent_address
        super()._register_topology_row(url, payload | {"kvbridge_agent": self._registered})

    def _keep_registered(self) -> None:
        """Register an agent that comes late or moves, and tell our agent the addresses of all ranks' agents."""
        asked_at, is_known = 0.0, False
        while not self._is_over.wait(REGISTER_S if is_known else EARLY_S):
            is_known = len(self._ranks) == self._shard.tp_size * self._shard.pp_size
            try:
                if (address := self.agent_address) != self._registered:
                    row = self._row | {"kvbridge_agent": address}
                    requests.put(f"{self._bootstrap_url}/route", json=row, timeout=5).raise_for_status()
                    self._registered = address
                if not is_known or time.monotonic() - asked_at > RANKS_S:
                    asked_at, before, self._ranks = time.monotonic(), self._ranks, self._ask_ranks()
                    if self._ranks and self._ranks != before and (talk := self.talk) is not None:
                        talk.share(self._ranks)
                for number in self.rooms.owned():
                    self.meet(number)  # later pipeline stages poll no sender before its prefill begins
                self.rooms.forget_old(time.monotonic())
            except (requests.RequestException, BadAnswer) as error:
                log.debug("the bootstrap server does not answer: %s", error)
            except Exception:
                log.exception("an error on the registry's thread, which goes on")

    def _ask_ranks(self) -> tuple[Rank, ...]:
        """Raises BadAnswer."""
        found = ranks(self._bootstrap_url.removeprefix("http://"), self._replica)
        return tuple(Rank(tp_rank=one.tp_rank, pp_rank=one.pp_rank, address=one.agent) for one in found if one.agent)

    def ask(self, key: Hashable, address: str, ask_it: Callable[[], Any], bad: Any) -> Any:
        """What a prefill server answers; None while it is to come; `bad` if it is bad or late, which is logged."""
        try:
            return self._questions.answer(key, ask_it, address in self._met)
        except BadAnswer as error:
            log.error("no usable answer from the prefill server at %s: %s", address, error)
            return bad

    def is_asking(self, bootstrap_addr: str) -> bool:
        """Ask what the prefill server is, unless it is known. Returns whether to wait for its answer.

        Its page size, dtype, layout and sizes may be others than ours. The agents decide whether its rows can be
        converted. If they cannot, only the request fails.
        """
        if bootstrap_addr in self.prefill_info_table or not is_asked(bootstrap_addr):
            return False
        answer = self.ask(bootstrap_addr, bootstrap_addr, lambda: server(bootstrap_addr), bad=False)
        if answer:
            info = PrefillServerInfo(**msgspec.structs.asdict(answer))
            self._resolve_rank_mapping(info)
            self.prefill_info_table[bootstrap_addr] = info
            self._met.add(bootstrap_addr)
        return answer is None

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server is known, or is none to ask."""
        if not is_asked(bootstrap_addr) and self.prefill_info_table.stand_in is None:
            sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
            info = PrefillServerInfo(page_size=None, kv_cache_dtype=None, follow_bootstrap_room=True, **sizes)
            self._resolve_rank_mapping(info)
            self.prefill_info_table.stand_in = info
        return bootstrap_addr in self.prefill_info_table

    def replicas(self, address: str, rooms: list[int]) -> dict[str, int]:
        """Which replica of a prefill server has each room, as far as its answer has come. SGLang asks in each turn."""

        def ask_it() -> dict[str, int]:
            pause_s = BAD_ANSWER_S
            try:
                found = replicas(address, rooms)
                pause_s = REPLICAS_S if len(found) < len(rooms) else 0.0
                return found
            finally:
                time.sleep(pause_s)

        return self.ask(("replicas", address), address, ask_it, bad=None) or {}

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Set which prefill ranks this decode rank asks. For the KV its agent asks all agents of the other engine."""
        info.target_tp_ranks = list(shares(self.attn_tp_rank, self.attn_tp_size, info.attn_tp_size))
        info.target_tp_rank = info.target_tp_ranks[0]
        info.target_cp_ranks = [0]
        info.target_pp_ranks = list(range(info.pp_size))
        info.required_dst_info_num = 1
        info.required_prefill_response_num = 1

    def askers(self, prefill_tp_rank: int, prefill_tp_size: int) -> int:
        """How many ranks of our engine ask that prefill rank."""
        mine = range(self.attn_tp_size)
        asking = sum(prefill_tp_rank in shares(rank, self.attn_tp_size, prefill_tp_size) for rank in mine)
        return asking * int(self.pp_size)


def attempt(req: Any, failure: str, read: Callable[[Any], T]) -> tuple[T | None, str]:
    """`read(req)`; or None, and why it failed. An exception on the scheduler's thread would end the server."""
    try:
        return read(req), ""
    except EngineError as error:
        return None, f"{error.code}: {error}"
    except Exception as error:
        log.exception("bootstrap_room %s: %s", req.bootstrap_room, failure)
        return None, f"{failure}: {type(error).__name__}: {error}"


def is_foreign(bootstrap_addr: str) -> bool:
    """Whether another kind of engine prefills: then there is no SGLang server to ask."""
    return bootstrap_addr.rpartition(":")[0] == foreign.HOST


def is_asked(bootstrap_addr: str) -> bool:
    """Whether there is an SGLang server to ask. A receiver of a malformed address has failed already."""
    return not is_foreign(bootstrap_addr) and not why_no_server(bootstrap_addr)


class PrefillServers(dict[str, Any]):
    """Prefill servers by address. Those that are not asked are found, but not listed: SGLang health-checks the list."""

    stand_in: Any = None  # for all that are not asked

    def __contains__(self, address: object) -> bool:
        return self.get(str(address)) is not None

    def __getitem__(self, address: str) -> Any:
        return super().__getitem__(address) if is_asked(address) else self.stand_in

    def get(self, address: str, default: Any = None) -> Any:
        return super().get(address, default) if is_asked(address) else self.stand_in or default


def _thread(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _check_version() -> None:
    from sglang.version import __version__

    if __version__.split("+")[0] != TESTED:
        log.warning("SGLang %s: this adapter was tested with %s", __version__, TESTED)


def _check_parallel(mode: Any, has_states: bool) -> None:
    """Raise OperatorError for a kind of parallelism that is not supported yet."""
    parallel = get_parallel()
    if has_states and linear_attn_tp_size() != parallel.attn_tp_size:
        sizes = f"attention's tensor parallel size {parallel.attn_tp_size}, that of states {linear_attn_tp_size()}"
        raise OperatorError("context_parallel_unsupported", f"{sizes}, must be equal")
    for name in ("attn_dcp_size", *(("attn_cp_size",) if mode == DisaggregationMode.DECODE else ())):
        if getattr(parallel, name) != 1:
            raise OperatorError("context_parallel_unsupported", f"{name}: {getattr(parallel, name)}, must be 1")
    if envs.SGLANG_RUST_SERVER.get():
        raise OperatorError("server_unsupported", "SGLANG_RUST_SERVER: on, must be off: it knows no agents")
    for name in ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split", "enable_cp_tp_group_sharing"):
        if getattr(parallel, name):
            raise OperatorError("context_parallel_unsupported", f"{name}: on, must be off")


def _check_prefix_cache(queue: Any) -> None:
    """Raise OperatorError for a prefill server's that SGLang cannot use on a decode side."""
    scheduler = queue.scheduler
    if not scheduler.tree_cache.supports_prefix_sharing():
        return
    flag = "--disaggregation-decode-enable-radix-cache"
    if not scheduler.server_args.disaggregation_decode_enable_radix_cache:
        reason = (
            f"{flag}: off, must be on, or the prefix cache off (--disable-radix-cache): SGLang would lose its pages"
        )
        raise OperatorError("cache_unsupported", reason)
    try:
        validate_decode_radix_cache(
            model_config=scheduler.model_config,
            token_to_kv_pool=queue.token_to_kv_pool,
            is_hybrid_swa=scheduler.is_hybrid_swa,
            enable_hierarchical_cache=scheduler.enable_hierarchical_cache,
        )
    except ValueError as error:
        raise OperatorError("cache_unsupported", str(error)) from None


def _shard() -> Shard:
    parallel = get_parallel()
    return Shard(
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
    )


def _ranks() -> int:
    """How many ranks step together: those of all replicas that share out attention."""
    parallel = get_parallel()
    return int(parallel.tp_size * parallel.pp_size)


def _replica() -> int:
    """The number of this copy of the model, as the bootstrap server counts."""
    parallel = get_parallel()
    return int(parallel.attn_dp_rank if parallel.dp_size == 1 else parallel.dp_rank or 0)


def _common_id() -> str:
    """An engine id that all ranks of a replica share, and no other engine has."""
    common = get_parallel().world_group.broadcast_object(uuid.uuid4().hex, src=0)
    return f"{common}-{_replica()}"


def _local_rank() -> int:
    """This rank's number among the engine's ranks on this host: `{rank}` in the socket's path."""
    parallel = get_parallel()
    here = max(1, parallel.tp_size * parallel.pp_size // parallel.nnodes)
    rank = (parallel.pp_rank * parallel.tp_size + parallel.tp_rank) % here
    is_copied = parallel.dp_size > 1 and not parallel.enable_dp_attention
    return int(rank) + (int(parallel.dp_rank or 0) * int(here) if is_copied else 0)
