"""Options of both adapters: every mistake gets an error that names it."""

from __future__ import annotations

import pytest

from kvbridge.adapters.sglang.options import SGLangOptions
from kvbridge.adapters.vllm.options import VLLMOptions
from kvbridge.errors import OperatorError
from testing.refusals import refused

SECONDS = r"a number of seconds in \(0, 86400\]"


def test_reads_its_own_names_and_leaves_others_alone() -> None:
    options = VLLMOptions.read({"kvbridge_socket": "/run/a-{rank}.sock", "kvbridge_hold_s": 5, "backends": ["UCX"]})
    assert options == VLLMOptions(socket="/run/a-{rank}.sock", hold_s=5)
    assert options.socket_of(3) == "/run/a-3.sock"
    assert VLLMOptions(socket="/a{rank}{gpu}").socket_of(3) == "/a3{gpu}", "vLLM's ranks name no GPU"
    assert VLLMOptions.read({"kvbridge_agent_uids": [998, 0]}) == VLLMOptions(agent_uids=(998, 0))


def test_options_are_read_from_the_environment() -> None:
    options = SGLangOptions.read(
        {
            "KVBRIDGE_ENGINE_SOCKET": "/run/agent-{rank}-{gpu}.sock",
            "KVBRIDGE_ENGINE_AGENT_UIDS": "998, 1000",
            "KVBRIDGE_ENGINE_ALLOW_UNWATCHED": "1",
            "KVBRIDGE_ENGINE_HOLD_S": "2.5",
            "KVBRIDGE_ENGINE_SERVICE_HOST": "10.0.0.1",
            "KVBRIDGE_ENGINE_PORT_7700_TCP": "tcp://10.0.0.1:7700",
            "KVBRIDGE_SOCKET": "the agent's",
        }
    )
    assert options.allow_unwatched and options.agent_uids == (998, 1000) and options.hold_s == 2.5
    assert options.socket_of(3, 5) == "/run/agent-3-5.sock"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("hold_s", text, float(text)) for text in (".5", "5.", "+5", " 30 ", "1e3")),
        ("agent_uids", "007", (7,)),
        ("agent_uids", "", ()),
        ("allow_unwatched", "1", True),
        ("allow_unwatched", "0", False),
        ("model_name", "1", "1"),
    ],
)
def test_the_environment_says_numbers_as_python_reads_them(name: str, text: str, value: object) -> None:
    assert getattr(SGLangOptions.read({f"KVBRIDGE_ENGINE_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"kvbridge_hold": 5}, "kvbridge_hold: not an option, known are kvbridge_socket, kvbridge_agent_uids"),
        ({"kvbridge_hold_s": "5"}, f"kvbridge_hold_s: '5', must be {SECONDS}"),
        ({"kvbridge_deadline_s": 0}, f"kvbridge_deadline_s: 0, must be {SECONDS}"),
        ({"kvbridge_deadline_s": 86401}, f"kvbridge_deadline_s: 86401, must be {SECONDS}"),
        ({"kvbridge_deadline_s": True}, f"kvbridge_deadline_s: True, must be {SECONDS}"),
        ({"kvbridge_deadline_s": float("nan")}, f"kvbridge_deadline_s: nan, must be {SECONDS}"),
        ({"kvbridge_socket": 7}, "kvbridge_socket: 7, must be an absolute path"),
        ({"kvbridge_socket": "a.sock"}, "kvbridge_socket: 'a.sock', must be an absolute path"),
        ({"kvbridge_model_name": 7}, "kvbridge_model_name: 7, must be text"),
        ({"kvbridge_weights": ""}, "kvbridge_weights: '', must be text of 1 to 200 printable ASCII characters"),
        ({"kvbridge_weights": "ü"}, "kvbridge_weights: 'ü', must be text of 1 to 200 printable ASCII characters"),
        ({"kvbridge_agent_uids": 998}, "kvbridge_agent_uids: 998, must be a list of users' numbers"),
        ({"kvbridge_agent_uids": ["vllm"]}, r"kvbridge_agent_uids: \['vllm'\], must be a list of users' numbers"),
        ({"kvbridge_agent_uids": [True]}, r"kvbridge_agent_uids: \[True\], must be a list of users' numbers"),
        ({"kvbridge_agent_uids": [5.0]}, r"kvbridge_agent_uids: \[5.0\], must be a list of users' numbers"),
        ({"kvbridge_agent_uids": [-1]}, r"kvbridge_agent_uids: \[-1\], must be a list of users' numbers"),
        ({"kvbridge_allow_unwatched": 1}, "kvbridge_allow_unwatched: 1, must be true or false"),
        ({"kvbridge_bootstrap_port": 0}, r"kvbridge_bootstrap_port: 0, must be a port in \[1, 65535\]"),
        ({"kvbridge_bootstrap_port": True}, r"kvbridge_bootstrap_port: True, must be a port in \[1, 65535\]"),
        ({"kvbridge_bootstrap_port": "7700"}, r"kvbridge_bootstrap_port: '7700', must be a port in \[1, 65535\]"),
        ({"kvbridge_scales": "adapt"}, "kvbridge_scales: 'adapt', must be requantize or adopt"),
    ],
)
def test_refuses_what_it_cannot_mean(extra: dict[str, object], text: str) -> None:
    with refused(OperatorError, "option_unknown" if "not an option" in text else "option_invalid", text):
        VLLMOptions.read(extra)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SOKET", "/x", "SOKET: not an option, known are KVBRIDGE_ENGINE_SOCKET, "),
        ("Socket", "/x", "Socket: not an option, known are KVBRIDGE_ENGINE_SOCKET, "),
        ("_socket", "/x", "_socket: not an option, known are KVBRIDGE_ENGINE_SOCKET, "),
        ("SOCKET", "a.sock", "SOCKET: 'a.sock', must be an absolute path"),
        ("HOLD_S", "soon", f"HOLD_S: 'soon', must be {SECONDS}"),
        ("HOLD_S", "0", f"HOLD_S: '0', must be {SECONDS}"),
        ("HOLD_S", "nan", f"HOLD_S: 'nan', must be {SECONDS}"),
        ("HOLD_S", "inf", f"HOLD_S: 'inf', must be {SECONDS}"),
        *(
            ("AGENT_UIDS", uids, f"AGENT_UIDS: '{uids}', must be users' numbers with commas between them")
            for uids in ("1,root", "5.0", "1e3", "-1", "1_0")
        ),
        *(
            ("ALLOW_UNWATCHED", text, f"ALLOW_UNWATCHED: '{text}', must be 0 or 1")
            for text in ("yes", "true", "false", "01", "")
        ),
    ],
)
def test_refuses_in_the_environment_what_it_cannot_mean(name: str, value: str, text: str) -> None:
    code = "option_unknown" if "not an option" in text else "option_invalid"
    with refused(OperatorError, code, f"KVBRIDGE_ENGINE_{text}"):
        SGLangOptions.read({f"KVBRIDGE_ENGINE_{name}": value})
