"""Options of both adapters: every mistake gets an error that names it."""

from __future__ import annotations

import pytest

from kvbridge.adapters.sglang.options import SGLangOptions
from kvbridge.adapters.vllm.options import VLLMOptions
from kvbridge.errors import OperatorError
from testing.refusals import refused


def test_reads_its_own_names_and_leaves_others_alone() -> None:
    options = VLLMOptions.read({"kvbridge_socket": "/run/a-{rank}.sock", "kvbridge_hold_s": 5, "backends": ["UCX"]})
    assert options == VLLMOptions(socket="/run/a-{rank}.sock", hold_s=5)
    assert options.socket_of(3) == "/run/a-3.sock"
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
    ("extra", "text"),
    [
        ({"kvbridge_hold": 5}, "kvbridge_hold: not an option, known are kvbridge_socket, kvbridge_agent_uids"),
        ({"kvbridge_hold_s": "5"}, "kvbridge_hold_s: '5': Expected `float`, got `str`"),
        ({"kvbridge_deadline_s": 0}, "kvbridge_deadline_s: 0: Expected `float` > 0.0"),
        ({"kvbridge_deadline_s": 86401}, "kvbridge_deadline_s: 86401: Expected `float` <= 86400.0"),
        ({"kvbridge_deadline_s": True}, "kvbridge_deadline_s: True: Expected `float`, got `bool`"),
        ({"kvbridge_socket": 7}, "kvbridge_socket: 7: Expected `str`, got `int`"),
        ({"kvbridge_socket": "a.sock"}, r"kvbridge_socket: 'a.sock': Expected `str` matching regex '\^/'"),
        ({"kvbridge_weights": ""}, "kvbridge_weights: '': Expected `str` matching"),
        ({"kvbridge_weights": "ü"}, "kvbridge_weights: 'ü': Expected `str` matching"),
        ({"kvbridge_agent_uids": 998}, "kvbridge_agent_uids: 998: Expected `array`, got `int`"),
        ({"kvbridge_agent_uids": ["vllm"]}, r"kvbridge_agent_uids: \['vllm'\]: Expected `int`, got `str`"),
        ({"kvbridge_agent_uids": [True]}, r"kvbridge_agent_uids: \[True\]: Expected `int`, got `bool`"),
        ({"kvbridge_agent_uids": [-1]}, r"kvbridge_agent_uids: \[-1\]: Expected `int` >= 0"),
        ({"kvbridge_allow_unwatched": 1}, "kvbridge_allow_unwatched: 1: Expected `bool`, got `int`"),
        ({"kvbridge_bootstrap_port": 0}, "kvbridge_bootstrap_port: 0: Expected `int` >= 1"),
        ({"kvbridge_bootstrap_port": True}, "kvbridge_bootstrap_port: True: Expected `int`, got `bool`"),
        ({"kvbridge_bootstrap_port": "7700"}, "kvbridge_bootstrap_port: '7700': Expected `int`, got `str`"),
        ({"kvbridge_scales": "adapt"}, "kvbridge_scales: 'adapt': Invalid enum value 'adapt'"),
    ],
)
def test_refuses_what_it_cannot_mean(extra: dict[str, object], text: str) -> None:
    with refused(OperatorError, "option_unknown" if "not an option" in text else "option_invalid", text):
        VLLMOptions.read(extra)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SOKET", "/x", "SOKET: not an option, known are KVBRIDGE_ENGINE_SOCKET, "),
        ("HOLD_S", "soon", "HOLD_S: 'soon': Expected `float`, got `str`"),
        ("AGENT_UIDS", "1,root", "AGENT_UIDS: '1,root': Expected `int`, got `str`"),
        ("ALLOW_UNWATCHED", "yes", "ALLOW_UNWATCHED: 'yes': Expected `bool`, got `str`"),
    ],
)
def test_refuses_in_the_environment_what_it_cannot_mean(name: str, value: str, text: str) -> None:
    code = "option_unknown" if "not an option" in text else "option_invalid"
    with refused(OperatorError, code, f"KVBRIDGE_ENGINE_{text}"):
        SGLangOptions.read({f"KVBRIDGE_ENGINE_{name}": value})
