"""What the proxy asks each engine, and what it makes of the answers: the pure part."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvbridge.errors import EngineError, OperatorError
from kvbridge.proxy.bodies import ClientError, PromptAsk, encode, pieces, read
from kvbridge.proxy.events import EVENT_BYTES, FINISH, Events
from kvbridge.proxy.fleet import Role, read_engine
from kvbridge.proxy.generate import Answering, completions
from kvbridge.proxy.legs import (
    AgentPlace,
    Kind,
    Leg,
    PrefilledLeg,
    read_agent,
    read_prefilled,
    read_replicas,
    sglang_decode_after,
    sglang_decode_beside,
    sglang_prefill,
    vllm_decode_after,
    vllm_decode_beside,
    vllm_prefill,
)
from testing.refusals import refused

ROOM = 77


def sent(leg: Leg) -> Any:
    """The body as an engine gets it."""
    return json.loads(encode(leg.body))


PARAMS = {"remote_host": "::1", "remote_port": 7700, "remote_request_id": "room/77/d", "remote_key": "K"}


def ask(path: str, **body: Any) -> PromptAsk:
    (one,) = read(path, json.dumps(body).encode()).asks
    return one


def completion(**more: Any) -> PromptAsk:
    return ask("/v1/completions", prompt="a", **more)


def generate(**params: Any) -> PromptAsk:
    return ask("/generate", text="a", sampling_params=params)


@pytest.mark.parametrize("decode", Kind)
def test_vllm_prefills_one_token_of_what_was_asked(decode: Kind) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50, "temperature": 0.5}
    more |= {"min_tokens": 9, "echo": True, "prompt_logprobs": 2, "structured_outputs": {"regex": "a"}}
    leg = vllm_prefill(completion(**more), ROOM, decode)
    assert leg.path == "/v1/completions" and sent(leg) == {
        "prompt": "a",
        "temperature": 0.5,
        "structured_outputs": {"regex": "a"},
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "n": 1,
        "return_token_ids": True,
        "kv_transfer_params": {"do_remote_decode": True, "bootstrap_room": ROOM}
        | ({"fetched_by": "sglang"} if decode is Kind.SGLANG else {}),
    }
    chat = ask("/v1/chat/completions", messages=[{"role": "user"}], max_completion_tokens=9, min_tokens=0)
    body = sent(vllm_prefill(chat, ROOM, decode))
    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1) and "min_tokens" not in body


def test_logprobs_are_asked_of_the_prefill_leg_only_where_its_token_is_used() -> None:
    for logprobs in (0, 3):
        body = vllm_prefill(completion(logprobs=logprobs), ROOM, Kind.SGLANG).body
        assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (logprobs, True)
        assert "logprobs" not in vllm_prefill(completion(logprobs=logprobs), ROOM, Kind.VLLM).body
    asked = ask("/generate", text="a", return_logprob=True, top_logprobs_num=4, sampling_params={"custom_params": {}})
    assert vllm_prefill(asked, ROOM, Kind.SGLANG).body["logprobs"] == 4


@pytest.mark.parametrize("name", ["regex", "ebnf", "json_schema", "stop_regex", "custom_logit_processor"])
def test_vllm_is_not_asked_for_a_first_token_under_a_rule_it_does_not_know(name: str) -> None:
    with pytest.raises(ClientError, match=name):
        vllm_prefill(completion(**{name: "x"}), ROOM, Kind.SGLANG)
    vllm_prefill(completion(**{name: "x"}), ROOM, Kind.VLLM)


def test_legs_keep_the_clients_own_custom_params() -> None:
    prefilled = PrefilledLeg(PARAMS, 5, -0.25, ((-0.25, 5), (-2.0, 9)))
    told = {
        "sender": "tcp://[::1]:7700#K",
        "first_token": 5,
        "rendezvous": "room/77/d",
        "logprob": -0.25,
        "top_logprobs": "[[-0.25, 5], [-2.0, 9]]",
    }
    leg = sglang_decode_after(completion(custom_params={"own": 1}), ROOM, prefilled)
    assert sent(leg) == {
        "prompt": "a",
        "bootstrap_host": "kvbridge",
        "bootstrap_room": ROOM,
        "custom_params": {"own": 1, "kvbridge": told},
    }
    asked = generate(max_new_tokens=3, custom_params={"own": 1})
    body = sent(sglang_decode_after(asked, ROOM, prefilled))
    assert body["sampling_params"] == {"max_new_tokens": 3, "custom_params": {"own": 1, "kvbridge": told}}
    assert "custom_params" not in body and asked.body["sampling_params"]["custom_params"] == {"own": 1}


def test_sglangs_legs() -> None:
    asked = completion(stream=True, stream_options={"include_usage": True}, logprobs=2)
    beside = {"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": ROOM}
    assert sent(sglang_decode_beside(asked, ROOM, "p", 8998)) == sent(Leg("", asked.body)) | beside
    own = sent(sglang_prefill(asked, ROOM, "p", 8998, Kind.SGLANG))
    assert own == {"prompt": "a", "logprobs": 2, "stream": False} | beside
    foreign = sent(sglang_prefill(asked, ROOM, "p", 8998, Kind.VLLM))
    told = {"custom_params": {"kvbridge": {"fetched_by": "vllm"}}}
    assert foreign == {"prompt": "a", "stream": False, "bootstrap_host": "p", "bootstrap_room": ROOM} | told


def test_vllms_decode_legs() -> None:
    assert vllm_decode_after(completion(), PrefilledLeg(PARAMS)).body == {"prompt": "a", "kv_transfer_params": PARAMS}
    assert vllm_decode_after(completion(), PrefilledLeg(None)).body == {"prompt": "a"}
    params = vllm_decode_beside(completion(), ROOM, AgentPlace("h", 7, "")).body["kv_transfer_params"]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "bootstrap_room": ROOM,
        "remote_host": "h",
        "remote_port": 7,
    }
    leg = vllm_decode_beside(generate(max_new_tokens=3), ROOM, AgentPlace("h", 7, ""))
    assert leg.path == "/v1/completions" and leg.body["max_tokens"] == 3


CHOICE = {"token_ids": [5], "text": "x"}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        None,
        3,
        {"choices": []},
        {"choices": {}},
        {"choices": [3]},
        {"choices": [{"text": "x"}], "kv_transfer_params": PARAMS},
        {"choices": [{"token_ids": ["5"]}], "kv_transfer_params": PARAMS},
        {"choices": [{"token_ids": []}], "kv_transfer_params": PARAMS},
        {"choices": [CHOICE], "kv_transfer_params": "x"},
        {"choices": [CHOICE], "kv_transfer_params": {"remote_host": "h"}},
        {"choices": [CHOICE], "kv_transfer_params": {"remote_host": 3, "remote_port": 3}},
        {"choices": [CHOICE | {"logprobs": 3}], "kv_transfer_params": PARAMS},
        {"choices": [CHOICE | {"logprobs": {"token_logprobs": []}}], "kv_transfer_params": PARAMS},
        {
            "choices": [CHOICE | {"logprobs": {"token_logprobs": [-1], "top_logprobs": [{"a": -1}]}}],
            "kv_transfer_params": PARAMS,
        },
    ],
)
def test_what_is_no_answer_to_a_prefill_leg_is_an_engines_error(answer: Any) -> None:
    with refused(EngineError, "bad_answer"):
        sglang_decode_after(completion(), ROOM, read_prefilled(completion(), json.dumps(answer).encode(), True))


@pytest.mark.parametrize("answer", [None, [], {}, [[0, 0, ""]], [[0, 0, "tcp://h"]], [[0]], "x", [[0, 0, "tcp://h:x"]]])
def test_what_names_no_agent_is_an_engines_error(answer: Any) -> None:
    with pytest.raises(EngineError):
        read_agent(answer)


@pytest.mark.parametrize("answer", [None, [], {}, {"dp_size": 0}, {"dp_size": "2"}, {"dp_size": True}, {"dp_size": 2}])
def test_what_names_no_replicas_is_an_engines_error(answer: Any) -> None:
    with pytest.raises(EngineError):
        read_replicas(answer)


def test_sampling_params_in_vllms_words() -> None:
    alike = {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True}
    alike |= {"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    asked = {"max_new_tokens": 9, "min_new_tokens": 2, "top_k": -1, "sampling_seed": 4, "no_stop_trim": True}
    asked |= {"json_schema": '{"type": "object"}', "regex": None, "structural_tag": ""}
    said = {"prompt": "a", "return_token_ids": True, "max_tokens": 9, "min_tokens": 2, "top_k": 0, "seed": 4}
    said |= {"include_stop_str_in_output": True, "structured_outputs": {"json": '{"type": "object"}'}}
    assert sent(Leg("", completions(generate(**alike, **asked)))) == alike | said


def test_what_generate_leaves_out_is_sglangs_default_and_not_the_models() -> None:
    defaults = {"max_tokens": 128, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert completions(generate()) == {"prompt": "a", "return_token_ids": True} | defaults


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"image_data": "x"}, "image_data"),
        ({"return_logprob": True}, "return_logprob"),
        ({"sampling_params": {"max_new_tokens": None}}, "max_new_tokens: null"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"sampling_params": {"beam_width": 2}}, "beam_width"),
    ],
)
def test_what_has_no_word_is_named(body: dict[str, Any], name: str) -> None:
    with pytest.raises(ClientError, match=name):
        completions(ask("/generate", text="a", **body))


@pytest.mark.parametrize(
    ("said", "finish"),
    [
        ({"finish_reason": "length"}, {"type": "length", "length": 2}),
        ({"finish_reason": "stop", "stop_reason": None}, {"type": "stop", "matched": 6}),
        ({"finish_reason": "stop", "stop_reason": "x"}, {"type": "stop", "matched": "x"}),
    ],
)
def test_an_ends_reason_in_sglangs_words(said: dict[str, Any], finish: dict[str, Any]) -> None:
    answer = {"choices": [{"text": "ab", "token_ids": [5, 6]} | said], "usage": {"prompt_tokens": 3}}
    assert Answering("r").whole(answer)["meta_info"] == {
        "id": "r",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [3]}, {"choices": [{"finish_reason": "stop"}]}])
def test_what_is_no_answer_of_vllms_is_an_engines_error(answer: Any) -> None:
    with pytest.raises(EngineError):
        Answering("r").whole(answer)


def test_events_are_the_same_wherever_the_bytes_are_cut() -> None:
    raw = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata: {"b":\ndata: 2}\n\ndata: [DONE]\n\ndata: cut'
    expected = [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"]
    for at in range(len(raw)):
        events = Events()
        found = [each.data for part in (raw[:at], raw[at:]) for each in events.take(part)]
        assert found == expected, at
    events = Events()
    assert [found.data for byte in raw for found in events.take(bytes([byte]))] == expected


def test_a_long_event_takes_no_longer_than_its_length() -> None:
    """16 MiB in pieces of 1 KiB: looked through once. Again for each piece it would take 128 GiB of copying."""
    events, piece = Events(), b"x" * 1024
    began = time.process_time()
    assert list(events.take(b"data: ")) == []
    for _ in range(EVENT_BYTES // 1024 - 1):
        assert list(events.take(piece)) == []
    assert [len(found.data) for found in events.take(b"\n\n")] == [EVENT_BYTES - 1024]
    assert time.process_time() - began < 2.0


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(EngineError):
        list(Events().take(b"data: " + b"x" * EVENT_BYTES))


def test_text_that_says_finish_reason_ends_nothing() -> None:
    said = json.dumps({"choices": [{"text": '"finish_reason": "stop"', "finish_reason": None}]}).encode()
    assert not FINISH.search(said)
    assert FINISH.search(json.dumps({"choices": [{"text": "", "finish_reason": "stop"}]}).encode())


def test_engines_as_the_operator_writes_them() -> None:
    engine = read_engine(Role.PREFILL, "sglang=http://[::1]:30000/,bootstrap=9000")
    assert (engine.kind, engine.url, engine.host) == (Kind.SGLANG, "http://[::1]:30000", "::1")
    assert engine.bootstrap_url == "http://[::1]:9000"
    assert read_engine(Role.PREFILL, "sglang=http://h:1").bootstrap_port == 8998


@pytest.mark.parametrize(
    "said",
    [
        *("", "vllm", "vllm=", "vllm=h:1", "tgi=http://h:1", "vllm=http://h:x", "vllm=http://h:1/v1", "vllm=ftp://h:1"),
        *("vllm=http://h:1,bootstrap=3", "sglang=http://h:1,bootstrap=0", "sglang=http://h:1,port=3"),
        *("sglang=http://h:1,bootstrap=x", "vllm=http://u:p@h:1", "vllm=http://h:1?x"),
    ],
)
def test_what_names_no_engine_is_refused(said: str) -> None:
    with refused(OperatorError, "bad_option"):
        read_engine(Role.PREFILL, said)


def test_only_a_prefill_server_has_a_bootstrap_server() -> None:
    with pytest.raises(OperatorError):
        read_engine(Role.DECODE, "sglang=http://h:1,bootstrap=8998")


@pytest.mark.parametrize("deep", [{"a": {"b": [1]}}, {"a": [[1]]}, {"a": [{}]}])
def test_custom_params_that_would_end_sglangs_scheduler_are_refused(deep: dict[str, Any]) -> None:
    for body in ({"text": "x", "sampling_params": {"custom_params": deep}}, {"prompt": "x", "custom_params": deep}):
        with pytest.raises(ClientError, match=r"custom_params\.a: too deep"):
            read("/generate" if "text" in body else "/v1/completions", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        *((f'{{"prompt": {odd}}}', "bad_request") for odd in ("[-1]", "[1.5]", "[true]", "[null]", "[]", "[[]]", "{}")),
        *((f'{{"prompt": {odd}}}', "bad_request") for odd in ("[[1], []]", "[[1], 2]", "[1, [2]]", '[[1], "a"]')),
        *((f'{{"prompt": {odd}}}', "bad_request") for odd in ('["a", 1]', '["a", ["b"]]', "[[[1]]]", "7", "null")),
        (f'{{"prompt": [{"[1]," * 256}[1]]}}', "too_many"),
        ('{"prompt": ["a"' + ', "a"' * 256 + "]}", "too_many"),
        ('{"prompt": "a", "x": "' + "x" * (1 << 20) + '"}', "too_large"),
        ('{"prompt": "a"' + "".join(f', "x{i}": 1' for i in range(300)) + "}", "too_many"),
        ('{"prompt": "a", "n": ' + "1" * 2000 + "}", "bad_request"),
        ('{"prompt": "a", "custom_params": [1]}', "bad_request"),
        ('{"prompt": "a", "kv_transfer_p\\u0061rams": {}}', "has_transfer_params"),
        ('{"prompt": "a", "vllm_xargs": {"kv_transfer_params": 1}}', "has_transfer_params"),
    ],
)
def test_a_body_is_refused_without_being_parsed_whole(body: str, code: str) -> None:
    with refused(ClientError, code):
        read("/v1/completions", body.encode())


def test_prompts_are_told_apart_whatever_is_in_them() -> None:
    texts = ['a", "b', "]", "\\", 'ä\n"', "[1]", "", " , "]
    body = json.dumps({"prompt": texts, "stop": [1e-5, 0.10], "n": 2}, indent=3)
    asks = read("/v1/completions", body.encode()).asks
    assert [sent(Leg("", each.body))["prompt"] for each in asks] == [text for text in texts for _ in range(2)]
    assert json.loads(encode(asks[0].body))["stop"] == [1e-5, 0.10]
    tokens = read("/v1/completions", b'{"prompt": [ [1 ,2],\n[30] ]}').asks
    assert [sent(Leg("", each.body))["prompt"] for each in tokens] == [[1, 2], [30]]
    one = read("/v1/completions", b'{"prompt": [ 1 ,\t20 ]}').asks
    assert [sent(Leg("", each.body))["prompt"] for each in one] == [[1, 20]]


def test_a_large_field_is_not_copied_into_each_leg() -> None:
    (one,) = read("/v1/completions", json.dumps({"prompt": "x" * 100_000, "model": "m"}).encode()).asks
    for leg in (vllm_prefill(one, ROOM, Kind.VLLM), vllm_decode_after(one, PrefilledLeg(PARAMS))):
        assert sum(len(piece) for piece in pieces(leg.body) if isinstance(piece, bytes)) < 1000
        assert sent(leg)["prompt"] == "x" * 100_000
