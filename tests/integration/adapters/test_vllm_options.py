"""Options: every mistake gets an error that names it."""

from __future__ import annotations

import pytest

from kvbridge.adapters.vllm.options import VLLMOptions
from kvbridge.errors import OperatorError


def test_reads_its_own_names_and_leaves_others_alone() -> None:
    options = VLLMOptions.read({"kvbridge_socket": "/run/a-{rank}.sock", "kvbridge_hold_s": 5, "backends": ["UCX"]})
    assert options == VLLMOptions(socket="/run/a-{rank}.sock", hold_s=5)
    assert options.socket_of(3) == "/run/a-3.sock"
    assert VLLMOptions.read({"kvbridge_agent_uids": [998, 0]}) == VLLMOptions(agent_uids=(998, 0))


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
    with pytest.raises(OperatorError, match=text):
        VLLMOptions.read(extra)
