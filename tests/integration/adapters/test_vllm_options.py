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
        ({"kvbridge_hold_s": "5"}, "kvbridge_hold_s: '5' is str, must be float"),
        ({"kvbridge_deadline_s": 0}, r"kvbridge_deadline_s: 0, must be in \(0, 86400\]"),
        ({"kvbridge_deadline_s": True}, "kvbridge_deadline_s: True is bool, must be float"),
        ({"kvbridge_socket": 7}, "kvbridge_socket: 7 is int, must be str"),
        ({"kvbridge_socket": "a.sock"}, "kvbridge_socket: 'a.sock', must be an absolute path"),
        ({"kvbridge_agent_uids": 998}, "kvbridge_agent_uids: 998, must be a list of users' numbers"),
        ({"kvbridge_agent_uids": ["vllm"]}, r"kvbridge_agent_uids: \['vllm'\], must be a list"),
        ({"kvbridge_agent_uids": [True]}, r"kvbridge_agent_uids: \[True\], must be a list"),
        ({"kvbridge_allow_unwatched": 1}, "kvbridge_allow_unwatched: 1 is int, must be bool"),
        ({"kvbridge_agent_uids": [-1]}, r"kvbridge_agent_uids: \[-1\], must be a list"),
        ({"kvbridge_bootstrap_port": 0}, r"kvbridge_bootstrap_port: 0, must be in \[1, 65535\]"),
        ({"kvbridge_bootstrap_port": True}, r"kvbridge_bootstrap_port: True, must be in \[1, 65535\]"),
        ({"kvbridge_bootstrap_port": "7700"}, "kvbridge_bootstrap_port: '7700' is str, must be int"),
        ({"kvbridge_scales": "adapt"}, "kvbridge_scales: 'adapt', must be one of requantize, adopt"),
    ],
)
def test_refuses_what_it_cannot_mean(extra: dict[str, object], text: str) -> None:
    with pytest.raises(OperatorError, match=text):
        VLLMOptions.read(extra)
