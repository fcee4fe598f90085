"""The routers of deploy/kubernetes' overlays, as those start them, give work to every pod of both roles."""

from __future__ import annotations

import itertools
import re
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from testing.http_server import HttpServer
from testing.serving import listening
from testing.waiting import wait_for
from tests.system.routers.fleet import NAME, ROUTERS, router
from tests.system.routers.test_pairing import Worker
from tests.system.test_kubernetes import OURS, OVERLAYS, container, pod_names

pytestmark = [
    pytest.mark.routers,
    pytest.mark.skipif(not (ROUTERS / "python").exists(), reason="make .venv-routers/.ready"),
]
SERVE_S = 120.0
OF_PROXY = "vllm-two-nodes"  # tests/system/test_two_nodes.py
prompts = itertools.count()  # routers send a prompt that they know to where it went before


class Counted(Worker):
    asked: ClassVar[list[str]]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        super().do_POST()


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each != OF_PROXY])
def test_every_pod_is_given_requests(overlay: str, tmp_path: Path) -> None:
    """Synthetic servers, each of which counts its requests, stand where DNS would name the pods."""
    found = container(overlay, "router", "router")
    command = " ".join([*found["command"], *found["args"]]).removesuffix(" --host=0.0.0.0 --port=30000")
    counts: dict[str, list[str]] = {}
    with ExitStack() as stack:
        for name in (each for role in OURS for each in pod_names(overlay, role)):
            counts[name] = []
            worker = type("Counted", (Counted,), {"asked": counts[name]})
            command = command.replace(f"{name}:8000", stack.enter_context(listening(worker)))
        program, *rest = re.sub("^python3", "python", command).split()
        server = router(tmp_path, overlay, [str(ROUTERS / program), *rest])
        stack.callback(server.kill)
        wait_for(lambda: is_served(server) and all(counts.values()), SERVE_S, lambda: f"{counts} {server.tail()}", 0.2)


def is_served(server: HttpServer) -> bool:
    body = {"model": NAME, "prompt": f"{next(prompts)} to be", "max_tokens": 4}
    return server.is_up("/readiness") and server.ask("/v1/completions", body)[0] == 200
