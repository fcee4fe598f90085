"""The scheduler's half of the vLLM connector: which requests are offered or wanted, and what the workers must say.

It speaks only through `ConnectorStep`: messages for the agents, in the order of events. Prefill side: a request with
`do_remote_decode` is offered piece by piece as its prompt is computed, and its blocks are kept until the workers report
them sent. Decode side: a request with `do_remote_prefill` waits for its prompt, and is wanted once it has blocks. A
request that could fetch but will not sends an empty want, so that the other side may free its blocks.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import lcm
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvbridge_proto.common import PREFIX_TOKENS
from kvbridge_proto.engine import (
    Abandon,
    Computed,
    Expect,
    NoOffer,
    Offer,
    Reclaim,
    Release,
    Want,
    Weights,
    Withdraw,
)
from msgspec.structs import replace
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ...cache_kinds import has_window
from ...errors import EngineError
from ...oneline import OneLine, shown
from ..engine.conversation import COMPUTING_S, numbers
from ..engine.kept import KEPT_DEADLINE_S, KEPT_SHARE, KeptPrefix, KeptPrefixes
from ..engine.names import UNNAMED, weights_name
from ..engine.prompts import call, is_in, rendezvous, traceparent
from .block_tables import GroupTables
from .fetches import Fetch, Fetches
from .options import VLLMOptions
from .params import AWAITS_KEPT, FETCHED_BY, GOES_ON, WEIGHTS, Remote, read_remote, read_room
from .pressure import OfferedBlocks, Pressure
from .prompt_trim import can_be_short, shorten
from .rendezvous import (
    has_media_hashes,
    is_for,
    is_offered,
    is_rendezvous,
    message_name,
    offered_rendezvous,
    prefixes,
    prompt_digest,
    prompt_rendezvous,
    wanted_rendezvous,
    why_not_carried,
)
from .roll_call import RollCall
from .step import AgentAddress, AgentAddresses, ConnectorStep, RankKey, Rest
from .token_limits import TokenLimits
from .versions import pcp_size, transfer_tables

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Not under `kvbridge`: by default only vLLM's own loggers are shown. Requests have the names that agents' logs give
# them: an id that a client chose may be of any length, and contain text that is unsafe in a log.
log = init_logger("vllm.kvbridge.scheduler")
log.addFilter(OneLine())

# How long a request that goes on from another engine (AWAITS_KEPT) waits to hear that its KV is kept there: a step of
# that engine, which is busy, and of ours.
AWAITS_KEPT_S = 1.0
SHORT_WARN_S = 10.0
# How many rendezvous ids are remembered because vLLM may later report their call as refused. It does so when a call
# ends, even an admitted one.
IDS_KNOWN = 4096

NAME_AGAIN = "the weights are named (/update_weight_version); kvbridge_resets_keep_weights says that they never change"
PREFILLED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
ANSWERED = (*PREFILLED, RequestStatus.FINISHED_ABORTED)  # by its client, who may go on from what was answered


@dataclass(slots=True)
class PromptOffered:
    """A request whose prompt is offered. `number` is the offer's, 0 until its first piece and after a preemption.

    The other side wants tokens up to `end`, whether the prompt's last token was removed here or not. `tables` are its
    blocks by group; `blocks` counts those that were offered.
    """

    request: Request
    rendezvous: str
    is_named: bool
    end: int
    room: int = 0  # `bootstrap_room`, if a router gave one
    weights: str = UNNAMED  # that it is computed with; UNNAMED if not all of it with the same: then it is not offered
    number: int = 0
    was_preempted: bool = False
    lacking: str = ""  # why it is not offered whole
    tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    has_fetched: bool = False  # rows of it came, or are to come, from others
    awaits_until: float = 0.0  # when it stops waiting for another engine to keep its beginning
    prefixes: tuple[bytes, ...] = ()  # of all that others may keep; empty until they are needed

    @property
    def is_whole(self) -> bool:
        return bool(self.number) and self.tokens == self.request.num_prompt_tokens


@dataclass(slots=True)
class PromptWanted:
    """A request whose prompt is to be fetched; `first_token` is where the local prefix ends.

    `want` is an empty one: it declines the prompt. `shared` is a fetch of the same prompt, for another request, that
    this one waits for or has waited for; `joins` if its rows are to be copied. `was_fetched`: they are in the prefix
    cache, and this one computes the rest. `kept_tokens`: only so many are there, of what another engine keeps.
    """

    want: Want
    prompt_tokens: int
    kept_tokens: int = 0
    first_token: int = 0
    shared: Fetch | None = None
    joins: bool = False
    was_fetched: bool = False


class SchedulerSide:
    """Called by vLLM's scheduler, on its thread."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        options: VLLMOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        assert transfer is not None
        self._options = options
        self._cache = cache
        self._engine_id = transfer.engine_id
        # Ranks of prefill context parallelism count as tensor-parallel ones.
        self._tp_size = parallel.tensor_parallel_size * pcp_size(parallel)
        self._pp_size = parallel.pipeline_parallel_size
        # If a proxy hands over no parameters, only the role tells the sides apart.
        self._offers_all = transfer.kv_role == "kv_producer"
        self._wants_all = transfer.kv_role == "kv_consumer" and bool(options.prefill)
        self._weights = options.weights
        self._limits = TokenLimits(config.model_config)
        self._is_paused = False
        self._compared: str | None = None  # the name of ours under which the log has said that others differ
        self.held = OfferedBlocks(pins=getattr(cache, "needs_kv_cache_zeroing", False))
        self._tables = GroupTables.of(cache, parallel)
        self._has_media_hashes = has_media_hashes(config)
        if not self._has_media_hashes:
            log.warning(
                "images, audio, video: fetched and offered only with prefix caching or mm_processor_cache_gb > 0"
            )
        self._numbers = numbers()
        self._agents = RollCall(self._tp_size * self._pp_size, clock)
        self._sending: dict[str, PromptOffered] = {}
        self._receiving: dict[str, PromptWanted] = {}
        self._kept = KeptPrefixes()
        self._looked_up: set[str] = set()  # requests that fetch no (more) of what others keep
        self._outdated: set[str] = set()  # requests that had begun when the weights changed: their rows are of both
        self._came: list[str] = []  # requests of which we know since the last step what to fetch
        # Requests whose prompt will be computed here: its tokens, and why.
        self._unfetched: dict[str, tuple[int, str]] = {}
        self._fetches = Fetches(lambda request: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
        self._caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._block_tokens = max(group.block_tokens for group in self._tables.groups)
        self._whole_tokens = lcm(*(group.block_tokens for group in self._tables.groups))
        # With several draft modules, rows of the last tokens come from guesses; windows begin where one token is left.
        ahead = getattr(config, "num_prefill_lookahead_tokens", 0)
        self._last_tokens = 1 if self._tables.has_windows else max(1, ahead)
        self._pressure = Pressure(self._tables, config.scheduler_config, self.held)
        self._warned_at = float("-inf")
        self._known_ids: deque[str] = deque(maxlen=IDS_KNOWN)
        self._step = ConnectorStep()
        self._clock = clock
        self._rest = Rest(parallel.data_parallel_size == 1, deque(maxlen=config.max_concurrent_batches))

    # Agents:

    def agents_are(self, addresses: dict[RankKey, AgentAddress]) -> None:
        if self._agents.update(addresses):
            self._kept.told_by(self._agents.first.address)
            if self._agents.is_all:
                self._step.before.append(self._agents.directory())

    @property
    def has_messages(self) -> bool:
        """Whether a step is due only to tell the workers something. One step clears it, so vLLM does not spin on it.

        A paused vLLM makes no step for requests that queue, whose offers must be held nevertheless.
        """
        return bool(self._step.before or self._step.after) or any(
            request_id in self._receiving for request_id in self._came
        )

    @property
    def has_cached_windows(self) -> bool:
        """Whether some layers keep the rows of the last tokens only, and vLLM's prefix cache has them."""
        return any(has_window(each.kind) and not each.is_never_cached for each in self._tables.groups)

    # Free blocks:

    def bind_pool(self, pool: BlockPool) -> None:
        self._pressure.free_blocks = pool.get_num_free_blocks
        self.held.bind(pool)

    def may_free_blocks(self) -> bool:
        """Whether a running request that gets no block should wait a moment instead of being preempted."""
        return self._pressure.should_wait(self._clock()) or self._is_unpinning()

    def _is_unpinning(self) -> bool:
        """Whether pinned blocks will be free in a step or two: preempting more requests would not help."""
        gone = (each for each in self._sending.values() if each.request.status == RequestStatus.PREEMPTED)
        return self.held.pins and (self.held.is_unpinning or any(each.is_whole for each in gone))

    # Weights:

    def cache_is_reset(self) -> None:
        """vLLM resets its prefix cache, perhaps because its weights have changed: what was computed must not be used.

        vLLM may not be able to, but then it says so, and its user tries again.
        """
        if self._options.resets_keep_weights:
            self._give_up_held()
        elif self._weights != UNNAMED:
            log.warning("the prefix cache is reset: prompts are neither offered nor fetched until %s", NAME_AGAIN)
            self._reweigh(UNNAMED)

    def weights_are(self, version: str) -> None:
        """A user names the weights that rows are computed with from now on."""
        if (name := weights_name(version)) != self._weights:
            log.info("weights: %a, before %a", name, self._weights)
            self._reweigh(name)

    def _reweigh(self, weights: str) -> None:
        """What is offered or fetched belongs to other weights than what is computed from now on."""
        self._weights = weights
        for request_id, receiving in self._receiving.items():
            reason = "the weights have changed"
            self._step.before.append(Abandon(number=receiving.want.number, reason=reason))
            if not receiving.kept_tokens:
                self._unfetched[request_id] = receiving.prompt_tokens, "other_weights"
            self._stop_waiting(request_id, receiving, reason)
        self._receiving.clear()
        self._fetches.end_all()
        self._outdated |= self._pressure.requests
        for sending in self._sending.values():
            sending.weights = UNNAMED if sending.tables or sending.has_fetched else weights
        self._step.before.append(Weights(version=weights))

    def pauses(self) -> None:
        """vLLM pauses until `resumes`. It waits until no block is held, so what nobody fetches yet is given up.

        So is what is held from now on: a pause with mode `wait` lets running prompts end.
        """
        self._is_paused = True
        self._give_up_held()

    def resumes(self) -> None:
        self._is_paused = False

    def _give_up_held(self) -> None:
        if self.held:
            self._step.before.append(Release())

    # A request's life:

    def new_request(self, request: Request) -> None:
        self._pressure.came(request.request_id, request.num_prompt_tokens)
        self._limits.apply(request)
        self._classify(request)

    def _classify(self, request: Request) -> None:
        """Decide whether the request is to be offered or fetched."""
        given = request.kv_transfer_params
        params = given if isinstance(given, dict) else {}  # `vllm_xargs` may put anything there
        if getattr(request, "abort_immediately", False):
            if params.get("do_remote_prefill"):
                self._refused(request, params)
            elif params.get("do_remote_decode"):
                self._call_ended(params)
            return
        is_unnamed = not request.kv_transfer_params and (self._offers_all or self._wants_all)
        is_named = params.get("do_remote_decode") or params.get("do_remote_prefill")
        if (is_named or is_unnamed) and (reason := why_not_carried(request, self._has_media_hashes)):
            log.debug("%s: %s: computed here", message_name(request.request_id), reason)
            if not params.get("do_remote_decode") and not self._offers_all:
                self._computed_here(request, "does_not_travel")
            return
        if params.get("do_remote_decode"):
            self._new_named(request, params)
        elif params.get("do_remote_prefill"):
            self._find(request, params)
        elif is_unnamed:
            self._new_unnamed(request)
        elif request.skip_reading_prefix_cache:
            self._computed_here(request, "reads_all")
        else:
            self._computed_here(request, "untagged")

    def _new_named(self, request: Request, params: dict[str, Any]) -> None:
        """A prompt that the parameters have us offer."""
        name, end = message_name(request.request_id), request.num_prompt_tokens - 1
        try:
            room = read_room(params)
        except EngineError as error:
            log.warning("%s: %s: not offered", name, error)
            return
        digest = prompt_digest(request)
        rendezvous_id = rendezvous(room, digest) if room else offered_rendezvous(request.request_id, digest)
        if self._tables.has_windows and request.max_tokens != 1:
            # The blocks of a window are used again as soon as another token is computed.
            reason = f"max_tokens {request.max_tokens}, must be 1"
            log.warning("%s: %s: not offered", name, reason)
            return self._offer_nothing(request, rendezvous_id, reason)
        # In a router's room the other engine may continue after the prompt's last token: it needs the whole prompt. Of
        # windows a vLLM there gets enough of that, mostly. A state is either before that token or after it.
        is_whole = bool(room) and (not self._tables.has_states or params.get(FETCHED_BY) == GOES_ON)
        if self._tables.has_windows and not is_whole and can_be_short(request):
            shorten(request)
        elif not self._tables.outlives(request.num_prompt_tokens):
            if not is_whole:
                self._log_given_up(request)
                return self._offer_nothing(request, rendezvous_id, "vLLM keeps too little for the prompt's last token")
            # Another engine goes on after the whole prompt, and needs no more of a window than vLLM keeps for that.
            # A vLLM there needs more: its agent says so, and it computes the prompt.
            end = request.num_prompt_tokens
        until = self._clock() + AWAITS_KEPT_S if params.get(AWAITS_KEPT) else 0.0
        offered = PromptOffered(request, rendezvous_id, True, end, room, weights=self._weights, awaits_until=until)
        self._sending[request.request_id] = offered

    def _find(self, request: Request, params: dict[str, Any]) -> None:
        """Under which rendezvous id to fetch what the parameters name, if it is this prompt's."""
        request_id, name = request.request_id, message_name(request.request_id)
        try:
            remote = read_remote(params)
        except EngineError as error:
            log.warning("%s: %s: computed here", name, error)
            self._computed_here(request, "bad_params")
            return
        if remote.weights not in (None, self._weights):
            self._note_other_weights(name, remote.weights)
            self._computed_here(request, "other_weights")
            return
        told = remote.request, request_id, remote.room
        rendezvous_id = wanted_rendezvous(*told, prompt_digest(request))
        self._known_ids.append(rendezvous_id or remote.request)
        if remote.room:  # all prompts of a call are told the first one's name
            self._known_ids.append(remote.request)
        if rendezvous_id is not None:
            return self._receive(request, rendezvous_id, remote, is_offered(*told))
        log.warning(
            "%s: prefilled for another prompt, adapter, media or salt (%a): computed here", name, remote.request
        )
        self._computed_here(request, "other_prompt")
        if is_for(*told):
            self._step.before.append(self._nothing_of(request, remote.request, remote, is_offered=True))

    def _note_other_weights(self, name: str, theirs: str | None) -> None:
        """Once for each name of ours: while weights are updated, all prompts are of others for a while."""
        is_known, self._compared = self._compared == self._weights, self._weights
        level = logging.DEBUG if is_known else logging.INFO
        log.log(level, "%s: weights: prefill %a, decode %a: computed here", name, theirs, self._weights)

    def _nothing_of(self, request: Request, rendezvous_id: str, remote: Remote, is_offered: bool) -> Want:
        """An empty want: nothing is needed, so the other side may free its blocks. Nobody waits for its answer."""
        number = next(self._numbers)
        return Want(
            number=number,
            request=message_name(request.request_id),
            rendezvous=rendezvous_id,
            sender=remote.sender,
            first_token=0,
            end_token=0,
            blocks=(),
            deadline_s=self._options.deadline_s,
            traceparent=_traceparent(request),
            is_offered=is_offered,
            offered_to=remote.attachment if is_offered else "",
            common=str(number),
        )

    def _receive(self, request: Request, rendezvous_id: str, remote: Remote, is_offered: bool) -> None:
        """Fetch the prompt, unless nobody can have its rows, or vLLM must compute every token of it itself.

        The latter is so for prompt_logprobs and some pooling: vLLM 0.26 would answer with unfilled memory.
        """
        nothing = self._nothing_of(request, rendezvous_id, remote, is_offered)
        if self._weights == UNNAMED:
            self._computed_here(request, "other_weights")
        elif request.skip_reading_prefix_cache:
            self._computed_here(request, "reads_all")
            self._step.before.append(nothing)
        else:
            self._awaits(request, PromptWanted(nothing, request.num_prompt_tokens))

    def _awaits(self, request: Request, receiving: PromptWanted) -> None:
        self._receiving[request.request_id] = receiving
        self._came.append(request.request_id)

    def _refused(self, request: Request, params: dict[str, Any]) -> None:
        """A call with these params ended before all of it was admitted: nobody will fetch what they name.

        vLLM (0.26 to 0.33) reports that with a request of one token under a name of its own. It does the same when a
        client hangs up on an admitted call, but then each request of the call has already been handled itself.
        """
        try:
            remote = read_remote(params)
        except EngineError:
            return
        is_one = is_in(remote.request, remote.room) if remote.room else is_rendezvous(remote.request)
        if is_one and remote.request not in self._known_ids:
            self._known_ids.append(remote.request)
            self._step.before.append(self._nothing_of(request, remote.request, remote, is_offered=True))

    def _call_ended(self, params: dict[str, Any]) -> None:
        """A call that was to offer in a room was refused, or given up (`BootstrapRooms`): nobody need wait for more."""
        try:
            room = read_room(params)
        except EngineError:
            return
        status = params.get("status")
        reason = f"prefill answered the call with status {shown(status)}" if status else "prefill's call was given up"
        if room:
            self._step.before.append(NoOffer(call=call(room), code="prefill_refused", reason=reason))

    def _new_unnamed(self, request: Request) -> None:
        rendezvous_id = prompt_rendezvous(prompt_digest(request))
        if self._wants_all:
            self._receive(request, rendezvous_id, Remote("", self._options.prefill), is_offered=False)
        elif request.max_tokens == 1 and self._tables.outlives(request.num_prompt_tokens):
            end = request.num_prompt_tokens - 1
            self._sending[request.request_id] = PromptOffered(request, rendezvous_id, False, end, weights=self._weights)
        elif request.max_tokens == 1:
            self._log_given_up(request)
            self._step.before.append(self._nothing(rendezvous_id, request))

    def _log_given_up(self, request: Request) -> None:
        what = "the state before" if self._tables.has_states else "the first block of a window with"
        tokens = request.num_prompt_tokens
        log.info(
            "%s: not offered: vLLM gives up %s the last of %d tokens", message_name(request.request_id), what, tokens
        )

    def _nothing(self, rendezvous_id: str, request: Request) -> Offer:
        """An offer of nothing: the other side waits under this id, and must learn to compute itself. Holds no block."""
        return Offer(
            number=next(self._numbers),
            rendezvous=rendezvous_id,
            request=message_name(request.request_id),
            tokens=0,
            blocks=(),
            is_last=True,
            hold_s=self._options.hold_s,
        )

    def _offer_nothing(self, request: Request, rendezvous_id: str, reason: str) -> None:
        """It will not be offered (again): tell all who wait for it, or will."""
        offer = self._nothing(rendezvous_id, request)
        self._step.before += [offer, Withdraw(number=offer.number, reason=reason)]

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How much of the prompt to fetch beyond `computed`: all but its last token. None: ask again next step.

        With 0 vLLM computes it, as it does without an agent. It always computes the last token itself, to have what
        it samples from (since 0.32 it takes one token off a hit of the whole prompt). Fetching it would rewrite a block
        that the prefix cache shares. The draft's row of that token depends on the next one, which only the decode side
        has. Where a draft model has several modules, each looks one token further, so as many are computed again.
        """
        receiving = self._receiving.get(request.request_id)
        if receiving is not None or request.request_id in self._sending or self._agents.has_heard_kept:
            self._step.is_roll_call |= self._agents.begin_if_due()
            if self._agents.is_asking:
                return None, False
        if receiving is None and self._awaits_kept(request, computed):
            return None, False
        if receiving is None:
            receiving = self._look_up(request)
        if receiving is None:
            return 0, False
        receiving.first_token, receiving.joins = computed, False
        if not self._agents.is_all:
            return 0, False
        count = request.num_prompt_tokens - self._last_tokens - computed
        if receiving.kept_tokens:
            return self._matched_kept(request, receiving, min(count, receiving.kept_tokens - computed))
        if (fetch := self._fetches.find(receiving.want, receiving.shared)) is not None:
            receiving.shared = fetch
            can_join = count > 0 and fetch.brings(computed, computed + count) and self._tables.keeps_all
            if self._fetches.is_needed(fetch) and (self._caches_prefixes or not can_join):
                fetch.waiting.add(request.request_id)
                return None, False
            receiving.joins = can_join
        shared = receiving.shared
        was_fetched = shared is not None and (shared.is_good or count < self._block_tokens)
        receiving.was_fetched = was_fetched and not receiving.joins
        return (count, True) if count > 0 and not receiving.was_fetched else (0, False)

    def _matched_kept(self, request: Request, receiving: PromptWanted, count: int) -> tuple[int | None, bool]:
        """How many of `count` tokens to fetch of what another engine keeps. None while another request fetches them."""
        if receiving.want.rendezvous not in self._kept or count < PREFIX_TOKENS:
            return 0, False
        fetch = self._fetches.find(receiving.want, receiving.shared) if self._caches_prefixes else None
        if fetch is not None and self._fetches.is_needed(fetch):
            receiving.shared = fetch
            fetch.waiting.add(request.request_id)
            return None, False
        return count, True

    def _awaits_kept(self, request: Request, computed: int) -> bool:
        """Whether this request goes on from what another engine is about to keep, and we have not heard of it yet."""
        sending = self._sending.get(request.request_id)
        if sending is None or request.request_id in self._looked_up or self._clock() >= sending.awaits_until:
            return False
        most = (request.num_prompt_tokens - self._last_tokens) // PREFIX_TOKENS * PREFIX_TOKENS
        if self._weights == UNNAMED or not self._agents.is_all or computed + PREFIX_TOKENS > most:
            return False
        found = self._find_kept(request)
        return found is None or found.tokens < most

    def _find_kept(self, request: Request) -> KeptPrefix | None:
        sending = self._sending.get(request.request_id)
        found = sending.prefixes if sending is not None else ()
        found = found or prefixes(request, request.num_prompt_tokens - self._last_tokens)
        if sending is not None:
            sending.prefixes = found
        return self._kept.find(found)

    def _look_up(self, request: Request) -> PromptWanted | None:
        """What another engine keeps of a prompt that we are to compute, such as an earlier turn of its conversation."""
        if not self._kept or request.request_id in self._looked_up or self._weights == UNNAMED:
            return None
        self._looked_up.add(request.request_id)
        if request.skip_reading_prefix_cache:
            return None
        if (found := self._find_kept(request)) is None:
            return None
        want = self._nothing_of(request, found.rendezvous, Remote(found.rendezvous, found.sender), is_offered=True)
        want = replace(want, deadline_s=min(want.deadline_s, KEPT_DEADLINE_S))
        # vLLM takes every block of a fetch for whole.
        whole = found.tokens - found.tokens % self._whole_tokens
        receiving = PromptWanted(want, request.num_prompt_tokens, kept_tokens=whole)
        self._awaits(request, receiving)
        return receiving

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        self._pressure.has_blocks(request.request_id)
        receiving = self._receiving.pop(request.request_id, None)
        if receiving is None:
            return
        self._looked_up.add(request.request_id)
        # In vLLM's own record too: a retry after a failed receive must not fetch again.
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False
        want, shared = receiving.want, receiving.shared
        joins = receiving.joins and external_tokens > 0
        if not joins:
            self._stop_waiting(request.request_id, receiving, "not needed")
        if receiving.kept_tokens and external_tokens == 0:  # our own prefix cache has most of it
            return self._step.before.append(Abandon(number=want.number, reason="not needed"))
        if external_tokens == 0:
            self._step.before.append(want)
            if receiving.was_fetched:
                self._computed_here(request, "already_fetched")
            elif not self._agents.is_all:
                self._computed_here(request, "agent_missing")
            return
        if (sending := self._sending.get(request.request_id)) is not None:
            sending.has_fetched = True
        first, end = receiving.first_token, receiving.first_token + external_tokens
        table = transfer_tables(self._cache, blocks.get_block_ids())
        blocks = self._tables.wanted(table, first, end)
        filled = replace(want, first_token=first, end_token=end, blocks=blocks)
        if joins and shared is not None:
            filled = replace(filled, number=next(self._numbers))
            self._fetches.join(request, filled, shared, want)
            self._step.joined[filled.number] = shared.want.number
        else:
            self._fetches.begin(request, filled, is_kept=bool(receiving.kept_tokens))
        self._step.before.append(filled)
        self._step.awaited[filled.number] = request.request_id

    def _stop_waiting(self, request_id: str, receiving: PromptWanted, reason: str) -> None:
        if receiving.shared is not None:
            self._step.before += self._fetches.stop_waiting(request_id, receiving.shared, reason)

    def _computed_here(self, request: Request, reason: str) -> None:
        """Report that it is computed here, once it begins (`_follow`)."""
        self._unfetched[request.request_id] = request.num_prompt_tokens, reason

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must stay, and what a proxy should hand to the decode side, if anything.

        `tables` are the request's, those of groups that do not travel included.
        """
        request_id = request.request_id
        self._pressure.ended(request_id)
        self._unfetched.pop(request_id, None)
        # vLLM counts tokens as computed while they are fetched.
        may_keep = request_id not in self._outdated and request_id not in self._fetches
        self._outdated.discard(request_id)
        self._looked_up.discard(request_id)
        if (receiving := self._receiving.pop(request_id, None)) is not None:  # it never got blocks
            abandon = Abandon(number=receiving.want.number, reason="not needed")
            self._step.before.append(abandon if receiving.kept_tokens else receiving.want)
            self._stop_waiting(request_id, receiving, "not needed")
        self._step.before += self._fetches.ended(request_id, request.status.name.lower())
        sending = self._sending.pop(request_id, None)
        if sending is not None and not sending.number and (sending.is_named or sending.was_preempted):
            self._offer_nothing(request, sending.rendezvous, sending.lacking or request.status.name.lower())
        if sending is None and may_keep and (number := self._keep(request, tables)):
            self._hold(request_id, number, tables)
            return True, None
        if sending is None or not (sending.number or (self._agents.is_all and sending.weights == UNNAMED)):
            return False, None
        params = None  # without an offer they only say why: that the weights have no name
        is_told = sending.is_named or self._options.untagged_params
        if is_told and request.status in PREFILLED and (sending.is_whole or sending.weights == UNNAMED):
            params = self._params(sending)
        if not sending.number:
            return False, params
        self._hold(request_id, sending.number, tables)
        self.held.unpin(sending.number)
        if request.status in PREFILLED and sending.is_whole:
            if may_keep and (number := self._keep(request, tables)):
                self._hold(request_id, number, tables)
            if self._is_paused:
                self._give_up_held()
        else:
            # Blocks stay even now: the agent may read them until it answers the withdrawal.
            reason = sending.lacking or request.status.name.lower()
            self._step.before.append(Withdraw(number=sending.number, reason=reason))
        return True, params

    def _hold(self, request_id: str, number: int, tables: Sequence[Sequence[int]]) -> None:
        self._step.held[number] = request_id
        self.held.hold(request_id, chain.from_iterable(tables))

    def _keep(self, request: Request, tables: Sequence[Sequence[int]]) -> int:
        """Offer the KV of a prompt and its answer to all that begins so. Returns the offer's number, 0 if not kept.

        So is one that its client has ended: another engine may go on with it. Not without the KV of the last token, nor
        of those before it for which a draft's rows are guesses. Windows and states are those of the answer's end, which
        a prompt that goes on from earlier has no use for.
        """
        if not (self._options.return_s and request.status in ANSWERED):
            return 0
        if not request.num_output_tokens:  # its prompt may not have come
            return 0
        if not (self._tables.keeps_all and self._agents.is_all and self._weights != UNNAMED) or self._is_paused:
            return 0
        # After a preemption not all of it may be computed again.
        tokens = min(request.num_tokens - self._last_tokens, request.num_computed_tokens)
        found, most_blocks = prefixes(request, tokens), self.held.most(KEPT_SHARE)
        if not found or sum(map(len, tables)) > most_blocks:
            return 0
        ours = transfer_tables(self._cache, tables)
        blocks = self._tables.offered(ours, [0] * len(ours), tokens, None)
        offer = Offer(
            number=next(self._numbers),
            rendezvous=f"kept-{uuid.uuid4().hex}",
            request=message_name(request.request_id),
            tokens=tokens,
            blocks=blocks,
            is_last=True,
            hold_s=self._options.return_s,
            prefixes=found,
            most_kept=most_blocks,
        )
        self._step.after.append(offer)  # behind drafts that the GPU may still compute
        return offer.number

    def _params(self, sending: PromptOffered) -> dict[str, Any]:
        first = self._agents.first
        agent = urlsplit(first.address)
        given = {"remote_key": agent.fragment, "bootstrap_room": sending.room, "remote_attachment": first.attachment}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": sending.rendezvous,
            "remote_host": agent.hostname,
            "remote_port": agent.port,
            "remote_block_ids": [],
            WEIGHTS: sending.weights,
            "remote_num_tokens": sending.tokens,
            "tp_size": self._tp_size,
            "pp_size": self._pp_size,
        } | {name: value for name, value in given.items() if value}

    # A step:

    def next_step(self, output: SchedulerOutput) -> ConnectorStep:
        self._agents.step_begins()
        self.held.step_begins()
        for request_id in output.preempted_req_ids or ():
            self._withdraw(request_id)
        self._follow(output)
        self._reclaim(self._clock())
        if self._came:
            self._expect_queued()
        self._fetches.forget_used()
        for request_id, count in output.num_scheduled_tokens.items():
            sending = self._sending.get(request_id)
            if sending is not None and not sending.is_whole:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                self._offer_computed(sending, sending.request.num_computed_tokens, count - drafts, drafts)
        step, self._step = self._step, ConnectorStep()
        step.rest_s = self._rest.begins(output.total_num_scheduled_tokens > 0, is_fetching=bool(self._fetches))
        step.is_used = self._rest.is_used
        return step

    def _expect_queued(self) -> None:
        """Have the other side hold what requests will want that have got no blocks in the step in which that was known.

        Even without agents: one that attaches while the request queues is told.
        """
        came, self._came = self._came, []
        for receiving in [self._receiving[request_id] for request_id in came if request_id in self._receiving]:
            want = receiving.want
            self._step.before.append(Expect(number=want.number, rendezvous=want.rendezvous, sender=want.sender))

    def _reclaim(self, now: float) -> None:
        """Have agents release prompts that nobody fetches while other requests wait for blocks."""
        short = self._pressure.short_of(now)
        if not short:
            return
        self._step.before.append(Reclaim(blocks=short))
        if now - self._warned_at >= SHORT_WARN_S:
            self._warned_at = now
            log.warning("short of %d blocks: %s; those that nobody asked for are released", short, self.held)

    def _follow(self, output: SchedulerOutput) -> None:
        """Track the blocks of the requests that we offer, from what the workers are told (0.26 has no other way)."""
        for request_id in output.preempted_req_ids or ():
            self._pressure.preempted(request_id)
        for new in output.scheduled_new_reqs:
            self._pressure.has_blocks(new.req_id)
            tokens, reason = self._unfetched.pop(new.req_id, (0, ""))
            # The last token does not count: every engine computes it.
            if (tokens := tokens - 1 - new.num_computed_tokens) > 0:
                self._step.before.append(Computed(tokens=tokens, reason=reason))
            if (sending := self._sending.get(new.req_id)) is not None:
                sending.tables = transfer_tables(self._cache, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            self._pressure.has_blocks(request_id)
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sending = self._sending.get(request_id)
            if sending is None or blocks is None:
                continue
            more = transfer_tables(self._cache, blocks)
            if request_id in cached.resumed_req_ids or not sending.tables:
                sending.tables = more
            else:
                sending.tables = [table + ids for table, ids in zip(sending.tables, more, strict=True)]

    def _withdraw(self, request_id: str) -> None:
        """Preempted: its blocks already belong to others, or are pinned. Its offer is void; a later one begins anew."""
        sending = self._sending.get(request_id)
        if sending is None or not sending.number:
            return
        self._step.before.append(Withdraw(number=sending.number, reason="preempted", comes_again=True))
        self.held.withdrawn(sending.number)
        sending.number, sending.tokens, sending.blocks = 0, 0, []
        sending.was_preempted = True

    def _offer_computed(self, sending: PromptOffered, computed: int, count: int, drafts: int) -> None:
        """This step computes part of the prompt. If that lacks something, `finished` withdraws what was offered."""
        if (lacking := self._lacking(sending, computed, count, drafts)) and not sending.lacking:
            log.info("%s: not offered whole: %s", message_name(sending.request.request_id), lacking)
        sending.lacking = lacking
        if self._agents.is_all and not lacking and sending.weights != UNNAMED:
            self._offer(sending, min(computed + count, sending.request.num_prompt_tokens))

    def _offer(self, sending: PromptOffered, tokens: int) -> None:
        """Offer the prompt up to `tokens`, once this step's forward has computed them, with blocks not offered yet."""
        request = sending.request
        if tokens <= sending.tokens:
            return
        if is_new := not sending.number:
            sending.number = next(self._numbers)
            sending.blocks = [0] * len(sending.tables)
        sending.tokens = tokens
        if sending.is_whole and self.held.pins:  # part of a prompt is no use, whatever was read of it
            whole = self._tables.offered(sending.tables, [0] * len(sending.tables), tokens, sending.end)
            self.held.pin(sending.number, whole)
        pieces = self._tables.offered(sending.tables, sending.blocks, tokens, sending.end if sending.is_whole else None)
        for piece in pieces:
            sending.blocks[piece.group] = piece.first + len(piece.ids)
        self._step.after.append(
            Offer(
                number=sending.number,
                rendezvous=sending.rendezvous,
                request=message_name(request.request_id),
                tokens=tokens,
                blocks=pieces,
                is_last=sending.is_whole,
                is_more=not is_new,
                hold_s=self._options.hold_s if sending.is_whole else COMPUTING_S,
                traceparent=_traceparent(request),
            )
        )

    def _lacking(self, sending: PromptOffered, computed: int, count: int, drafts: int) -> str:
        """What this step, or one before, does not leave of the prompt."""
        is_last = computed + count >= sending.request.num_prompt_tokens
        if computed and sending.lacking:
            return sending.lacking
        if not computed and count == 1 and self._tables.is_uncleared:
            return "vLLM takes a first step of one token for a decode, and goes on from what the state's block held"
        if is_last and not self._tables.has_windows_of(sending.tables, sending.end):
            return "vLLM's prefix cache had only part of a window"
        if is_last and drafts and not computed and self._tables.has_states:
            return "vLLM pads the step of a single token, and takes that back only where a state was before"
        return ""

    def step_over(self) -> None:
        """The workers have reported for this step."""
        self._rest.step_is_over()
        self.held.step_is_over()
        self._agents.step_is_over()

    def heard(self, output: KVConnectorOutput) -> None:
        """What the workers report, before the scheduler acts on it."""
        failed = getattr(output, "failed_recving", None) or set(), output.invalid_block_ids or set()
        for request_id, fetch in self._fetches.failed(*failed):
            if fetch.is_kept:
                self._kept.gone(fetch.want.rendezvous)  # the next request is not to wait for it, too
            else:  # perhaps it went to another engine, which keeps it, or prefill itself does
                self._looked_up.discard(request_id)
        for request_id in output.finished_recving or ():
            over, returned = self._fetches.reported(request_id)
            self._step.reported += over
            self._step.before += returned
        for request_id in output.finished_sending or ():
            self.held.free(request_id)
        said = output.kv_connector_worker_meta
        if isinstance(said, AgentAddresses):
            self.agents_are(said.addresses)
            for kept in said.kept:
                self._agents.has_heard_kept = True
                self._kept.heard(kept)
            if len(said.addresses) == self._agents.ranks:
                self._agents.answered()


def _traceparent(request: Request) -> str:
    """vLLM's own span of the request, or what its client sent."""
    return traceparent(getattr(request, "trace_headers", None), request.kv_transfer_params)
