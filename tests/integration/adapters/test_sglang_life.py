"""SGLang's senders and receivers from beginning to end, beside a conversation whose other side the test plays."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge_proto.engine import Expect, NoOffer, Offer, Release, Want

from kvbridge.adapters.engine.conversation import Ended
from kvbridge.adapters.sglang.kept_fetches import KeptFetches
from kvbridge.adapters.sglang.messages import Asked
from kvbridge.adapters.sglang.metadata import Metadata
from kvbridge.adapters.sglang.rooms import Rooms
from kvbridge.adapters.sglang.servers import Questions

pytestmark = pytest.mark.sglang

ROOM, PAGE, ADDRESS = 7, 16, "10.0.0.1:8998"
FAILED, BOOTSTRAPPING, WAITING, SUCCESS = 0, 1, 2, 4


def attached() -> Any:
    return SimpleNamespace(agent=SimpleNamespace(address="tcp://10.0.0.1:7700"))


class Talk:
    """A conversation's surface: what was said, and what a test lets end."""

    def __init__(self) -> None:
        self.attached: Any = attached()
        self.address = self.attached.agent.address
        self.open: dict[int, str] = {}
        self.numbers = count(1)
        self.said: list[Any] = []
        self.news: list[Ended] = []
        self.memory = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.rested_s = 0.0

    is_waiting = False

    def send(self, message: Any) -> None:
        if isinstance(message, Release):
            return self._release()
        if isinstance(message, Offer) or (isinstance(message, Want) and message.end_token > message.first_token):
            self.open[message.number] = message.request
        self.said.append(message)

    def new_number(self) -> int:
        return next(self.numbers)

    offer = want = send

    def _release(self) -> None:
        """At once, for a test's sake. A prompt that is still computed is not given up."""
        whole = {each.number for each in self.said if isinstance(each, Offer) and each.is_last}
        for number in sorted(whole & set(self.open)):
            self.end("offer", "reclaimed", number)

    def rest(self, seconds: float) -> None:
        self.rested_s += seconds

    def withdraw(self, number: int, reason: str, comes_again: bool = False) -> None:
        self.said.append(("withdraw", number))

    def abandon(self, number: int, reason: str) -> None:
        self.said.append(("abandon", number))

    def wait_for_readers(self, offers: list[int]) -> None:
        for number in offers:
            del self.open[number]

    def is_open(self, number: int) -> bool:
        return number in self.open

    def end(self, kind: Any, code: str = "", number: int = 0, other_scores: bool = False) -> None:
        """This, or what has been open for longest."""
        number = number or min(self.open)
        self.news.append(Ended(number, self.open.pop(number), kind, code, f"because of {code}", other_scores))

    def turn(self) -> list[Ended]:
        news, self.news = self.news, []
        return news


@pytest.fixture(autouse=True)
def one_rank(sglang: None) -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(num_dp_ranks=1, attn_cp_rank=0):
        yield


def manager(role: str) -> Any:
    """A manager that was not made: no sockets, no threads, no model. `told` has what it sent."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    from kvbridge.adapters.sglang.manager import KVBridgeManager

    made = object.__new__(KVBridgeManager)
    made.rooms, made.talk, made.told = Rooms(), Talk(), []
    made.owners, made._look_at = {}, 0.0
    made.kept, made.held = KeptFetches(made), None
    made._weights, made.next_weights, made.weights_changes = "default", "", 0
    made.server_args, made._is_over = SimpleNamespace(enable_pd_role_switch=False), threading.Event()
    made.gives_up_at_once, made._questions, made._met = False, Questions(), set()
    made._status_lock, made._routes, made.prefill_info_table = threading.Lock(), {}, {ADDRESS: object()}
    made.queue = SimpleNamespace(scheduler=SimpleNamespace(_sched_idled=False), token_to_kv_pool=None)
    made.queue.metadata_buffers = SimpleNamespace()
    made.options = SimpleNamespace(hold_s=30.0)
    made.disaggregation_mode, made.is_decoder = DisaggregationMode(role), role == "decode"
    made.request_status, made.failure_records, made.failure_lock = {}, {}, threading.Lock()
    made.transfer_infos, made.req_to_decode_prefix_len = {}, {}
    made._staging_outstanding, made._deferred_ack_targets, made._deferred_ack_poisoned_rooms = {}, {}, set()
    made.addr_to_rooms_tracker, made.prefill_response_tracker = {ADDRESS: set()}, {}
    made.required_prefill_response_num_table, made.connection_pool = {}, {}
    made.connection_lock = threading.Lock()
    made.is_dummy_cp_rank = made.enable_all_cp_ranks_for_transfer = False
    made.kv_shard_size = made.pp_size = made.attn_tp_size = 1
    made.attn_tp_rank, made.attn_dp_rank = 0, 0
    made.bootstrap_timeout = made.waiting_timeout = 300
    made.pp_group = SimpleNamespace(is_last_rank=True)
    row = np.arange(8, dtype=np.uint8)
    made.kv_args = SimpleNamespace(page_size=PAGE, aux_data_ptrs=[row.ctypes.data], aux_item_lens=[4], row=row)
    made.kv_args.state_types = []
    made.local_ip, made.rank_port = "10.0.0.2", 4000
    made.digest = lambda req: req.prompt
    made.send_kv_status_message = lambda **said: made.told.append((said["targets"], said["failure_reason"]))
    made.send_metadata = lambda said, asked: made.told.append(said)
    return made


@pytest.fixture
def prefill() -> Any:
    return manager("prefill")


@pytest.fixture
def decode() -> Any:
    return manager("decode")


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def req(prompt: str = "ab", told: dict[str, Any] | None = None) -> Any:
    """`told`: what a router says of another engine's half."""
    return SimpleNamespace(
        rid="a request's id",
        prompt=prompt,
        input_embeds=None,
        origin_input_ids=[0] * 48,
        sampling_params=SimpleNamespace(custom_params={"kvbridge": told, "traceparent": TRACE} if told else None),
        return_logprob=False,
        bootstrap_room=ROOM,
        kv=SimpleNamespace(req_pool_idx=1),
    )


