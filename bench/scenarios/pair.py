"""The same prompts through an engine's own NIXL connector and through kvbridge, on a CPU: `--engine vllm` or `sglang`.

To be run by the engine's Python. Prefill is on core 0 (if it has two `--ranks`, on both), decode on core 1. No prompt
is used twice; prefix caching is off. The first of each is kept apart: it includes the handshake.

vLLM: only one pair runs at a time, because NixlConnector's progress threads spin even in an idle engine and would take
the cores. Times are to the decode engine's first token: of the prompt; of a `floor`, a prompt of two tokens; and of one
engine `alone` that computes the whole prompt.

SGLang: the servers of both run side by side and take turns, prompt by prompt. Each is computed in one chunk, so all of
it is sent at once. `ttft` is from the two requests to the decode server's first token, most of it prefill; `carried`
from prefill's last send until the decode server takes the request into its batch; `reported` is SGLang's own time of
the transfer, on the prefill side. SGLang's NIXL backend registers a CPU's memory as a GPU's, and then refuses unequal
ranks. The tests' plugin fixes both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.scenario import Bench
from bench.timing import first_and_rest, ratios
from tests.system.engines.fleet import prompt
from tests.system.gpu.pair_drive import Pair
from tests.system.gpu.pair_engines import VLLM, Engines, SGLang
from tests.system.gpu.sglang_pairs import SGLangDrive
from tests.system.gpu.vllm_pairs import VLLMDrive

CARRIERS = ("nixl", "kvbridge")
Times = dict[tuple[str, str], list[float]]  # milliseconds by what is measured and by carrier, in order
SGLANG = {"ttft": "ttft_ms", "carried": "carried_ms", "reported": "transfer_ms"}


def measure(
    bench: Bench,
    *,
    engine: str = "vllm",
    repeats: int = 9,
    lengths: tuple[int, ...] = (1024, 8192),
    ranks: tuple[str, ...] = ("1:1", "2:1"),
    logs: str = "",
) -> dict[str, Any]:
    """`ranks`: those of SGLang that prefill and that decode. `logs`: a folder for those of servers and agents."""
    measured = {"vllm": vllm, "sglang": sglang}[engine]
    bench.name, rows = f"{engine}_pair", []
    with tempfile.TemporaryDirectory() as name:
        for about, found in measured(Path(logs or name), repeats + 1, lengths, ranks):
            for (what, carrier), ms in found.items():
                rows.append({**about, "what": what, "carrier": carrier, **first_and_rest(ms)})
                bench.show(rows[-1])
            for what in dict.fromkeys(what for what, _ in found):
                ours, theirs = (found[what, carrier][1:] for carrier in CARRIERS[::-1])
                rows.append({**about, "what": what, "carrier": "kvbridge / nixl", **ratios(ours, theirs)})
                bench.show(rows[-1])
    return {"repeats": repeats, "rows": rows}


def vllm(
    folder: Path, repeats: int, lengths: tuple[int, ...], _: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], Times]]:
    found: dict[int, Times] = {length: {} for length in lengths}
    for carrier in CARRIERS:
        with ExitStack() as stack:
            sides = [
                VLLM(f"{carrier}-{side}", (core,), 32, is_nixl=carrier == "nixl") for core, side in enumerate("pd")
            ]
            drive = VLLMDrive(Pair(carrier, sides[0], sides[1]), Engines(_own(folder, carrier), stack, True, {}))
            for length in lengths:
                times: dict[str, list[float]] = {"ttft": [], "floor": [], "alone": []}
                for repeat in range(repeats):
                    tokens = prompt(length, seed=1000 * length + repeat)
                    times["ttft"].append(drive.came(tokens, 1)[0].decode_s * 1e3)
                    for what, prompt_tokens in (("floor", tokens[:2]), ("alone", tokens)):
                        times[what].append(drive.run(drive.receiver, prompt_tokens, 1)[1] * 1e3)
                found[length] |= {(what, carrier): each for what, each in times.items()}
    yield from (({"tokens": length}, times) for length, times in found.items())


def sglang(
    folder: Path, repeats: int, lengths: tuple[int, ...], ranks: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], Times]]:
    for each in ranks:
        with ExitStack() as stack:
            engines = Engines(_own(folder, each.replace(":", "-")), stack, True, {}, dtype="float32")
            pairs = [_sglang_pair(carrier, [int(count) for count in each.split(":")]) for carrier in CARRIERS]
            engines.start(*(side for pair in pairs for side in (pair.sender, pair.receiver)))
            drives = [SGLangDrive(pair, engines) for pair in pairs]
            for length in lengths:
                found: Times = {(what, carrier): [] for carrier in CARRIERS for what in SGLANG}
                for repeat in range(repeats):
                    for drive in drives if repeat % 2 else drives[::-1]:
                        seed = 1000 * length + 2 * repeat + drives.index(drive)
                        timed = drive.timed(prompt(length, seed=seed))
                        for what, key in SGLANG.items():
                            found[what, drive.pair.name].append(timed[key])
                yield {"tokens": length, "ranks": each}, found


def _sglang_pair(carrier: str, ranks: list[int]) -> Pair:
    """Ranks are pinned: two of them to both cores, prefill's one to the first, decode's to the second."""
    cores = [(0, 1) if count > 1 else (place,) for place, count in enumerate(ranks)]
    sender, receiver = (
        SGLang(f"{carrier}-{role}-{len(own)}", own, is_nixl=carrier == "nixl", role=role)
        for role, own in zip(("prefill", "decode"), cores, strict=True)
    )
    return Pair(carrier, sender, receiver)


def _own(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    return folder / name
