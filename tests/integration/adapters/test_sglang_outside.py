"""What other servers and clients tell SGLang's adapter, over real sockets: and what a wrong word costs: a request."""

from __future__ import annotations

import importlib.util
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang.messages import Asked, BadMessage, unpack
from kvbridge.adapters.sglang.servers import SERVER_ANSWER_BYTES, BadAnswer, RanksAnswer, ask, replicas
from testing.waiting import wait_for
from tests.integration.adapters.test_sglang_life import FAILED, ROOM, WAITING, asked, manager, req
from tests.support.hostile_prefill import RANK, RANKS, SERVER, Prefill
from tests.unit.test_oneline import FORGED

pytestmark = pytest.mark.sglang

REGISTRATION = {
    **{"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1},
    **{"attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0},
    **{"page_size": 16, "kv_cache_dtype": "torch.bfloat16"},
    **{"rank_ip": RANK["rank_ip"], "rank_port": RANK["rank_port"], "kvbridge_agent": RANK["agent"]},
}
LONG = "tcp://" + "x" * 300


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    made = Prefill()
    yield made
    made.close()


@pytest.fixture
def decode(sglang: None) -> Any:
    from kvbridge.adapters.sglang.manager import PrefillServers

    made = manager("decode")
    made.prefill_info_table, made.attn_tp_size = PrefillServers(), 4
    return made


def is_met(decode: Any, address: str) -> bool:
    """What SGLang's scheduler does over many turns."""
    wait_for(lambda: not decode.is_asking(address), 30)
    return bool(decode.try_ensure_parallel_info(address))


# What a prefill server says of itself:


def test_a_usable_answer_is_used(decode: Any, prefill: Prefill) -> None:
    prefill.body = SERVER | {"attn_tp_size": 1024, "a later field": {}}
    assert is_met(decode, prefill.address)
    assert prefill.address in decode._met, "its questions go before those of servers that never answered"
    info = decode.prefill_info_table[prefill.address]
    assert (info.attn_tp_size, info.target_tp_ranks, info.page_size) == (1024, list(range(256)), 16)


@pytest.mark.proves("T11")
@pytest.mark.parametrize(
    "wrong",
    [
        *({"attn_tp_size": size} for size in (0, -3, 30_000_000, 1 << 70, "2", None, 1.5)),
        *(
            {"pp_size": 1025},
            {"dp_size": 0},
            {"attn_cp_size": -1},
            {"page_size": 0},
            {"attn_tp_size": 64, "pp_size": 64},
        ),
        *({"kv_cache_dtype": "x" * 1000}, {"decode_allocation_policy": FORGED * 10}, {"prefill_http_port": 1 << 20}),
    ],
    ids=range(15),
)
def test_sizes_that_no_engine_has_fail_the_request_alone(decode: Any, prefill: Prefill, wrong: dict[str, Any]) -> None:
    """0 and -3 raised on the scheduler's thread, which ended the server. 30 million ranks cost 1.1 GB."""
    prefill.body = SERVER | wrong
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not is_met(decode, prefill.address) and not decode.prefill_info_table
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    prefill.body = SERVER
    assert is_met(decode, prefill.address)


@pytest.mark.proves("T11")
@pytest.mark.parametrize(
    "body", [b"", b"[", b"null", b"[" * 100_000, b'{"' + b"x" * (8 * SERVER_ANSWER_BYTES) + b'": 1}', FORGED.encode()]
)
def test_what_is_no_answer_fails_the_request_alone(
    decode: Any, prefill: Prefill, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.body = body
    assert not is_met(decode, prefill.address)
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 600 for record in caplog.records)


def test_no_answer_leads_elsewhere(prefill: Prefill) -> None:
    prefill.status = 302
    with pytest.raises(BadAnswer, match="status 302"):
        ask(f"http://{prefill.address}/", RanksAnswer)


@pytest.mark.proves("T11")
@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"]
)
def test_a_server_that_says_a_byte_at_a_time_is_given_up(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its headers, which have no other bound in time, as in its body."""
    from kvbridge.adapters.sglang import servers

    monkeypatch.setattr(servers, "SERVER_ANSWER_S", 0.5)
    stop = threading.Event()

    def drip() -> None:
        end, _ = listening.accept()
        with end:
            end.sendall(begin)
            for _ in range(100):
                if stop.wait(0.1):
                    return
                try:
                    end.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(BadAnswer, match="not all here"):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}/", RanksAnswer)
        stop.set()
        thread.join()


@pytest.mark.proves("T11")
@pytest.mark.parametrize(
    "wrong",
    [
        *({"agent": address} for address in (LONG, 7, "tcp://\n", "tcp://\ud800:1", FORGED)),
        *({"rank_ip": host} for host in ("", "x" * 300, FORGED, "a\n", 7, None)),
        *({"rank_port": port} for port in (0, 65536, "4000")),
    ],
    ids=range(14),
)
def test_a_rank_that_is_nowhere_fails_the_request_alone(decode: Any, prefill: Prefill, wrong: dict[str, Any]) -> None:
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    assert is_met(decode, prefill.address)
    decode.addr_to_rooms_tracker[prefill.address] = set()
    made = KVBridgeReceiver(decode, prefill.address, ROOM)
    made._replica = 0
    prefill.body = [[*(RANK | wrong).values()]]
    wait_for(lambda: not made._is_asking_ranks(), 30)
    assert made._get_bootstrap_info_from_server(0, 0, 0, 0) is None
    prefill.body = RANKS
    wait_for(lambda: not made._is_asking_ranks(), 30)
    for rank in range(2):
        assert made._get_bootstrap_info_from_server(0, 0, rank, 0) == RANK | {"tp_rank": rank}
    assert made._get_bootstrap_info_from_server(0, 0, 2, 0) is None, "it has not registered"


@pytest.mark.parametrize("body", [{"7": "zero"}, {"7": -1}, {"7": 1 << 40}, {"7": None}, [], "7"])
def test_a_replica_that_is_none_is_not_used(prefill: Prefill, body: Any) -> None:
    """SGLang's scheduler calls int() on it, outside of any try."""
    prefill.body = {"7": 3}
    assert replicas(prefill.address, [7]) == {"7": 3}
    prefill.body = body
    with pytest.raises(BadAnswer):
        replicas(prefill.address, [7])


# What a client says:


@pytest.mark.proves("T11")
@pytest.mark.parametrize(
    "host", ["", FORGED, "x" * 300, "a/b?c=", "user@host", "[::1", "10.0.0.1:80", "a\n", "größer", "None:"]
)
def test_a_bootstrap_host_that_is_none_fails_its_request_before_anybody_is_asked(
    decode: Any, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    address = f"{host}:8998"
    made = KVBridgeReceiver(decode, address, ROOM)
    made.queued(req())
    assert made.poll() == FAILED
    with pytest.raises(Exception, match="bootstrap_host") as caught:
        made.failure_exception()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300
    # The scheduler goes on to ask for its sizes, fifteen times: there is nothing to ask, log or health-check.
    assert is_met(decode, address) and address in decode.prefill_info_table
    made.init(0)
    made.clear()
    assert not list(decode.prefill_info_table) and not decode.rooms.owned() and not caplog.records


@pytest.mark.parametrize("host", ["10.0.0.1", "prefill-0.prefill.svc", "prefill_0", "[::1]", "[fe80::1%eth0]"])
def test_a_bootstrap_host_may_be_a_name_or_an_address(decode: Any, host: str) -> None:
    from kvbridge.adapters.sglang.servers import why_no_server

    assert why_no_server(f"{host}:8998") == ""


@pytest.mark.parametrize("number", [0, -1, 1 << 63, 10**5000, FORGED, None, True], ids=range(7))
def test_a_room_that_is_no_number_fails_its_request(decode: Any, number: Any) -> None:
    why = decode.rooms.enter(number, object(), 0.0)
    assert "must be a number" in why and why.isprintable() and len(why) < 120


@pytest.mark.parametrize("endpoint", ["", FORGED, "x" * 300, "a\n", "10.0.0.1/;x"])
def test_a_question_from_nowhere_is_dropped(endpoint: str) -> None:
    """SGLang logs an endpoint that it cannot reach as it is."""
    from kvbridge.adapters.sglang.messages import pack

    with pytest.raises(BadMessage):
        unpack(pack(asked(endpoint=endpoint)), Asked)


# What is logged:


@pytest.mark.proves("T40")
def test_reasons_that_others_chose_forge_no_line_of_sglangs_log(decode: Any) -> None:
    """SGLang logs and answers `failure_exception` as it is."""
    decode.request_status[ROOM] = WAITING
    decode.required_prefill_response_num_table[ROOM] = 1
    decode.apply_prefill_status(bootstrap_room=ROOM, status=FAILED, prefill_rank=0, failure_reason=FORGED * 5000)
    reason = decode.failure_records.pop(ROOM)
    assert reason.isprintable() and "left\\x0aINFO" in reason and len(reason) < 5000
    decode.fail(ROOM, FORGED)
    assert decode.failure_records[ROOM].isprintable()


@pytest.mark.proves("T40")
def test_a_field_that_a_client_named_forges_no_line_either(decode: Any, caplog: pytest.LogCaptureFixture) -> None:
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    address = "kvbridge:8998"
    assert decode.try_ensure_parallel_info(address)
    decode.queue.scheduler.model_config = type("Config", (), {"vocab_size": 1024})
    decode.addr_to_rooms_tracker[address] = set()
    made = KVBridgeReceiver(decode, address, ROOM)
    told = {"sender": "tcp://10.0.0.1:7700", "first_token": 5, FORGED: 1}
    made.bind(req(told=told), 16)
    with pytest.raises(Exception, match="unknown field") as caught:
        made.failure_exception()
    assert str(caught.value).isprintable()


def test_an_exception_of_the_control_thread_forges_no_line(decode: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Over(BaseException):
        pass

    frames = iter([[b"x"], [b"y" * (1 << 20)]])

    class Socket:
        def recv_multipart(self) -> list[bytes]:
            try:
                return next(frames)
            except StopIteration:
                raise Over from None

    def hear(_: list[bytes]) -> None:
        raise ValueError(FORGED)

    decode.server_socket = Socket()
    with pytest.raises(Over):
        decode._serve(hear)
    failed, dropped = caplog.records
    text = logging.Formatter().format(failed)
    first, *more = text.split("\n")
    assert "  INFO 11-21 kvbridge: all is well" in more and failed.exc_info is None
    assert all(line.isprintable() and line.startswith("  ") for line in more) and first.isprintable()
    assert "1048576 bytes" in dropped.getMessage()


# The bootstrap server:


@pytest.fixture
def served(sglang: None) -> Iterator[str]:
    from kvbridge.adapters.sglang.bootstrap import KVBridgeBootstrapServer

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = KVBridgeBootstrapServer("127.0.0.1", port)
    end = time.monotonic() + 120
    while True:
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=60)
            break
        except requests.ConnectionError:
            assert time.monotonic() < end, "the bootstrap server does not listen"
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.close()


def put(url: str, **changes: Any) -> requests.Response:
    return requests.put(f"{url}/route", data=json.dumps(REGISTRATION | changes), timeout=60)


@pytest.mark.proves("T15")
def test_a_registration_out_of_bounds_changes_nothing(served: str) -> None:
    """It ended every decode engine that asked, or was told to our own agent at each attach."""
    wrong = [
        *({"attn_tp_size": 0}, {"attn_tp_size": -3}, {"attn_tp_size": 30_000_000}, {"attn_tp_size": "1"}),
        *({"kvbridge_agent": LONG}, {"kvbridge_agent": 7}, {"kvbridge_agent": FORGED}, {"attn_tp_rank": 1 << 40}),
        *({"rank_ip": FORGED}, {"rank_port": -1}, {"system_dp_rank": {}}, {"attn_tp_size": 64, "pp_size": 64}),
    ]
    for changes in wrong:
        answer = put(served, **changes)
        assert answer.status_code == 400 and answer.text.isprintable(), changes
    assert requests.put(f"{served}/route", data=b"[", timeout=60).status_code == 400
    asked = f"{served}/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank="
    assert requests.get(f"{asked}0", timeout=60).status_code == 503, "nobody has registered"
    for rank in range(2):
        assert put(served, attn_tp_size=2, attn_tp_rank=rank).status_code == 200
        assert requests.get(f"{served}/kvbridge/ranks?replica=0", timeout=60).json() == RANKS[: rank + 1]
    assert requests.get(f"{served}/kvbridge/ranks?replica=1", timeout=60).json() == []
    assert requests.get(f"{asked}0", timeout=60).json() == {name: RANK[name] for name in ("rank_ip", "rank_port")}
    assert requests.get(f"{asked}x", timeout=60).status_code == 400


@pytest.mark.proves("T15")
def test_our_own_agent_is_not_told_of_ranks_that_it_would_refuse(prefill: Prefill) -> None:
    made = manager("prefill")
    made._bootstrap_url, made._replica = f"http://{prefill.address}", 0
    prefill.body = [[*(RANK | {"agent": LONG}).values()]]
    with pytest.raises(BadAnswer):
        made._ask_ranks()
    prefill.body = [RANKS[0], [*(RANK | {"tp_rank": 1, "agent": ""}).values()]]
    (rank,) = made._ask_ranks()
    assert rank.address == RANK["agent"]
