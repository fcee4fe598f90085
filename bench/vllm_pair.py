"""The same prompts through vLLM's own NixlConnector and through kvbridge: decode's time to first token, on a CPU.

    .venv-vllm/bin/python bench/vllm_pair.py [--repeats 9] [--lengths 1024,8192]

Prefill is on core 0, decode on core 1. Only one pair of engines runs at a time, because NixlConnector's progress
threads spin even in an idle engine and would take the cores. Prefix caching is off, and no prompt is used twice.
`floor` is the decode engine with a two-token prompt. `alone` is one engine that computes the whole prompt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("KVBRIDGE_TEST_AGENT_PYTHON", str(ROOT / ".venv/bin/python"))

from record import write  # noqa: E402

from demo.model import write_model  # noqa: E402
from tests.integration.agent.harness import agent  # noqa: E402
from tests.system.engines.engine_process import EngineConfig, EngineProcess  # noqa: E402
from tests.system.engines.fleet import PREFILL, prompt  # noqa: E402

CONNECTORS = ("NixlConnector", "kvbridge")
TOKENS = 65536  # room for KV in each engine


@dataclass
class Pair:
    """One connector's two engines."""

    name: str
    sender: EngineProcess
    receiver: EngineProcess

    def once(self, tokens: list[int], request: str) -> float:
        """Seconds from giving the prefilled request to the decode engine until its first token."""
        prefilled = self.sender.run(f"p-{self.name}-{request}", tokens, 1, dict(PREFILL))
        assert prefilled.params, prefilled
        started = time.perf_counter()
        answer = self.receiver.run(f"d-{self.name}-{request}", tokens, 1, prefilled.params)
        seconds = time.perf_counter() - started
        assert len(answer.tokens) == 1, answer
        return seconds


def start(stack: ExitStack, folder: Path, name: str, receiver_block: int) -> Pair:
    model = str(folder / "model")
    base = EngineConfig(model=model, max_model_len=16384, max_num_batched_tokens=16384)
    engines = []
    for side, core, block in (("p", "0", 32), ("d", "1", receiver_block)):
        more: dict[str, object] = {"num_gpu_blocks_override": TOKENS // block}
        config = replace(base, block_size=block, cores=core, more=more)
        if name == "kvbridge":
            stack.enter_context(agent(folder, f"{side}-0", slot_bytes=4 << 20, receive_slots=16, send_slots=8))
            config = replace(config, connector={"kvbridge_socket": str(folder / f"{side}-{{rank}}.sock")})
        else:
            more["kv_transfer_config"] = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                "engine_id": f"nixl-{side}",
            }
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(5600 + 10 * int(core))
        engines.append(stack.enter_context(EngineProcess(config, folder / f"{name}-{side}.log")))
    for engine in engines:
        engine.wait_ready()
    return Pair(name, *engines)


def measure(pair: Pair, length: int, repeats: int) -> dict[str, list[float]]:
    """The seconds of each figure. `report` keeps the first of each apart: it includes the handshake."""
    found: dict[str, list[float]] = {pair.name: [], "alone": [], "floor": []}
    for repeat in range(repeats + 1):
        tokens = prompt(length, seed=1000 * length + repeat)
        found[pair.name].append(pair.once(tokens, f"{length}-{repeat}"))
        for name, prompt_tokens in (("floor", tokens[:2]), ("alone", tokens)):
            started = time.perf_counter()
            pair.receiver.run(f"{name}-{length}-{repeat}", prompt_tokens, 1)
            found[name].append(time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--logs", help="a folder for the logs of engines and agents")
    chosen = parser.parse_args()
    lengths = [int(length) for length in chosen.lengths.split(",")]
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(chosen.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model")
        for connector in CONNECTORS:
            with ExitStack() as stack:
                pair = start(stack, folder, connector, 32)
                found |= {(length, connector): measure(pair, length, chosen.repeats) for length in lengths}
    rows = [row for length in lengths for row in report(length, {name: found[length, name] for name in CONNECTORS})]
    write("vllm_pair", {"repeats": chosen.repeats, "rows": rows})


def report(length: int, found: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for connector, timed in found.items():
        assert min(timed[connector][1:]) < min(timed["alone"][1:]), f"{connector}: nothing travelled"
        for name, seconds in timed.items():
            first, rest = seconds[0], seconds[1:]
            what = name if name == connector else f"{name} ({connector})"
            row: dict[str, object] = {"tokens": length, "what": what, "first_ms": round(first * 1e3, 2)}
            row |= {"median_ms": round(statistics.median(rest) * 1e3, 2), "min_ms": round(min(rest) * 1e3, 2)}
            figures = "  ".join(f"{key.removesuffix('_ms')} {row[key]:8.1f}" for key in row if key.endswith("_ms"))
            print(f"{length:6d} tokens  {what:24s} ms: {figures}")
            rows.append(row)
    ours, theirs = (found[name][name][1:] for name in ("kvbridge", "NixlConnector"))
    ratio = {"median": statistics.median(ours) / statistics.median(theirs), "min": min(ours) / min(theirs)}
    print(f"{length:6d} tokens  kvbridge / NixlConnector: median {ratio['median']:.2f}, min {ratio['min']:.2f}")
    return [*rows, {"tokens": length, "what": "ratio", **{key: round(value, 3) for key, value in ratio.items()}}]


if __name__ == "__main__":
    main()
