"""Pairs of real vLLM engines of models with recurrent states, on GPUs: by kvbridge, and by NixlConnector in turns.

    python -m tests.system.gpu.state_pairs --out FOLDER [--only nemotron-equal] [--repeats 11] [--limit-s 300]
    python -m tests.system.gpu.state_pairs --sets kinds,drafts --out FOLDER [--lengths 2,5,129,1000]
    python -m tests.system.gpu.state_pairs --cpu --out FOLDER        the same, small, on a CPU: to try the script

Needs vLLM and no network; one GPU, or two for engines of two ranks. The models have a few layers and seeded weights.
What is compared is as in `sparse_pairs`; beside the rows of attention, the states of all layers, byte for byte, by the
tests' own reading of vLLM's layers. Six sets of pairs:

  times   Qwen3.5 and Qwen3-Next (Gated DeltaNet), Nemotron-H (Mamba 2): timed as in `sparse_pairs`, TP and PP. In
          "cached" pairs both sides have the prefix cache, and have most of the prompts whose tokens are compared.
          NixlConnector wants VLLM_SSM_CONV_STATE_LAYOUT=DS, which all engines here have
  large   the same with as many layers, heads and states as Nemotron-H 8B and Qwen3.5 9B have
  kinds   the other kinds: KDA, Mamba 1, a short convolution, lightning, Mamba 2 with one group, and beside attention in
          each layer. Not timed; the decode engine has its convolutions' rows in the other order
  drafts  engines that draft by MTP or n-grams, other numbers of tokens or on one side only. Not timed. Rows of a layer
          that only the decode side has are zeros. `drafted` is how many tokens were drafted and accepted there, in
          requests that came. Models of a "cycle" go on with tokens that come again, so most drafts are accepted
  hits    Qwen3.5 with and without MTP drafts, whose prefix caches have most of what is asked for, computed in pieces of
          1024 tokens: 1 and 2 tokens, around a block, 4000; then sixteen at once of a sender that preempts
  split   KDA beside latents whose tokens two ranks split by decode context parallelism, to and from one rank. Not
          timed; that rows are right only the tokens say
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import numpy as np

from demo.rows import SavedRows
from tests.system.engines.drafts import repetitive
from tests.system.engines.fleet import PREFILL, prompt
from tests.system.engines.states import of_one_rank
from tests.system.gpu.pair_drive import TIE, Came, Drive, Pair, verdict
from tests.system.gpu.pair_engines import (
    ANSWER_S,
    DECODED,
    LARGE,
    NEMOTRON,
    NEMOTRON_CYCLE,
    QWEN,
    QWEN35_MTP,
    QWEN_CYCLE,
    VLLM,
    RunningVLLM,
)
from tests.system.gpu.pair_run import Found, main
from tests.system.gpu.sparse_pairs import SparseRun
from tests.system.gpu.vllm_pairs import VLLMDrive

AT_ONCE = 16
SHORT = (2, 3, 4, 300)  # tokens; around the convolution's width
STAGES = {"qwen35": (2, 2), QWEN: (2, 2), NEMOTRON: (4, 2)}  # the first of Gated DeltaNet has no attention
BLOCK = {"kimi": 64, "ring": 64}  # tokens, as latents want them
KINDS = ("jamba", "lfm2", "ring", "granite", "falcon-h1", "kimi")  # the last tunes its kernels for minutes


def timed_pairs(gpus: int, models: Sequence[str] = (NEMOTRON, QWEN, "qwen35")) -> list[Pair]:
    """In the order of their worth."""
    far = (0,) if gpus == 1 else (1,)
    pairs: list[Pair] = []
    for model in models:

        def vllm(
            what: str,
            at: tuple[int, ...],
            is_nixl: bool = False,
            has_prefixes: bool = False,
            stages: tuple[int, ...] = (),
            model: str = model,
        ) -> VLLM:
            same = {"is_nixl": is_nixl, "has_prefixes": has_prefixes, "model": model, "stages": stages}
            return VLLM(f"{model}-{what}", at, 32, backend="", **same)  # type: ignore[arg-type]

        beside = Pair(f"{model}-nixl", vllm("nixl-p", (0,), True), vllm("nixl-d", far, True))
        near, there = vllm("p", (0,)), vllm("d", far)
        cached = [vllm(f"cached-{side}", at, has_prefixes=True) for side, at in (("p", (0,)), ("d", far))]
        pairs += [Pair(f"{model}-equal", near, there, beside=beside), Pair(f"{model}-cached", cached[0], cached[1])]
        if gpus > 1:
            ranks = (2, 3) if gpus > 3 else (0, 1)
            two = vllm("two", ranks)
            beside = Pair(f"{model}-nixl2", vllm("nixl-two", ranks, True), vllm("nixl-d", far, True))
            pairs += [Pair(f"{model}-tp2-to-tp1", two, there, beside=beside), Pair(f"{model}-tp1-to-tp2", near, two)]
        if gpus > 1 and model in STAGES:
            staged = vllm("staged", ranks, stages=STAGES[model])
            pairs += [Pair(f"{model}-pp2-to-pp1", staged, there), Pair(f"{model}-pp1-to-pp2", near, staged)]
    return pairs


def kind_pairs(gpus: int) -> list[Pair]:
    far = (0,) if gpus == 1 else (1,)

    def vllm(model: str, side: str, at: tuple[int, ...], order: str) -> VLLM:
        return VLLM(f"{model}-{side}", at, BLOCK.get(model, 32), model=model, backend="", conv_order=order)

    return [Pair(model, vllm(model, "p", (0,), "DS"), vllm(model, "d", far, "SD")) for model in KINDS]


def hit_pairs(gpus: int) -> list[Pair]:
    far = (0,) if gpus == 1 else (1,)
    pieces = ("max_num_batched_tokens", 1024), ("max_num_seqs", AT_ONCE)
    short = *pieces, ("num_gpu_blocks_override", 48), ("scheduler_reserve_full_isl", False)

    def vllm(side: str, at: tuple[int, ...], drafts: tuple[str, int], more: tuple[tuple[str, Any], ...]) -> VLLM:
        name = f"hits-{drafts[0]}{side}"
        return VLLM(name, at, 32, model=QWEN35_MTP, backend="", has_prefixes=True, drafts=drafts, more=more)

    pairs = {"qwen35-hits": (("", 0), ("", 0)), "qwen35-hits-mtp": (("mtp", 3), ("mtp", 2))}
    return [
        Pair(name, vllm("p", (0,), ours, short), vllm("d", far, theirs, pieces))
        for name, (ours, theirs) in pairs.items()
    ]


def split_pairs() -> list[Pair]:
    both, one = (
        VLLM(f"kimi-{len(at)}", at, 64, model="kimi", backend="", is_split=len(at) > 1) for at in ((0, 1), (0,))
    )
    return [Pair("kimi-split-to-one", both, one), Pair("kimi-one-to-split", one, both)]


def drafted_pairs() -> list[Pair]:
    """All on one GPU, in the order of their worth."""

    def vllm(model: str, method: str = "", tokens: int = 0, has_prefixes: bool = False) -> VLLM:
        name = f"{model}-{method or 'plain'}{tokens or ''}{'-cached' * has_prefixes}"
        return VLLM(name, (0,), 32, model=model, backend="", has_prefixes=has_prefixes, drafts=(method, tokens))

    qwen, nemotron = vllm(QWEN), vllm(NEMOTRON)
    three, two, ngrams = vllm(QWEN, "mtp", 3), vllm(QWEN, "mtp", 2), vllm(QWEN, "ngram", 2)
    cached = [vllm(QWEN, "mtp", tokens, has_prefixes=True) for tokens in (3, 2)]
    mamba3, mamba2 = vllm(NEMOTRON, "ngram", 3), vllm(NEMOTRON, "ngram", 2)
    cycle = [vllm(QWEN_CYCLE, *drafts) for drafts in (("mtp", 3), ("mtp", 2), ("ngram", 3), ("", 0))]
    mamba = [vllm(NEMOTRON_CYCLE, "ngram", tokens) for tokens in (2, 3)]
    return [
        Pair("qwen-mtp", three, two),
        Pair("qwen-mtp-decode", qwen, two),
        Pair("nemotron-ngram", mamba3, mamba2),
        Pair("qwen-mtp-cached", cached[0], cached[1]),
        Pair("nemotron-ngram-decode", nemotron, mamba2),
        Pair("qwen-ngram-decode", qwen, ngrams),
        Pair("qwen-mtp-prefill", three, qwen),
        Pair("nemotron-ngram-prefill", mamba3, nemotron),
        Pair("qwen-cycle-mtp", cycle[1], cycle[0]),
        Pair("qwen-cycle-ngram-decode", cycle[3], cycle[2]),
        Pair("nemotron-cycle-ngram", mamba[0], mamba[1]),
    ]


class StateDrive(VLLMDrive):
    def compare_rows(self) -> str:
        are_split = any(isinstance(each.side, VLLM) and each.side.is_split for each in (self.sender, self.receiver))
        said = "states only" if are_split else super().compare_rows()
        for length in self.row_tokens:
            came = self.decode(prompt(length, seed=350 + length), 2)
            named = (self.sender, came.sender_name), (self.receiver, came.receiver_name)
            ours, theirs = (self._states(where, name, length - 1) for where, name in named)
            assert ours.keys() == theirs.keys() and ours
            for key, rows in ours.items():
                assert rows.any() and np.array_equal(rows, theirs[key]), f"{length} tokens: {key}"
        return said

    def assert_carried(self, given: SavedRows, taken: SavedRows, until: int) -> None:
        """Rows of a layer that the sender has not are zeros."""
        assert not any(rows.any() for key, rows in taken.rows.items() if key not in given.rows)
        both = given.rows.keys() & taken.rows.keys()
        ours, theirs = (SavedRows({key: each.rows[key] for key in sorted(both)}, each.codec) for each in (given, taken))
        super().assert_carried(ours, theirs, until)

    def drafted(self) -> dict[str, int]:
        """On the decode side since the last time, in requests that came."""
        assert isinstance(self.receiver, RunningVLLM)
        told = self.receiver.engine.ask("drafted", 30.0)["steps"]
        steps = [step for name, steps in told.items() if not name.startswith("alone") for step in steps]
        return {"drafted": sum(each for each, _ in steps), "accepted": sum(each for _, each in steps)}

    def _states(self, where: Any, name: str, tokens: int) -> dict[str, np.ndarray]:
        assert isinstance(where, RunningVLLM)
        return of_one_rank(where.engine.states(name, tokens, self.engines.folder / "states.npz"))


class HitDrive(StateDrive):
    """Of prompts that both sides have most of, so that nothing may travel."""

    travelled = 0

    def decode(self, tokens: list[int], amount: int) -> Came:
        if len(tokens) == 1:  # nothing of it is offered
            return Came(self.receiver.voice(tokens).tokens, 0.0, 0.0, 0.0, 0)
        came = Drive.decode(self, tokens, amount)
        self.travelled += bool(self.receiver.fetched(came.receiver_name))
        return came

    def alike(self, length: int) -> str:
        """Tokens, as the engines go on alone: of prompts that they have computed, and with some tokens more."""
        known = [prompt(length, seed=800 + each) for each in range(2)]
        self.travelled = 0
        said = [self.compare_with_alone(known)]
        if length > 1:
            longer = [tokens + prompt(each + 1, seed=820 + each) for each, tokens in enumerate(known)]
            own = [self.receiver.voice(tokens) for tokens in longer]
            said.append(self.compare(longer, TIE, own))
        return f"{'; '.join(sorted(set(said)))} ({self.travelled} of {2 * len(said)} travelled)"

    def at_once(self) -> str:
        assert isinstance(self.sender, RunningVLLM) and isinstance(self.receiver, RunningVLLM)
        prefill, decode = self.sender.engine, self.receiver.engine
        prompts = [prompt(260 + 37 * each, seed=700 + each) for each in range(AT_ONCE)]
        own = [self.receiver.voice(tokens) for tokens in prompts]
        before = prefill.state()["preempted"]
        names = [self.engines.name() for _ in prompts]
        for name, tokens in zip(names, prompts, strict=True):
            prefill.submit(name, tokens, 1, dict(PREFILL))
        fetched, left = dict[int, str](), set(range(AT_ONCE))
        end = time.monotonic() + ANSWER_S
        while left and time.monotonic() < end:
            for name, result in prefill.take(0.2).items():
                left.discard(number := names.index(name))
                fetched[number] = self.engines.name()
                decode.submit(fetched[number], prompts[number], DECODED, result.params)
        answers = decode.results(list(fetched.values()), ANSWER_S)
        # A sender that is short of blocks gives up what nobody asks for in 0.3 s. Then the request fails here.
        came = [number for number, name in fetched.items() if len(answers[name].tokens) == DECODED]
        found = [list(answers[fetched[number]].tokens) for number in came]
        preempted = prefill.state()["preempted"] - before
        said = verdict(found, [own[number] for number in came], TIE, True)
        return f"{said} ({len(came)} of {AT_ONCE} came, {preempted} preempted)"


class StateRun(SparseRun):
    engine = "state"
    server_gib = 4.0

    @staticmethod
    def more_options(parser: ArgumentParser) -> None:
        parser.add_argument("--sets", default="times", help="which pairs: times,large,kinds,drafts,hits,split")

    def every(self) -> list[Pair]:
        gpus = 1 if self.chosen.cpu else self.gpus
        self.sets = {
            "times": timed_pairs(gpus),
            "large": timed_pairs(gpus, tuple(LARGE)),
            "kinds": kind_pairs(gpus),
            "drafts": drafted_pairs(),
            "hits": hit_pairs(gpus),
            "split": split_pairs(),
        }
        return [pair for name in self.chosen.sets.split(",") for pair in self.sets[name]]

    def show(self, pair: Pair, found: Found) -> None:
        drive = self.drive(pair)
        if pair in self.sets["hits"]:
            return self.show_hits(drive, found)
        is_timed = pair in self.sets["times"] or pair in self.sets["large"]
        lengths = SHORT if is_timed else (*SHORT, *self.chosen.lengths)
        if "ring" in pair.name:  # vLLM takes the one token that its prefill computes of two for a decode: not offered
            lengths = tuple(length for length in lengths if length > 2)
        for length in lengths:
            drive.warm(length)
        drive.row_tokens, found.kv_rows = lengths, "NO"  # unless it returns
        found.kv_rows = drive.compare_rows()
        found.route = drive.receiver.route(drive.sender)
        drive.drafted()
        self.compare(drive, pair, found, lengths)
        found.drafted = drive.drafted() if pair in self.sets["drafts"] else {}
        if is_timed:
            super().show(pair, found)

    def show_hits(self, drive: HitDrive, found: Found) -> None:
        block = drive.receiver.held()["block_tokens"]
        lengths = 1, 2, block - 1, block, block + 1, 4000
        drive.row_tokens, found.kv_rows = lengths[1:], "NO"  # unless it returns
        found.kv_rows = drive.compare_rows()
        found.route = drive.receiver.route(drive.sender)
        drive.drafted()
        for length in lengths:
            found.tokens[length] = drive.alike(length)
        found.tokens[AT_ONCE] = f"at once: {drive.at_once()}"
        found.drafted = drive.drafted()

    def compare(self, drive: Any, pair: Pair, found: Found, lengths: Sequence[int]) -> None:
        """Tokens of prompts of these lengths. Of those with drafts n-grams guess some."""
        several = range(self.chosen.prompts)
        for length in () if self.chosen.cpu else lengths:
            prompts = [repetitive(length, seed=600 + each) for each in several]
            prompts = prompts if pair in self.sets["drafts"] else self.prompts(length)
            found.tokens[length] = self.compared(drive, prompts)

    def drive(self, pair: Pair) -> Any:
        return (HitDrive if pair in self.sets["hits"] else StateDrive)(pair, self.engines)


if __name__ == "__main__":
    sys.exit(main(StateRun, __doc__ or "", "vllm"))
