"""docs/architecture.md: the functions of a pull are those that one runs through, by a trace of both agents."""

from __future__ import annotations

import json
import re
import runpy
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Want

from testing.agents import agent
from tests.integration.agent.traced_agent import ROOT, traced

PAGE = (ROOT / "docs/architecture.md").read_text().partition("### A pull, function by function")[2]
ROW = re.compile(r"^\| .+? \| \[.+?\]\(\.\./(kvbridge/[\w/]+\.py)\) \| (.+) \|$", re.MULTILINE)
TRACED = "tests.integration.agent.traced_agent"
WAIT_S = 100.0  # a profiler looks at every call meanwhile


def carry(toy: dict[str, Any], prefill: Path, decode: Path) -> None:
    """One prompt, wanted before it is offered, with deadlines that no busy machine meets."""
    sender = toy["ToyEngine"]("prefill", str(prefill), 16, torch.bfloat16, False)
    receiver = toy["ToyEngine"]("decode", str(decode), 24, torch.float32, True)
    with closing(sender.talk), closing(receiver.talk):
        sender.attach()
        receiver.attach()
        receiver.allocate("one", 99)
        blocks = (Blocks(0, 0, tuple(receiver.blocks["one"])),)
        names = {"number": receiver.talk.new_number(), "request": "one", "rendezvous": "one"}
        to = {"sender": sender.talk.address, "first_token": 0, "end_token": 99, "blocks": blocks}
        receiver.talk.want(Want(**names, **to, deadline_s=WAIT_S))
        sender.prefill("one", torch.arange(100))
        end = time.monotonic() + WAIT_S
        while not ("one" in sender.ended and "one" in receiver.ended):
            assert time.monotonic() < end
            sender.step()
            receiver.step()
            time.sleep(0.001)
        assert receiver.ended["one"].is_good, receiver.ended["one"]


@pytest.mark.timeout(3 * WAIT_S)
def test_a_pull_runs_through_the_functions_that_the_page_names(tmp_path: Path) -> None:
    rows = [(path, name) for path, names in ROW.findall(PAGE) for name in re.findall(r"`(\w+)`", names)]
    toy = runpy.run_path(str(ROOT / "docs/toy_engine.py"))
    options: dict[str, Any] = {"start_s": WAIT_S, "module": TRACED, "routes": "pull,host", "verify": "always"}
    options["connect_s"] = options["silence_s"] = WAIT_S
    with agent(tmp_path, "p", **options) as prefill, agent(tmp_path, "d", **options) as decode:
        with traced() as called:
            carry(toy, prefill.socket, decode.socket)
        assert prefill.stop(WAIT_S) == decode.stop(WAIT_S) == 0
    for name in ("p", "d"):
        called |= {(path, function) for path, function in json.loads((tmp_path / f"{name}.calls").read_text())}
    here = [each for each in rows if not each[0].startswith("kvbridge/device/")]  # those run on GPUs only
    assert len(here) > 30 and [each for each in here if each not in called] == []
