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

import sys
import time
from typing import Any

from tests.system.gpu.pair_drive import TIE, Drive, Pair, apart, side_by_side
from tests.system.gpu.pair_engines import ALONE, SGLang, Side, handles_of
from tests.system.gpu.pair_run import Found, Run, main, sides_of

TIMES_S = 5.0  # until a prefill server has written how long a transfer took


def pairs_of(gpus: int) -> list[Pair]:
    """With two GPUs a server of two ranks shares one of them with the server on the other side."""
    two = (2, 3) if gpus > 3 else (0, 1)
    prefill, decode = SGLang("prefill16", (0,)), SGLang("decode16", (1,), role="decode")
    nixl = [SGLang(f"nixl-{role}", (gpu,), is_nixl=True, role=role) for gpu, role in enumerate(("prefill", "decode"))]
    large = SGLang("decode64", (1,), 64, role="decode")
    return [
        Pair("equal", prefill, decode),
        Pair("nixl", nixl[0], nixl[1]),
        Pair("16to64", prefill, large),
        Pair("bf16-to-fp8", prefill, SGLang("decode-fp8", (1,), kv="fp8_e4m3", role="decode"), is_same_codec=False),
        Pair("tp2-to-tp1", SGLang("prefill-two", two), decode),
        Pair("tp1-to-tp2", prefill, SGLang("decode-two", two, role="decode")),
        Pair("1to64", SGLang("prefill1", (0,), 1), large),  # 1 is SGLang's own choice
    ]


class SGLangDrive(Drive):
    def timed(self, tokens: list[int]) -> dict[str, float]:
        """How one prompt came, in milliseconds and bytes."""
        known = len(self.sender.noted("reported"))
        came = self.decode(tokens, 2)
        end = time.monotonic() + TIMES_S
        while True:
            reported = self.sender.noted("reported")[known:]
            sent, taken = self.sender.noted("prefill", came.room), self.receiver.noted("decode", came.room)
            counts = [len(each) for each in (reported, sent, taken)]
            if counts == [len(each.side.gpus) for each in (self.sender, self.sender, self.receiver)]:
                break
            assert time.monotonic() < end, f"of {came.room}: {counts} reports, sendings, takings"
            time.sleep(0.02)
        found = {
            "transfer_ms": max(each["latency_ms"] for each in reported),
            "carried_ms": (max(each["at_s"] for each in taken) - max(each["at_s"] for each in sent)) * 1e3,
            "bytes": sum(each["total_mb"] for each in reported) * 2**20,
            "ttft_ms": came.decode_s * 1e3,
        }
        if self.receiver.agents:
            found["bytes"] = sum(size for size, _ in self.receiver.fetched(str(came.room)))
            assert found["bytes"], "no agent of the decode side has fetched it"
        return found


def ratios(upper: list[dict[str, Any]], lower: list[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """By prompt length, of medians and of minima."""
    found = []
    for above, below in zip(upper, lower, strict=False):
        keys = ("transfer_ms", "transfer_min_ms", "carried_ms", "carried_min_ms", "ttft_ms")
        each = {key: round(above[key] / below[key], 3) for key in keys}
        found.append({"of": of, "tokens": above["tokens"], **each})
    return found


class SGLangRun(Run):
    engine = "sglang"
    repeats, limit_s = 11, 340.0
    columns = (
        ("pair", 12, lambda found, row, place: found.name),
        ("tokens", 7, lambda found, row, place: row["tokens"]),
        ("MB", 7, lambda found, row, place: round(row["megabytes"])),
        ("transfer first", 15, lambda found, row, place: row["transfer_first_ms"]),
        ("later ms", 9, lambda found, row, place: row["transfer_ms"]),
        ("least", 7, lambda found, row, place: row["transfer_min_ms"]),
        ("GB/s", 6, lambda found, row, place: row["gb_per_s"]),
        ("carried", 8, lambda found, row, place: row["carried_ms"]),
        ("ttft", 8, lambda found, row, place: row["ttft_ms"]),
        ("rows", 13, lambda found, row, place: found.kv_rows),
        ("  tokens as alone", 34, lambda found, row, place: row.get("decoded", "-")),
    )

    def every(self) -> list[Pair]:
        return pairs_of(self.gpus)

    @property
    def equal(self) -> Pair:
        return self.every()[0]

    def kept(self) -> list[Side]:
        return sides_of([self.equal])

    def alone(self) -> list[Side]:
        are_split = any(len(side.gpus) > 1 for side in sides_of(self.pairs))
        return [SGLang(f"alone-{ranks}", tuple(range(ranks)), role=ALONE) for ranks in ((1, 2) if are_split else (1,))]

    def begin(self) -> None:
        """What each server alone says to all prompts, by their length."""
        self.voices = {
            (len(side.gpus), length): [self.engines.get(side).voice(tokens) for tokens in self.prompts(length)]
            for side in self.alone()
            for length in self.chosen.lengths
        }

    def show(self, pair: Pair, found: Found) -> None:
        drive = SGLangDrive(pair, self.engines)
        beside = [] if pair == self.equal else [SGLangDrive(self.equal, self.engines)]
        found.weights = drive.sender.dummy or drive.receiver.dummy or found.weights
        found.against = against = list[dict[str, Any]]()
        for length in self.chosen.lengths:
            row, *others = side_by_side([drive, *beside], length, self.chosen.repeats)
            found.rows.append(row)
            against += others
        if pair.sender.is_nixl:
            found.ratios = ratios(against, found.rows, "kvbridge/nixl")
        else:
            found.ratios = ratios(found.rows, against, "this/equal")
            found.route, found.handles = drive.receiver.route(drive.sender), handles_of(drive.sender, drive.receiver)
            found.kv_rows = "NO"  # unless it returns
            found.kv_rows = drive.compare_rows()
        for row in found.rows:
            length, tie = row["tokens"], TIE
            voices = self.voices[1, length]
            if len(pair.sender.gpus) != len(pair.receiver.gpus):
                tie = 2 * apart(voices, self.voices[2, length])
            row["decoded"] = drive.compare(self.prompts(length), tie, voices)

    def print_more(self, found: Found) -> None:
        for ratio in found.ratios:
            print(f"{found.name:>12s} {ratio['of']} at {ratio['tokens']}: {ratio['transfer_ms']} of medians,", end=" ")
            print(f"{ratio['transfer_min_ms']} of minima; carried {ratio['carried_ms']}, ttft {ratio['ttft_ms']}")


if __name__ == "__main__":
    sys.exit(main(SGLangRun, __doc__ or "", "sglang"))
