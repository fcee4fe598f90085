"""The same prompts through SGLang's own NIXL backend and through kvbridge, on a CPU.

    .venv-sglang/bin/python bench/sglang_pair.py [--repeats 9] [--lengths 1024,8192] [--pairs 1:1,2:1]

Prefill is on core 0 (if it has two ranks, on both), decode on core 1. The servers of both backends run side by side and
take turns, prompt by prompt. No prompt is used twice. Each is computed in one chunk, so all of it is sent at once. For
each prompt:

    ttft      from the two requests to the decode server's first token; most of it is prefill
    carried   from prefill's last send until the decode server takes the request into its batch
    reported  SGLang's own time of the transfer, on the prefill side

SGLang's NIXL backend registers a CPU's memory as a GPU's, and then refuses unequal ranks. The tests' plugin fixes both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("KVBRIDGE_TEST_AGENT_PYTHON", str(ROOT / ".venv/bin/python"))

from record import write  # noqa: E402

from demo.model import write_model  # noqa: E402
from tests.integration.agent.harness import agent  # noqa: E402
from tests.system.engines.fleet import prompt  # noqa: E402
from tests.system.sglang.server import Server, ServerConfig  # noqa: E402

BACKENDS = ("nixl", "kvbridge")
TOKENS = 32768  # room for KV in each server
LONGEST = 16384
WHAT = ("ttft", "carried", "reported")


@dataclass
class Pair:
    """One backend's two servers."""

    name: str
    sender: Server
    receiver: Server
    times: Path

    def once(self, tokens: list[int], room: int) -> dict[str, float]:
        """Carry one prompt. Returns the seconds of each figure."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.sender.bootstrap_port,
            "bootstrap_room": room,
        }
        started = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            given = pool.submit(self.sender.generate, body)
            status, said = self.receiver.generate(body)
            ttft = time.perf_counter() - started
            assert given.result()[0] == 200 and status == 200, (given.result(), said)
        return {"ttft": ttft, **self._timed(room)}

    def _timed(self, room: int) -> dict[str, float]:
        """The times that the servers recorded. Of several ranks the last one counts."""
        end = time.monotonic() + 5
        while True:
            lines = [json.loads(line) for line in self.times.read_text().splitlines()]
            sent, taken = ([x["at_s"] for x in lines if x["side"] == side] for side in ("prefill", "decode"))
            reported = [x["latency_ms"] / 1e3 for x in lines if x["side"] == "reported"]
            ranks = self.sender.config.tensor_parallel_size, self.receiver.config.tensor_parallel_size
            if (len(sent), len(taken), len(reported)) == (*ranks, ranks[0]):
                break
            assert time.monotonic() < end, (room, lines)
            time.sleep(0.02)
        self.times.write_text("")
        return {"carried": max(taken) - max(sent), "reported": max(reported)}


def start(stack: ExitStack, folder: Path, name: str, ranks: tuple[int, int]) -> Pair:
    """Start a pair, without waiting until it is ready."""
    own = folder / f"{name}-{ranks[0]}-{ranks[1]}"
    own.mkdir()
    times = own / "times"
    times.touch()
    servers = []
    for role, size, core in (("prefill", ranks[0], "0"), ("decode", ranks[1], "1")):
        told = {"KVBRIDGE_TEST_TIMES": str(times)}
        if name == "kvbridge":
            for rank in range(size):
                slots: dict[str, Any] = {"slot_bytes": 4 << 20, "receive_slots": 16, "send_slots": 8}
                stack.enter_context(agent(own, f"{role}-{rank}", **slots))
            told["KVBRIDGE_ENGINE_SOCKET"] = str(own / f"{role}-{{rank}}.sock")
        config = ServerConfig(
            role,
            tensor_parallel_size=size,
            chunked_prefill_size=LONGEST,
            max_total_tokens=TOKENS,
            backend=name,
            keeps_prefixes=False,
            cores=core if size == 1 else "0|1",
            environment=told,
        )
        servers.append(stack.enter_context(Server(config, str(folder / "model"), own, role)))
    sender, receiver = servers
    return Pair(name, sender, receiver, times)


def measure(pairs: list[Pair], length: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The times of each backend. `report` keeps the first of each apart: it includes the handshake."""
    found: dict[str, list[dict[str, float]]] = {pair.name: [] for pair in pairs}
    for repeat in range(repeats + 1):
        turn = pairs if repeat % 2 else pairs[::-1]
        for pair in turn:
            seed = 1000 * length + 2 * repeat + pairs.index(pair)
            found[pair.name].append(pair.once(prompt(length, seed=seed), room=seed + 1))
    return found


def report(length: int, ranks: tuple[int, int], found: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    place = {"tokens": length, "ranks": f"{ranks[0]}:{ranks[1]}"}
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for backend, timed in found.items():
        for what in WHAT:
            first, *rest = (each[what] * 1e3 for each in timed)
            best[what, backend] = statistics.median(rest), min(rest)
            row = {"first_ms": first, "median_ms": best[what, backend][0], "min_ms": best[what, backend][1]}
            row = {key: round(value, 2) for key, value in row.items()}
            figures = "  ".join(f"{key.removesuffix('_ms')} {value:8.1f}" for key, value in row.items())
            print(f"{length:6d} tokens  {place['ranks']}  {backend:9s} {what:9s} ms: {figures}", flush=True)
            rows.append({**place, "backend": backend, "what": what, **row})
    if set(found) == set(BACKENDS):
        for what in WHAT:
            median, least = (best[what, "kvbridge"][i] / best[what, "nixl"][i] for i in (0, 1))
            print(f"{length:6d} tokens  {place['ranks']}  kvbridge / nixl {what}: median {median:.2f}, min {least:.2f}")
            rows.append({**place, "what": f"ratio {what}", "median": round(median, 3), "min": round(least, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--pairs", default="1:1,2:1", help="ranks that prefill : ranks that decode")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--logs", help="a folder for the logs of servers and agents")
    chosen = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(chosen.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model")
        for said in chosen.pairs.split(","):
            prefills, decodes = map(int, said.split(":"))
            ranks = prefills, decodes
            with ExitStack() as stack:
                pairs = [start(stack, folder, backend, ranks) for backend in chosen.backends.split(",")]
                for server in (each for pair in pairs for each in (pair.sender, pair.receiver)):
                    server.wait_ready()
                for length in map(int, chosen.lengths.split(",")):
                    rows += report(length, ranks, measure(pairs, length, chosen.repeats))
    write("sglang_pair", {"repeats": chosen.repeats, "rows": rows})


if __name__ == "__main__":
    main()
