"""Real SGLang servers on GPUs: prefill in one, decode in the other, by kvbridge and by SGLang's own NIXL, in one run.

    python -m tests.system.gpu.sglang_pairs --out FOLDER [--only equal,16to64] [--repeats 11] [--limit-s 340]
    python -m tests.system.gpu.sglang_pairs --cpu --out FOLDER        the same, small, on a CPU: to try the script

Needs two GPUs, SGLang, and no network. The model has Llama-8B's shape, with weights made on the GPUs, the same however
they are sharded. Each rank has an agent process. Overlap scheduling is on, as by default (not on a CPU). The most
important pairs come first. Each pair other than `equal` is measured in turn with `equal`, request by request, so that
their ratio is of the same seconds. For each pair and prompt length:

  transfer   the prefill server's own metric: from the first send to the poll that finds it finished (the slowest
             rank's). "first" is the first request of this length
  carried    from the prefill server's last send until the decode server takes the request into its batch
  ttft       from asking both servers to the decode server's first token. It includes the prompt's prefill
  tokens     compared with a server alone of TP 1. "tie": the tokens diverge where that server itself finds the two
             tokens' log probabilities no further apart than TIE nats, as bf16 does if the order of a sum changes. With
             TP 2 on one side the limit is twice the largest difference of servers alone of TP 1 and of TP 2 at the same
             positions
  rows       KV bytes on the decode side compared with the reference conversion of those on the prefill side, all layers

Exits with 1 if tokens or rows differ, with 2 if a pair could not be run to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.integration.agent.harness import AgentProcess
from tests.system.engines.fleet import prompt
from tests.system.gpu.pair_run import chosen_from, exit_code, keep_logs, machine, options
from tests.system.gpu.sglang_servers import ALONE, TIMES_S, Answer, Running, Servers, Side, ask
from tests.system.sglang import rows

TIE = 0.25  # the best of 128256 logits lie between 16 and 32, where bf16 goes by 0.125: two steps
LIKELY = 5  # tokens whose chances the server alone tells, at each place
ROW_TOKENS = (300, 1024)  # the first ends inside a page, of 16 and of 64
DECODED = 16
ANSWER_S = 75.0  # later than both servers give up and say why
MAPPED = re.compile(r"attached: .* memory=(\S+)")


@dataclass(frozen=True)
class Pair:
    name: str
    sender: Side
    receiver: Side
    is_same_codec: bool = True


@dataclass
class Found:
    """What one pair showed; `rows` one for each prompt length, `against` those of `equal` in the same seconds."""

    name: str
    failure: str = ""
    weights: str = "seeded"
    kv_rows: str = "-"
    route: str = ""
    handles: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    against: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)


def pairs_of(gpus: int) -> list[Pair]:
    """With two GPUs a server of two ranks shares one of them with the server on the other side."""
    two = (2, 3) if gpus > 3 else (0, 1)
    prefill, decode = Side("prefill16", "prefill", (0,)), Side("decode16", "decode", (1,))
    nixl = [Side(f"nixl-{role}", role, (gpu,), backend="nixl") for gpu, role in enumerate(("prefill", "decode"))]
    large = Side("decode64", "decode", (1,), page=64)
    return [
        Pair("equal", prefill, decode),
        Pair("nixl", nixl[0], nixl[1]),
        Pair("16to64", prefill, large),
        Pair("bf16-to-fp8", prefill, Side("decode-fp8", "decode", (1,), kv="fp8_e4m3"), is_same_codec=False),
        Pair("tp2-to-tp1", Side("prefill-two", "prefill", two), decode),
        Pair("tp1-to-tp2", prefill, Side("decode-two", "decode", two)),
        Pair("1to64", Side("prefill1", "prefill", (0,), page=1), large),  # 1 is SGLang's own choice
    ]


class Timed(Protocol):
    """A pair that can be measured beside others."""

    def timed(self, tokens: list[int]) -> dict[str, float]:
        """How one prompt came: `bytes`, and times in milliseconds, `transfer_ms` among them."""


@dataclass(frozen=True)
class Voice:
    """What an engine alone says to one prompt, and the chances of the likeliest tokens at each place."""

    tokens: list[int]
    likely: list[dict[int, float]]


class Drive:
    """One pair, request by request."""

    def __init__(self, pair: Pair, sender: Running, receiver: Running, servers: Servers) -> None:
        self.pair = pair
        self.sender = sender
        self.receiver = receiver
        self._servers = servers

    def decode(self, tokens: list[int], amount: int) -> tuple[Answer, int]:
        """Prefilled there, decoded here: the decode server's answer, and its room."""
        room = next(self._servers.rooms)
        body = greedy(tokens, amount) | {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.sender.server.bootstrap_port,
            "bootstrap_room": room,
        }
        with ThreadPoolExecutor(1) as pool:
            given = pool.submit(self.sender.server.generate, body, ANSWER_S)
            answer = ask(self.receiver.server, body, ANSWER_S)
            status, said = given.result(ANSWER_S)
        assert status == 200, f"prefill: {status} {said}"
        assert len(answer.tokens) == amount, f"{len(answer.tokens)} tokens, {amount} were asked for"
        return answer, room

    def timed(self, tokens: list[int]) -> dict[str, float]:
        """How one prompt came, in milliseconds and bytes."""
        known = len(self.sender.noted("reported"))
        answer, room = self.decode(tokens, 2)
        end = time.monotonic() + TIMES_S
        while True:
            reported = self.sender.noted("reported")[known:]
            sent, taken = self.sender.noted("prefill", room), self.receiver.noted("decode", room)
            counts = [len(each) for each in (reported, sent, taken)]
            if counts == [len(each.side.gpus) for each in (self.sender, self.sender, self.receiver)]:
                break
            assert time.monotonic() < end, f"of {room}: {counts} reports, sendings, takings"
            time.sleep(0.02)
        found = {
            "transfer_ms": max(each["latency_ms"] for each in reported),
            "carried_ms": (max(each["at_s"] for each in taken) - max(each["at_s"] for each in sent)) * 1e3,
            "bytes": sum(each["total_mb"] for each in reported) * 2**20,
            "ttft_ms": answer.first_s * 1e3,
        }
        if self.receiver.agents:
            found["bytes"] = self.receiver.fetched(room)
            assert found["bytes"], "no agent of the decode side has fetched it"
        return found

    def compare(self, alone: Running, length: int, prompts: int, tie: float = TIE) -> str:
        """Whether decoding goes on as in one server alone: "yes", a tie, "NO", or how often (other codec)."""
        verdicts, equal, continuations = [], 0, set()
        for number in range(prompts):
            tokens = prompt(length, seed=200 + number)
            ours = self.decode(tokens, DECODED)[0].tokens
            theirs = voice(alone, tokens)
            same = alike(ours, theirs.tokens)
            equal += same
            continuations.add(tuple(ours))
            if same < DECODED and self.pair.is_same_codec:
                verdicts.append(parting(ours, theirs, same, tie))
        if len(continuations) != prompts:
            return "NO: other prompts go on alike"
        if not self.pair.is_same_codec:
            return f"{equal}/{prompts * DECODED} alike"
        return "; ".join(sorted(set(verdicts))) or "yes"

    def compare_rows(self) -> str:
        """KV of prompts on both sides, every layer. AssertionError where they differ."""
        sizes = [len(each.side.gpus) for each in (self.sender, self.receiver)]
        self._servers.keep_rows(True)
        try:
            for length in ROW_TOKENS:
                _, room = self.decode(prompt(length, seed=300 + length), 2)
                given, taken = (
                    rows.load(self._servers.kept, side, room, ranks)
                    for side, ranks in zip(("prefill", "decode"), sizes, strict=True)
                )
                assert self.pair.is_same_codec == (given.codec == taken.codec), f"{given.codec} to {taken.codec}"
                rows.assert_carried(given, taken)
        finally:
            self._servers.keep_rows(False)
            for file in self._servers.kept.glob("*.npz"):
                file.unlink()
        return "yes" if self.pair.is_same_codec else "as converted"