def asked(prompt: str = "ab", **more: Any) -> Asked:
    said = {"room": ROOM, "prompt": prompt, "first_token": 0, "endpoint": "10.0.0.2", "dst_port": 4000}
    return Asked(**{**said, "rank": 0, "ranks": 1, **more})


# Prefill:


def sender(of: Any, prompt: str = "ab", told: dict[str, Any] | None = None, room: int = ROOM) -> Any:
    from kvbridge.adapters.sglang.sender import KVBridgeSender

    made = KVBridgeSender(of, ADDRESS, room)
    made.bind(req(prompt, told))
    return made


def begun(of: Any, tokens: int = 40, room: int = ROOM, **more: Any) -> Any:
    """Asked for, and given pages."""
    made = sender(of, room=room)
    of._hear_asked(asked(room=room, **more))
    assert made.poll() == WAITING
    prefix = made.pop_decode_prefix_len()
    made.init(-(-(tokens - prefix) // PAGE), 1)
    return made


def raises(made: Any, match: str) -> None:
    with pytest.raises(Exception, match=match):
        made.failure_exception()


def pages(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_a_prompt_in_chunks_is_one_offer_and_over_when_all_have_read_it(prefill: Any) -> None:
    made = begun(prefill)
    made.send(pages(3, 4), None, 32)
    made.send(pages(9), [], 8)
    first, last = prefill.talk.said
    assert (first.tokens, first.is_last, first.blocks[0].ids) == (32, False, (3, 4))
    assert (last.tokens, last.is_last, last.blocks[0].first, last.blocks[0].ids) == (40, True, 2, (9,))
    assert first.rendezvous == last.rendezvous and first.rendezvous.endswith("/ab")
    assert prefill.told == [Metadata(room=ROOM, prompt="ab", fields=(bytes([4, 5, 6, 7]),))]
    assert made.poll() == WAITING, "somebody may be reading"
    prefill.talk.end("offer")
    assert listen(prefill, made) == SUCCESS
    made.clear()
    assert not prefill.rooms.owned() and not prefill.request_status and not prefill.owners


def test_a_prompt_that_another_engine_fetches_is_computed_without_being_asked_for(prefill: Any) -> None:
    made = sender(prefill, told={"fetched_by": "vllm"})
    assert made.poll() == WAITING and made.pop_decode_prefix_len() == 0
    made.init(3, 1)
    made.send(pages(3, 4, 5), [], 40)
    (offer,) = prefill.talk.said
    assert (offer.rendezvous, offer.tokens, offer.is_last) == (f"room/{ROOM}/ab", 40, True)
    assert offer.traceparent == TRACE
    prefill.talk.end("offer")
    assert listen(prefill, made) == SUCCESS
    made.clear()
    assert not prefill.rooms.owned() and not prefill.request_status
    assert [each.fields for each in prefill.told] == [(bytes([4, 5, 6, 7]),)], "its row is for nobody"


def test_nonsense_about_another_engine_is_that_requests_failure(prefill: Any) -> None:
    made = sender(prefill, told={"fetched": 1})
    assert made.poll() == FAILED
    raises(made, "unknown field `fetched`")
    assert not prefill.rooms.owned()


@pytest.mark.parametrize(
    ("told", "prompt"),
    [({"fetched_by": "vllm"}, [0] * 48), ({"fetched": 1}, [0] * 48), ({"fetched_by": "vllm"}, None)],
    ids=["aborted", "nonsense", "not carried"],
)
def test_another_engine_need_not_wait_for_a_prefill_that_ends_before_it_is_offered(
    prefill: Any, told: dict[str, Any], prompt: Any
) -> None:
    from kvbridge.adapters.sglang.sender import KVBridgeSender

    made = KVBridgeSender(prefill, ADDRESS, ROOM)
    asked_for = req("ab", told)
    asked_for.input_embeds = None if prompt else [[0.5]]
    made.bind(asked_for)
    if made.poll() != FAILED:
        made.abort()
    with pytest.raises(Exception, match=r".") as raised:
        made.failure_exception()
    (said,) = prefill.talk.said
    assert (said.call, said.code) == (f"room/{ROOM}", "prefill_refused") and said.reason in str(raised.value)
    made.clear()
    assert len(prefill.talk.said) == 1


@pytest.mark.parametrize("told", [{"fetched_by": "vllm"}, None])
def test_who_hears_of_a_failed_prefill_otherwise_is_not_told_of_its_room(prefill: Any, told: Any) -> None:
    """By the offer's end, or on SGLang's own socket."""
    made = sender(prefill, told=told)
    if told:
        made.poll()
        made.pop_decode_prefix_len()
        made.init(3, 1)
        made.send(pages(3, 4), None, 32)
    made.abort()
    assert not [each for each in prefill.talk.said if isinstance(each, NoOffer)]


@pytest.mark.parametrize(("prefix", "begins"), [(0, 0), (15, 0), (16, 16), (33, 32)])
def test_what_the_decode_side_has_is_left_out_in_whole_pages(prefill: Any, prefix: int, begins: int) -> None:
    made = begun(prefill, first_token=prefix)
    made.send(pages(*range(3 - begins // PAGE)), [], 40 - begins)
    (offer,) = prefill.talk.said
    assert (offer.first_token, offer.tokens, offer.blocks[0].first) == (begins, 40, begins // PAGE)


@pytest.mark.proves("G12")
def test_an_aborted_request_leaves_its_room_though_sglang_never_speaks_of_it_again(prefill: Any) -> None:
    made = begun(prefill)
    made.send(pages(3, 4), None, 32)
    made.abort()
    assert ("withdraw", 1) in prefill.talk.said and not prefill.talk.open, "its pages are others' from here on"
    assert not prefill.rooms.owned() and ROOM not in prefill.request_status
    assert prefill.told == [([("10.0.0.2", 4000)], "Aborted by AbortReq.")]
    prefill._hear_asked(asked(dst_port=4001))
    assert prefill.told[-1] == ([("10.0.0.2", 4001)], "Aborted by AbortReq."), "who comes later hears of it too"
    assert made.poll() == FAILED
    raises(made, "Aborted by AbortReq")
    again = sender(prefill)
    assert again.poll() == BOOTSTRAPPING


@pytest.mark.proves("G14")
def test_the_next_request_of_a_room_is_another_offer(prefill: Any) -> None:
    """Also where the one before ended early. No answer to that one ends it."""
    made = begun(prefill)
    made.send(pages(3, 4), None, 32)
    prefill.talk.end("offer", "agent_lost")
    assert listen(prefill, made) == FAILED
    raises(made, "agent_lost")
    following = begun(prefill)
    following.send(pages(5, 6), None, 32)
    before, after = prefill.talk.said
    assert (before.number, before.request, before.is_more) == (1, "a request's id", False)
    assert (after.number, after.request, after.is_more) == (2, "a request's id", False)
    following.send(pages(7), [], 8)
    assert prefill.talk.said[-1].number == 2 and prefill.talk.said[-1].is_more
    prefill.talk.news.append(Ended(1, str(ROOM), "offer", "withdrawn"))
    assert listen(prefill, following) == WAITING
    prefill.talk.end("offer")
    assert listen(prefill, following) == SUCCESS


def test_a_room_in_use_is_refused_and_its_owner_goes_on(prefill: Any) -> None:
    made = begun(prefill)
    second = sender(prefill)
    assert second.poll() == FAILED
    raises(second, "in use")
    second.clear()
    second.abort()
    assert made.poll() == WAITING and prefill.rooms.owned() == [ROOM]


def test_strangers_neither_fail_a_request_nor_abort_it(prefill: Any) -> None:
    made = begun(prefill)
    prefill._hear_asked(asked(prompt="cd", endpoint="10.0.0.9"))
    assert prefill.told[-1][0] == [("10.0.0.9", 4000)] and "another prompt" in prefill.told[-1][1]
    prefill._hear_abort(SimpleNamespace(room=ROOM, decode_ip="10.0.0.9", decode_port=4000))
    assert made.poll() == WAITING
    prefill._hear_abort(SimpleNamespace(room=ROOM, decode_ip="10.0.0.2", decode_port=4000))
    assert made.poll() == FAILED


def test_an_abort_that_comes_before_its_request_takes_the_question_back(prefill: Any) -> None:
    prefill._hear_asked(asked())
    prefill._hear_abort(SimpleNamespace(room=ROOM, decode_ip="10.0.0.2", decode_port=4000))
    assert sender(prefill).poll() == BOOTSTRAPPING, "nobody asks for it any more"


def test_a_prefix_longer_than_the_prompt_is_the_whole_prompt(prefill: Any) -> None:
    assert begun(prefill, first_token=1 << 30)._first_token == 48


@pytest.mark.parametrize("number", [0, -1, 1 << 64, ROOM])
def test_a_refused_room_leaves_nothing_behind(number: int) -> None:
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver
    from kvbridge.adapters.sglang.sender import KVBridgeSender

    for role, kind in (("prefill", KVBridgeSender), ("decode", KVBridgeReceiver)):
        of = manager(role)
        of.rooms.enter(ROOM, "somebody", 0)
        made = kind(of, ADDRESS, number)
        assert made.poll() == FAILED
        raises(made, "bootstrap_room")
        made.abort()
        made.clear()
        assert not of.request_status and not of.addr_to_rooms_tracker[ADDRESS] and of.rooms.owned() == [ROOM]


def test_a_prefill_waits_for_its_agent(prefill: Any) -> None:
    prefill.talk.attached = None
    made = sender(prefill)
    prefill._hear_asked(asked())
    assert made.poll() == BOOTSTRAPPING
    prefill.talk.attached = attached()
    assert made.poll() == WAITING


def test_embeddings_stay_where_they_are(prefill: Any) -> None:
    from kvbridge.adapters.sglang.sender import KVBridgeSender

    made = KVBridgeSender(prefill, ADDRESS, ROOM)
    made.bind(SimpleNamespace(prompt="ab", input_embeds=[[0.5]]))
    assert made.poll() == FAILED


# Decode:


def receiver(of: Any, prompt: str = "ab", tokens: int = 40) -> Any:
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    made = KVBridgeReceiver(of, ADDRESS, ROOM)
    made.bootstrap_infos = [
        {"rank_ip": "10.0.0.1", "rank_port": 1, "tp_rank": 0, "pp_rank": 0, "agent": "tcp://10.0.0.1:7700"}
    ]
    made.prefill_info, made.target_tp_ranks = SimpleNamespace(attn_tp_size=1), [0]
    made._send_bootstrap_message = lambda **said: True
    made._send_abort_notification = lambda **said: None
    made.bind(req(prompt), tokens)
    of.update_status(ROOM, WAITING)
    return made


def wanted(of: Any) -> Any:
    """Given pages."""
    made = receiver(of)
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    return made


def listen(of: Any, made: Any) -> int:
    of._look_at = 0.0
    return int(made.poll())


@pytest.mark.proves("G12")
def test_a_request_has_succeeded_when_its_kv_is_there_and_then_its_row(decode: Any) -> None:
    made = wanted(decode)
    (want,) = decode.talk.said
    assert (want.first_token, want.end_token, want.blocks[0].ids) == (0, 40, (5, 6, 7))
    assert not want.is_offered, "the prefill server may not have begun"
    decode.rooms.put(Metadata(room=ROOM, prompt="ab", fields=(b"rows",)))
    assert listen(decode, made) == WAITING and decode.kv_args.row[4] == 4, "the row comes last"
    decode.talk.end("want")
    assert listen(decode, made) == SUCCESS and decode.kv_args.row[4:].tobytes() == b"rows"
    made.clear()
    assert not decode.rooms.owned() and not decode.request_status and not decode.owners


@pytest.mark.parametrize("why", ["", "aborted", "no memory"])
def test_scores_are_finished_once_before_their_request_has_succeeded(decode: Any, why: str) -> None:
    finished: list[Any] = []

    def finish(want: Any) -> None:
        finished.append(want)
        if why == "no memory":
            raise RuntimeError("CUDA out of memory")

    decode.scores = SimpleNamespace(finish=finish)
    made = wanted(decode)
    (want,) = decode.talk.said
    decode.talk.end("want", other_scores=True)
    decode._look_at = 0.0
    decode.look()
    assert made.ended is not None and not finished
    if why == "aborted":
        made.abort()
    for _ in range(3):
        assert listen(decode, made) == (FAILED if why else WAITING)
    decode.rooms.put(Metadata(room=ROOM, prompt="ab", fields=(b"rows",)))
    assert listen(decode, made) == (FAILED if why else SUCCESS)
    assert finished == [want] * (why != "aborted"), "pages of a request that has failed are soon another's"


def test_a_prefix_that_is_the_whole_prompt_needs_the_row_alone(decode: Any) -> None:
    made = receiver(decode, tokens=0)
    made.send_metadata(pages(), 1, [], 48)
    (want,) = decode.talk.said
    assert (want.first_token, want.end_token, want.blocks) == (48, 48, ())
    assert listen(decode, made) == WAITING
    decode.rooms.put(Metadata(room=ROOM, prompt="ab", fields=(b"rows",)))
    assert listen(decode, made) == SUCCESS


def test_a_row_of_another_size_fails_that_request(decode: Any) -> None:
    made = receiver(decode, tokens=0)
    made.send_metadata(pages(), 1, [], 48)
    decode.rooms.put(Metadata(room=ROOM, prompt="ab", fields=(b"more", b"rows")))
    assert listen(decode, made) == FAILED and decode.kv_args.row.tolist() == list(range(8))
    assert "prefill [4, 4], decode [4]" in decode.failure_records[ROOM]


def test_what_has_failed_already_asks_for_nothing(decode: Any) -> None:
    """Embeddings do not travel; a prefill server may be given up before there are pages."""
    made = receiver(decode)
    made.bind(SimpleNamespace(prompt="ab", input_embeds=[[0.5]]), 40)
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    assert not decode.talk.said and listen(decode, made) == FAILED


def test_the_other_sides_agent_is_looked_for_again(decode: Any) -> None:
    made = receiver(decode)
    known, asked_at = made.bootstrap_infos, []
    made.bootstrap_infos, made.prefill_dp_rank = [{**known[0], "agent": ""}], 0
    made._connection_pool_entries = {}
    answers = iter([True, True, False])
    made._is_asking_ranks = lambda: asked_at.append(made._replica) or next(answers)
    made._setup_bootstrap_infos = lambda: setattr(made, "bootstrap_infos", known)
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    assert listen(decode, made) == WAITING and not decode.talk.said, "it has not answered yet"
    assert listen(decode, made) == WAITING and len(decode.talk.said) == 1
    assert asked_at == [0, 0, 0]


def test_the_other_sides_agents_are_looked_for_once_for_all_requests(decode: Any) -> None:
    made = receiver(decode)
    made.bootstrap_infos, made.prefill_dp_rank = [], 0
    made._is_asking_ranks = lambda: pytest.fail("it was asked")
    assert decode.may_ask_again(ADDRESS, 0.5)
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    assert listen(decode, made) == WAITING


def test_a_prefill_server_that_is_given_up_holds_up_nobody(decode: Any) -> None:
    made = receiver(decode)
    made.bootstrap_infos = []
    decode.prefill_info_table.clear()
    made._is_asking_ranks = lambda: pytest.fail("it was asked")
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    assert listen(decode, made) == WAITING


@pytest.mark.proves("G12")
def test_pages_are_ours_until_the_agent_has_answered(decode: Any) -> None:
    made = wanted(decode)
    made.abort()
    assert listen(decode, made) == FAILED and ("abandon", 1) in decode.talk.said
    raises(made, "Aborted")
    assert not decode.is_abort_release_safe(ROOM, 0)
    decode.talk.end("want", "aborted")
    decode._look_at = 0.0
    assert decode.is_abort_release_safe(ROOM, 0)


def test_pages_of_a_request_are_its_own_though_the_next_one_of_its_room_wants_too(decode: Any) -> None:
    made = wanted(decode)
    made.abort()
    assert listen(decode, made) == FAILED
    raises(made, "Aborted")
    following = wanted(decode)
    assert listen(decode, following) == WAITING, "the agent's answer to the one before is not waited for"
    first, second = (said for said in decode.talk.said if isinstance(said, Want))
    assert first.number != second.number and first.common == second.common == "a request's id"
    assert not decode.is_abort_release_safe(ROOM, 0)
    decode.talk.end("want", "aborted")
    assert listen(decode, following) == WAITING, "that was the other's"
    decode.rooms.put(Metadata(room=ROOM, prompt="ab", fields=(b"rows",)))
    decode.talk.end("want")
    assert listen(decode, following) == SUCCESS and decode.is_abort_release_safe(ROOM, 0)


def test_the_second_clear_of_a_request_takes_nothing_of_the_next_one(decode: Any) -> None:
    """SGLang clears when a failure is told, and when the pages are given back; the room may be another's by then."""
    made = wanted(decode)
    made.abort()
    assert listen(decode, made) == FAILED
    raises(made, "Aborted")
    decode.talk.end("want", "aborted")
    following = receiver(decode)
    made.clear()
    assert listen(decode, following) == WAITING and decode.rooms.owned() == [ROOM]
    following.send_metadata(pages(8, 9, 10), 0, [], 0)
    decode.talk.end("want")
    decode.rooms.put(Metadata(room=ROOM, prompt="ab", fields=(b"rows",)))
    assert listen(decode, following) == SUCCESS


def test_what_goes_wrong_on_the_schedulers_thread_is_one_requests_failure(
    decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode.talk.attached = None
    made = wanted(decode)
    assert listen(decode, made) == WAITING, "an agent that is started anew is waited for"
    decode.talk.attached = attached()

    def fail(**said: Any) -> bool:
        raise ZeroDivisionError("nobody expects this")

    made._send_bootstrap_message = fail
    assert listen(decode, made) == FAILED and "nobody expects this" in decode.failure_records[ROOM]


def test_an_agent_that_does_not_come_back_costs_the_request(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbridge.adapters.sglang import receiver as module

    decode.talk.attached = None
    made = wanted(decode)
    monkeypatch.setattr(module, "AGENT_S", -1.0)
    assert listen(decode, made) == FAILED and "no agent has our memory" in decode.failure_records[ROOM]


# Another engine's prompts:

FOREIGN = "kvbridge:8998"
TOLD = {"sender": "tcp://10.0.0.7:7700", "first_token": 5}


def foreign_receiver(of: Any, told: dict[str, Any]) -> Any:
    from kvbridge.adapters.sglang.manager import PrefillServers
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    of.prefill_info_table, of.addr_to_rooms_tracker = PrefillServers(), {FOREIGN: set()}
    of.queue.scheduler.model_config = SimpleNamespace(vocab_size=1024)
    of.queue.metadata_buffers = SimpleNamespace(
        **{
            name: np.zeros((2, 16)) for name in ("output_ids", "output_token_logprobs_val", "output_token_logprobs_idx")
        },
        cached_tokens=[SimpleNamespace(zero_=lambda: None)] * 2,
        bootstrap_room=np.zeros((2, 8), np.uint64),
    )
    made = KVBridgeReceiver(of, FOREIGN, ROOM)
    made._setup_bootstrap_infos()
    made._send_bootstrap_message = lambda **said: pytest.fail("there is nobody to be told")
    made.bind(req("ab", told), 40)
    if ROOM not in of.failure_records:
        of.update_status(ROOM, WAITING)
    return made


def test_another_engines_prompt_is_fetched_where_the_router_says_and_goes_on_with_its_token(decode: Any) -> None:
    made = foreign_receiver(decode, TOLD | {"rendezvous": f"room/{ROOM}/ab"})
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    (want,) = decode.talk.said
    assert (want.rendezvous, want.sender, want.end_token) == (f"room/{ROOM}/ab", "tcp://10.0.0.7:7700", 40)
    assert want.traceparent == TRACE
    assert want.is_offered, "that engine has answered: what it offered is there, or never will be"
    assert listen(decode, made) == WAITING and not decode.queue.metadata_buffers.bootstrap_room.any(), (
        "the row comes last"
    )
    decode.talk.end("want")
    assert listen(decode, made) == SUCCESS
    assert (
        decode.queue.metadata_buffers.bootstrap_room[1][0] == ROOM
        and decode.queue.metadata_buffers.output_ids[1][0] == 5
    )
    made.clear()
    assert not decode.rooms.owned() and not decode.request_status and not decode.owners


@pytest.mark.proves("G9", "T9")
@pytest.mark.parametrize("told", [{}, TOLD | {"rendezvous": "room/7/cd"}, TOLD | {"first_token": 4096}])
def test_what_does_not_fit_another_engines_prompt_fails_that_request(decode: Any, told: dict[str, Any]) -> None:
    made = foreign_receiver(decode, told)
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    assert not decode.talk.said and listen(decode, made) == FAILED


def test_another_engines_prompt_is_held_while_the_request_queues(decode: Any) -> None:
    made = foreign_receiver(decode, TOLD)
    made.queued(req("ab", TOLD))
    made.send_metadata(pages(5, 6, 7), 1, [], 0)
    expect, want = decode.talk.said
    assert isinstance(expect, Expect) and expect.sender == TOLD["sender"]
    assert (expect.number, expect.rendezvous) == (want.number, want.rendezvous), "the want ends it"
    decode.talk.end("want")
    assert listen(decode, made) == SUCCESS
    made.clear()
    assert decode.talk.said == [expect, want]


@pytest.mark.parametrize("end", ["clear", "abort", "fail"])
def test_a_request_that_ends_while_it_queues_lets_go_of_another_engines_prompt_once(decode: Any, end: str) -> None:
    made = foreign_receiver(decode, TOLD)
    made.queued(req("ab", TOLD))
    if end == "abort":
        made.abort()
    elif end == "fail":
        made._fail("whatever")
    if end != "clear":
        assert listen(decode, made) == FAILED
    made.clear()
    made.clear()
    expect, want = decode.talk.said
    assert (want.number, want.rendezvous, want.sender) == (expect.number, expect.rendezvous, expect.sender)
    assert (want.first_token, want.end_token, want.blocks) == (0, 0, ())


@pytest.mark.parametrize("told", [{}, TOLD | {"first_token": 4096}])
def test_nothing_is_held_for_a_request_that_names_it_wrongly(decode: Any, told: dict[str, Any]) -> None:
    made = foreign_receiver(decode, told)
    made.queued(req("ab", told))
    made.clear()
    assert not decode.talk.said


def test_other_engines_are_found_among_the_prefill_servers_and_not_listed(decode: Any) -> None:
    """SGLang asks all that it lists for their health, and fails their requests if they do not answer."""
    from kvbridge.adapters.sglang.manager import PrefillServers

    decode.prefill_info_table, decode.attn_tp_rank, decode.attn_tp_size = PrefillServers(), 0, 1
    assert FOREIGN not in decode.prefill_info_table and decode.prefill_info_table.get(FOREIGN) is None
    assert decode.try_ensure_parallel_info(FOREIGN) and FOREIGN in decode.prefill_info_table
    assert decode.prefill_info_table[FOREIGN].dp_size == decode.prefill_info_table.get("kvbridge:1").dp_size == 1
    decode.prefill_info_table[ADDRESS] = "sglang's"
    assert list(decode.prefill_info_table.keys()) == [ADDRESS] and decode.prefill_info_table[ADDRESS] == "sglang's"


# What an offer and a want wait for on a GPU, with streams that only record what they were told to wait for:

FORWARDS, SCHEDULER, EVENT = "the forwards' stream", "the scheduler's stream", "a prefix's event"


@pytest.mark.parametrize(
    ("stages", "mark", "waits"),
    [
        (1, lambda of: of.mark_computed(None), []),
        (1, lambda of: of.mark_computed(EVENT), [EVENT]),
        (2, lambda of: of.mark_computed(EVENT), [SCHEDULER, FORWARDS, EVENT]),
        (1, lambda of: of.mark_free(), [SCHEDULER, FORWARDS]),
    ],
    ids=["an offer: not for the next prompt's forward", "a prefix: for its event", "a stage", "a want: for all steps"],
)
def test_an_offer_and_a_want_wait_for_what_may_write_their_pages(
    prefill: Any, monkeypatch: pytest.MonkeyPatch, stages: int, mark: Callable[[Any], int], waits: list[str]
) -> None:
    heard: list[str] = []
    prefill._fence_stream = SimpleNamespace(wait_stream=heard.append, wait_event=heard.append)
    prefill.queue.scheduler.forward_stream, prefill.pp_size = FORWARDS, stages
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SCHEDULER)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    assert (mark(prefill), heard) == (0, []), "a CPU's calls return when their work is done"
    prefill.talk.memory.device, prefill.talk.mark = torch.device("cuda:0"), lambda: 7
    assert (mark(prefill), heard) == (7 if waits else 0, waits)


# Failures:


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_failure_keeps_its_first_cause_and_leaves_nothing_to_the_next_request_of_its_room(role: str) -> None:
    of = manager(role)
    make = sender if role == "prefill" else receiver
    made = make(of)
    made._fail("the cause")
    made._fail("what followed from it")
    assert made.poll() == FAILED
    raises(made, "the cause")
    made._fail("too late")
    assert not of.failure_records and not of.request_status
    assert make(of).poll() in (BOOTSTRAPPING, WAITING)


def test_an_abort_that_comes_while_a_request_leaves_its_room_is_not_the_next_ones(prefill: Any) -> None:
    made = sender(prefill, told={"fetched_by": "vllm"})
    prefill._hear_asked(asked())
    abort = SimpleNamespace(room=ROOM, decode_ip="10.0.0.2", decode_port=4000)
    made._fail("the cause")
    say = prefill.talk.send  # between the cause that is taken and the room that is left

    def hear_abort(message: Any) -> None:
        prefill._hear_abort(abort)
        say(message)

    prefill.talk.send = hear_abort
    raises(made, "the cause")
    assert not prefill.failure_records and not prefill.request_status
    following = sender(prefill)
    following._fail("another cause")
    raises(following, "another cause")


# Weights that change:


@pytest.mark.proves("G10")
def test_a_prompt_that_was_computed_in_part_before_the_weights_changed_is_not_offered(prefill: Any) -> None:
    made = begun(prefill)
    made.send(pages(3, 4), None, 32)
    prefill.weights_are("B")
    made.send(pages(9), [], 8)
    offer, change = prefill.talk.said
    assert (offer.tokens, change.version) == (32, "B")
    assert listen(prefill, made) == FAILED
    raises(made, "other_weights")


def updater(of: Any) -> Any:
    """SGLang's, beside its scheduler, as far as the hooks look."""
    queue = SimpleNamespace(kv_manager=of)
    scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=queue, disagg_prefill_inflight_queue=[])
    scheduler.weight_updater = SimpleNamespace(scheduler=scheduler, _session=None)
    return scheduler.weight_updater


@pytest.mark.proves("G10")
@pytest.mark.parametrize(("versions", "name"), [(("B",), "B"), ((None,), ""), (("B", "B"), "B"), ((None, "B"), "B")])
@pytest.mark.parametrize("has_session", [False, True])
def test_updated_weights_are_called_what_the_update_says_once_it_is_whole(
    prefill: Any, has_session: bool, versions: tuple[str | None, ...], name: str
) -> None:
    from kvbridge.adapters.sglang.weights import SCHEDULER, UPDATER, hooks

    hooked, its, seen = hooks(), updater(prefill), []

    def load(updater: Any, version: str | None) -> None:
        seen.append(prefill._weights)
        hooked[f"{SCHEDULER}.record_weight_version_change"](lambda *_: None, updater.scheduler, version)
        seen.append(prefill._weights)

    if has_session:
        its._session = object()
        hooked[f"{UPDATER}.begin_weight_update"](lambda *_: None, its)
    for version in versions:
        hooked[f"{UPDATER}.update_weights_from_tensor"](load, its, version)
    if has_session:
        assert set(seen) == {""}, "parts may still come"
        hooked[f"{UPDATER}.end_weight_update"](lambda updater: setattr(updater, "_session", None), its)
    assert seen[0] == "" and prefill._weights == name
    assert prefill.talk.said[0].version == "" and prefill.talk.said[-1].version == name


def test_a_flush_gives_up_held_prompts_first(prefill: Any) -> None:
    """SGLang flushes nothing while one is held."""
    from kvbridge.adapters.sglang.weights import SCHEDULER, hooks

    made, scheduler = begun(prefill), updater(prefill).scheduler
    made.send(pages(3, 4, 9), [], 40)
    queue = scheduler.disagg_prefill_inflight_queue = [made]
    scheduler.process_disagg_prefill_inflight_queue = lambda: queue.remove(made) if made.poll() == FAILED else None
    assert hooks()[f"{SCHEDULER}.flush_cache"](lambda scheduler: not queue, scheduler)
    raises(made, "reclaimed")


def test_a_flush_waits_for_no_prompt_that_is_still_computed(prefill: Any) -> None:
    """It is not given up: the scheduler would stand still for READERS_S."""
    from kvbridge.adapters.sglang.weights import give_up_held

    held = begun(prefill)
    held.send(pages(3, 4, 9), [], 40)
    partly = begun(prefill, room=ROOM + 1)
    partly.send(pages(5, 6), None, 32)
    scheduler = updater(prefill).scheduler
    scheduler.disagg_prefill_inflight_queue = [held]
    scheduler.process_disagg_prefill_inflight_queue = held.poll
    assert give_up_held(scheduler)
    raises(held, "reclaimed")
    assert prefill.talk.rested_s == 0 and len(prefill.talk.open) == 1
    partly.send(pages(7), [], 8)
    prefill.release()
    assert listen(prefill, partly) == FAILED and not prefill.talk.open, "it may be given up now"


def test_the_methods_that_are_hooked_are_sglangs() -> None:
    from importlib import import_module

    from kvbridge.adapters.sglang.weights import hooks

    for target in hooks():
        module, owner, method = target.rsplit(".", 2)
        assert callable(getattr(getattr(import_module(module), owner), method)), target