def greedy(tokens: list[int], amount: int) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": amount, "ignore_eos": True},
    }


def voice(alone: Running, tokens: list[int]) -> Voice:
    more = {"return_logprob": True, "top_logprobs_num": LIKELY}
    status, said = alone.server.generate(greedy(tokens, DECODED) | more, ANSWER_S)
    assert status == 200, f"alone: {said}"
    likely = [{token: value for value, token, *_ in place} for place in said["meta_info"]["output_top_logprobs"]]
    return Voice(said["output_ids"], likely)


def alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens, from the first on."""
    return next((i for i in range(DECODED) if ours[i] != theirs[i]), DECODED)


def parting(ours: Sequence[int], theirs: Voice, place: int, tie: float) -> str:
    """Whether they say other tokens there because both are as likely."""
    gap = theirs.likely[place][theirs.tokens[place]] - theirs.likely[place].get(ours[place], -np.inf)
    return f"{'tie' if gap <= tie else 'NO'} at {place} ({gap:.2f} of {tie:.2f})"


def apart(ones: Sequence[Voice], others: Sequence[Voice]) -> float:
    """The most by which engines that are each alone differ in a token's chances, as long as they say the same."""
    most = 0.0
    for one, other in zip(ones, others, strict=True):
        until = alike(one.tokens, other.tokens) + 1
        for mine, theirs in zip(one.likely[:until], other.likely[:until], strict=True):
            most = max([most, *(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())])
    return most


def side_by_side(drives: Sequence[Timed], length: int, repeats: int) -> list[dict[str, Any]]:
    """One prompt length, a row for each pair: they take turns, every prompt is used once."""
    taken: list[list[dict[str, float]]] = [[] for _ in drives]
    for repeat in range(repeats):
        for number, drive in enumerate(drives):
            taken[number].append(drive.timed(prompt(length, seed=repeat * len(drives) + number)))
    return [_row(length, each) for each in taken]


def _row(length: int, taken: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": length, "megabytes": round(taken[0]["bytes"] / 1e6, 1)}
    for key in (key for key in taken[0] if key.endswith("_ms")):
        values = [each[key] for each in taken]
        name = key.removesuffix("_ms")
        row |= {
            f"{name}_first_ms": round(values[0], 2),
            key: round(statistics.median(values[1:]), 2),
            f"{name}_min_ms": round(min(values[1:]), 2),
            f"{name}_all_ms": [round(value, 2) for value in values],
        }
    return row | {"gb_per_s": round(taken[0]["bytes"] / row["transfer_ms"] / 1e6, 1)}


def ratios(upper: list[dict[str, Any]], lower: list[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """By prompt length, of medians and of minima."""
    found = []
    for above, below in zip(upper, lower, strict=False):
        keys = ("transfer_ms", "transfer_min_ms", "carried_ms", "carried_min_ms", "ttft_ms")
        each = {key: round(above[key] / below[key], 3) for key in keys}
        found.append({"of": of, "tokens": above["tokens"], **each})
    return found


class Run:
    """All pairs, in order; what each showed is written at once."""

    def __init__(self, chosen: argparse.Namespace, servers: Servers, about: dict[str, Any]) -> None:
        self.chosen = chosen
        self.results: list[Found] = []
        self._servers = servers
        self._about = about
        self._began = time.monotonic()
        self._gpus = len(about["gpus"])
        every = pairs_of(self._gpus)
        self._equal = every[0]
        self._alone = Side(ALONE, ALONE, (0,))
        self._alone_two = Side("alone-two", ALONE, (0, 1))
        self.pairs = [pair for pair in every if not chosen.only or pair.name in chosen.only.split(",")]
        unknown = set(filter(None, chosen.only.split(","))) - {pair.name for pair in every}
        assert not unknown, f"no such pairs: {unknown}; there are {[pair.name for pair in every]}"

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def start_all(self) -> None:
        """All at once, and wait: one that starts would disturb what is measured."""
        sides = {side.name: side for pair in self.pairs for side in (pair.sender, pair.receiver)}
        sides |= {side.name: side for side in (self._equal.sender, self._equal.receiver, self._alone)}
        if any(len(side.gpus) > 1 for side in sides.values()):
            sides[self._alone_two.name] = self._alone_two
        self._servers.start(*sides.values())
        for side in sides.values():
            try:
                said = "is up" if self._servers.get(side).is_seeded else "is up, with SGLang's dummy weights"
            except Exception as error:  # its pairs will say so
                said = f"did not start: {type(error).__name__}: {str(error)[-3000:]}"
            print(f"{self.spent_s:6.1f} s  {side.name} {said}", flush=True)

    def all(self) -> None:
        for index, pair in enumerate(self.pairs):
            if self.spent_s > self.chosen.limit_s:
                reason = f"not begun: {self.spent_s:.0f} s of {self.chosen.limit_s:.0f} were spent"
                self.results.append(Found(pair.name, failure=reason))
                continue
            self.results.append(self._drive(pair))
            print(
                f"{self.spent_s:6.1f} s  {pair.name}: {self.results[-1].failure.strip()[-600:] or 'done'}", flush=True
            )
            self.write()
            if self._servers.is_cpu:  # it has room for few at a time
                needed = {side for later in self.pairs[index + 1 :] for side in (later.sender, later.receiver)}
                for side in {pair.sender, pair.receiver} - needed - {self._equal.sender, self._equal.receiver}:
                    self._servers.drop(side)

    def write(self) -> None:
        kept = {**self._about, "seconds": round(self.spent_s, 1), "pairs": [vars(each) for each in self.results]}
        (self.chosen.out / "sglang_pairs.json").write_text(json.dumps(kept, indent=1) + "\n")

    def _drive(self, pair: Pair) -> Found:
        found = Found(pair.name)
        try:
            drive = Drive(pair, self._servers.get(pair.sender), self._servers.get(pair.receiver), self._servers)
            beside = [] if pair == self._equal else [self._beside()]
            if not (drive.sender.is_seeded and drive.receiver.is_seeded):
                found.weights = "SGLang's dummy weights: tokens say little"
            for length in self.chosen.lengths:
                row, *against = side_by_side([drive, *beside], length, self.chosen.repeats)
                found.rows.append(row)
                found.against += against
            if pair.sender.backend == "nixl":
                found.ratios = ratios(found.against, found.rows, "kvbridge/nixl")
            else:
                found.ratios = ratios(found.rows, found.against, "this/equal")
                found.route = drive.receiver.route(drive.sender)
                found.handles = handles_of([*drive.sender.agents, *drive.receiver.agents])
                found.kv_rows = drive.compare_rows()
            alone = self._servers.get(self._alone)
            is_split = len(pair.sender.gpus) != len(pair.receiver.gpus)
            for row in found.rows:
                tie = 2 * self._apart(row["tokens"]) if is_split else TIE
                row["decoded"] = drive.compare(alone, row["tokens"], self.chosen.prompts, tie)
        except AssertionError as error:
            found.failure = str(error) or traceback.format_exc(limit=-2)
            found.kv_rows = "NO" if "rows differ" in found.failure else found.kv_rows
        except Exception as error:  # the other pairs are worth their time
            found.failure = f"{type(error).__name__}: {error}"
        if found.failure:
            self._say_all(pair)
            self._drop_the_sick(pair)
        return found

    def _apart(self, length: int) -> float:
        prompts = [prompt(length, seed=200 + number) for number in range(self.chosen.prompts)]
        sides = (self._alone, self._alone_two)
        ones, others = ([voice(self._servers.get(side), tokens) for tokens in prompts] for side in sides)
        return apart(ones, others)

    def _say_all(self, pair: Pair) -> None:
        """What the pair's servers and agents said last, and what those know now: to see why it failed."""
        for side in (pair.sender, pair.receiver):
            with contextlib.suppress(Exception):  # it never started, or is gone
                running = self._servers.get(side)
                print(f"--- {side.name}: {running.server.held()}\n{running.server.tail(12)}")
                for each in running.agents:
                    print(f"--- its agent: {each.status}\n" + "\n".join(each.text().splitlines()[-12:]), flush=True)

    def _beside(self) -> Drive:
        sender, receiver = (self._servers.get(side) for side in (self._equal.sender, self._equal.receiver))
        return Drive(self._equal, sender, receiver, self._servers)

    def _drop_the_sick(self, pair: Pair) -> None:
        for side in (pair.sender, pair.receiver):
            try:
                is_well = self._servers.get(side).is_well()
            except Exception:  # it never started, and said why before: another try would cost the other pairs' time
                continue
            if not is_well:
                self._servers.drop(side)


def handles_of(agents: Sequence[AgentProcess]) -> str:
    """By which kinds of handles these agents have mapped their servers' memory."""
    return ",".join(sorted({kinds for each in agents for kinds in MAPPED.findall(each.text())}))


COLUMNS = (
    ("pair", 12, lambda found, row: found.name),
    ("tokens", 7, lambda found, row: row["tokens"]),
    ("MB", 7, lambda found, row: round(row["megabytes"])),
    ("transfer first", 15, lambda found, row: row["transfer_first_ms"]),
    ("later ms", 9, lambda found, row: row["transfer_ms"]),
    ("least", 7, lambda found, row: row["transfer_min_ms"]),
    ("GB/s", 6, lambda found, row: row["gb_per_s"]),
    ("carried", 8, lambda found, row: row["carried_ms"]),
    ("ttft", 8, lambda found, row: row["ttft_ms"]),
    ("rows", 13, lambda found, row: found.kv_rows),
    ("  tokens as alone", 34, lambda found, row: row.get("decoded", "-")),
)


def report(results: list[Found]) -> None:
    print("".join(f"{head:>{width}s}" for head, width, _ in COLUMNS))
    for found in results:
        for row in found.rows:
            print("".join(f"{value(found, row)!s:>{width}s}" for _, width, value in COLUMNS))
        if found.failure:
            print(f"{found.name:>12s} FAILED: {found.failure.strip()[-1500:]}")
    for found in results:
        for ratio in found.ratios:
            print(f"{found.name:>12s} {ratio['of']} at {ratio['tokens']}: {ratio['transfer_ms']} of medians,", end=" ")
            print(f"{ratio['transfer_min_ms']} of minima; carried {ratio['carried_ms']}, ttft {ratio['ttft_ms']}")


def main() -> int:
    chosen = chosen_from(options(__doc__ or "", repeats=11, limit_s=340.0))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are sessions of their own: end them
    agent_options = dict(part.split("=", 1) for part in chosen.agent)
    with tempfile.TemporaryDirectory(prefix="pairs-") as name, ExitStack() as stack:
        servers = Servers(Path(name), stack, chosen.cpu, agent_options)
        stack.callback(keep_logs, Path(name), chosen.out / "sglang_logs.tar.gz")
        run = Run(chosen, servers, machine("sglang"))
        if not chosen.cpu:
            run.start_all()
        run.all()
    report(run.results)
    said = [value for each in run.results for value in (each.kv_rows, *(r.get("decoded") for r in each.rows))]
    return exit_code(said, (each.failure for each in run.results))


if __name__ == "__main__":
    sys.exit(main())
