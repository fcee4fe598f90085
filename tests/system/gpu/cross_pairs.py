"""Across engines on GPUs: prefill in vLLM and decode in SGLang, and the reverse, beside equal pairs of each engine.

    python -m tests.system.gpu.cross_pairs --out FOLDER [--only vllm16-to-sglang64] [--repeats 11] [--limit-s 340]
    python -m tests.system.gpu.cross_pairs --cpu --out FOLDER        the same, small, on a CPU: to try the script

Needs two GPUs, SGLang, vLLM (of another Python if KVBRIDGE_TEST_VLLM_PYTHON names one) and no network. All engines have
Llama-8B's shape in bf16 and the same weights, made on the GPUs from one seed and compared by digests of every tensor.
The prefill engines are on GPU 0, the decode engines on GPU 1, each beside an agent. Requests are made as by `kvbridge
proxy`: if vLLM prefills, the decode engine is asked once prefill has answered; if SGLang does, both are asked at once.

The most important pairs come first. Each is measured in turn, request by request, with an equal pair of either engine
(vLLM 16 to vLLM 16, SGLang 16 to SGLang 16, by kvbridge), so that ratios are of the same seconds. For each pair and
prompt length, medians without the first request:

  transfer   from the later of the offer of the whole prompt and the want of it, until the decode engine's adapter hears
             that the prompt is there. Both engines note this in the same way (tests.system.engines.marks). vLLM's offer
             waits for the GPU; that wait is over by then, since prefill has answered
  ttft       from the first of the two requests to the decode engine's first token. It includes the prompt's prefill and
             the cost of asking: vLLM is always asked over a socket pair, SGLang over HTTP
  handover   from the begin of the transfer to the first token. It excludes prefill, so that a slower engine's prefill
             does not count against the bridge
  reported   SGLang's own metric of the transfer, if SGLang prefills (see tests.system.gpu.sglang_pairs)
  asked      from want to done, at the decode side's agent. If SGLang prefills, this includes its prefill
  tokens     compared with the decode engine alone, up to where the two engines, each alone, diverge. "tie": the tokens
             diverge where the engine itself finds the two tokens' log probabilities no further apart than TIE nats, or
             than twice the largest difference of the two engines alone at the same positions (their kernels differ)
  rows       KV bytes on the decode side compared with the reference conversion of those on the prefill side, all layers

A pair across engines is judged by the worse of its ratios to the two equal pairs. The prefill engine's equal pair is
asked in the same way and computes the same prefill. The decode engine's equal pair takes the prompt in the same way. If
one engine prefills faster, this changes the ratio of ttft whatever the bridge does. Hence handover.

Exits with 1 if weights, tokens or rows differ, with 2 if a pair could not be run to its end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.system.engines import weights
from tests.system.gpu.pair_drive import TIE, Came, Drive, Pair, apart, side_by_side
from tests.system.gpu.pair_engines import ALONE, VLLM, RunningSGLang, RunningVLLM, SGLang, Side, handles_of
from tests.system.gpu.pair_run import Found, Run, main, sides_of
from tests.system.gpu.sglang_pairs import TIMES_S

FEW = ("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight")


def equal_pairs(is_cpu: bool) -> dict[str, Pair]:
    """By engine. vLLM on a CPU has no blocks of 16 tokens that its kernels like."""
    block = 32 if is_cpu else 16
    given, taken = (VLLM(f"vllm-{side}", (gpu,), block, is_noted=True) for gpu, side in enumerate("pd"))
    return {
        "vllm": Pair("vllm-equal", given, taken),
        "sglang": Pair("sglang-equal", SGLang("sglang-p16", (0,)), SGLang("sglang-d16", (1,), role="decode")),
    }


def pairs_of(is_cpu: bool) -> list[Pair]:
    """In the order of their worth. vLLM on a CPU has fp8 only with AVX-512 or AMX."""
    of_vllm, of_sglang = equal_pairs(is_cpu).values()
    page, block = 64, of_vllm.receiver.block
    large = SGLang("sglang-d64", (1,), page, role="decode")
    narrow = SGLang("sglang-d-fp8", (1,), kv="fp8_e4m3", role="decode")
    of_fp8 = VLLM("vllm-d-fp8", (1,), block, kv="fp8", backend="TRITON_ATTN", is_noted=True)
    return [
        Pair(f"vllm{block}-to-sglang{page}", of_vllm.sender, large),
        Pair(f"sglang{page}-to-vllm{block}", SGLang("sglang-p64", (0,), page), of_vllm.receiver),
        Pair("vllm-to-sglang-fp8", of_vllm.sender, narrow, is_same_codec=False),
        Pair("sglang-to-vllm-fp8", of_sglang.sender, of_fp8, is_same_codec=False),
        Pair(f"vllm{block}-to-sglang16", of_vllm.sender, of_sglang.receiver),
        Pair(f"sglang16-to-vllm{block}", of_sglang.sender, of_vllm.receiver),
    ]


class CrossDrive(Drive):
    def decode(self, tokens: list[int], amount: int) -> Came:
        """AssertionError where the prompt did not travel: vLLM could have computed it."""
        known = len(self.receiver.noted("carried"))
        came = super().decode(tokens, amount)
        self.carried = self._awaited(self.receiver, "carried", known)
        return came

    def timed(self, tokens: list[int]) -> dict[str, float]:
        """How one prompt came: bytes, and milliseconds."""
        reports = len(self.sender.noted("reported"))
        came = self.decode(tokens, 1 if isinstance(self.receiver, RunningVLLM) else 2)
        carried, said = self.carried, ((self.receiver, "wanted"), (self.sender, "offered"))
        began = max(side.noted(what, carried["room"])[-1]["at_s"] for side, what in said)
        found = {
            "transfer_ms": (carried["at_s"] - began) * 1e3,
            "ttft_ms": came.ttft_s * 1e3,
            "handover_ms": (came.first_at - began) * 1e3,
            "asked_ms": carried["agent_s"] * 1e3,
            "bytes": carried["bytes"],
        }
        if isinstance(self.sender, RunningSGLang):
            found["reported_ms"] = self._awaited(self.sender, "reported", reports)["latency_ms"]
        return found

    @staticmethod
    def _awaited(where: Any, what: str, known: int) -> dict[str, Any]:
        """The one note of this kind that has come since there were `known`."""
        end = time.monotonic() + TIMES_S
        while len(found := where.noted(what)[known:]) != 1:
            assert time.monotonic() < end, f"{where.side.name}: {len(found)} times {what}, for one request"
            time.sleep(0.02)
        return dict(found[0])


def ratios(rows: list[dict[str, Any]], against: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """By prompt length, of medians: to each engine's equal pair, and the worse one."""
    found = []
    for place, row in enumerate(rows):
        each: dict[str, Any] = {"tokens": row["tokens"]}
        for key in ("transfer_ms", "ttft_ms", "handover_ms"):
            of = {kind: round(row[key] / equal[place][key], 3) for kind, equal in against.items()}
            each[key] = of | {"worse": max(of.values())}
        found.append(each)
    return found


def _same_weights(up: dict[str, dict[str, int]]) -> str:
    """Of all engines that are up: both fuse tensors in the same way, and name them alike."""
    names = set().union(*up.values())
    differ = sorted(name for name in names if len({each.get(name) for each in up.values()}) > 1)
    if differ or not names:
        return f"NO: {len(differ)} of {len(names)} differ {', '.join(differ[:3])}".rstrip()
    return f"yes, {len(names)} tensors in {len(up)} engines"


def _of(key: str, found: Found, place: int) -> str:
    """To vLLM's equal pair, and to SGLang's."""
    if place >= len(found.ratios):
        return "-"
    ratio = found.ratios[place][key]
    return f"{ratio['vllm']:.2f} {ratio['sglang']:.2f}"


class CrossRun(Run):
    engine = "cross"
    repeats, limit_s = 11, 340.0
    columns = (
        ("pair", 21, lambda found, row, place: found.name),
        ("tokens", 7, lambda found, row, place: row["tokens"]),
        ("MB", 6, lambda found, row, place: round(row["megabytes"])),
        ("transfer", 9, lambda found, row, place: row["transfer_ms"]),
        ("of v, s", 11, lambda found, row, place: _of("transfer_ms", found, place)),
        ("ttft", 8, lambda found, row, place: row["ttft_ms"]),
        ("of v, s", 11, lambda found, row, place: _of("ttft_ms", found, place)),
        ("handover", 9, lambda found, row, place: row["handover_ms"]),
        ("of v, s", 11, lambda found, row, place: _of("handover_ms", found, place)),
        ("reported", 9, lambda found, row, place: row.get("reported_ms", "-")),
    )

    def every(self) -> list[Pair]:
        self.digests: dict[str, dict[str, int]] = {}  # of the weights of every engine that was up
        return pairs_of(self.chosen.cpu)

    def kept(self) -> list[Side]:
        self.equal = equal_pairs(self.chosen.cpu)
        return sides_of(self.equal.values())

    def alone(self) -> list[Side]:
        return [SGLang(ALONE, (0,), role=ALONE)]

    def started(self) -> None:
        """All engines must have the same weights."""
        self.digests |= {name: each.digests() for name, each in self.up.items() if name not in self.digests}
        self.weights = _same_weights(self.digests)
        print(f"{self.spent_s:6.1f} s  weights are the same: {self.weights}", flush=True)
        self.about["weights"] = {
            "same": self.weights,
            "digests": {name: weights.digest(each) for name, each in self.digests.items()},
            "few": {name: {key: each.get(key) for key in FEW} for name, each in self.digests.items()},
        }

    def begin(self) -> None:
        """What each kind of engine alone says to all prompts."""
        alone = {"vllm": self.equal["vllm"].sender, "sglang": self.alone()[0]}
        self.voices = {
            (kind, length): [self.engines.get(side).voice(tokens) for tokens in self.prompts(length)]
            for kind, side in alone.items()
            for length in self.chosen.lengths
        }

    def show(self, pair: Pair, found: Found) -> None:
        """First what must be so, then how long it takes: an equal pair that fails costs the times only."""
        drive = CrossDrive(pair, self.engines)
        found.kv_rows = "NO"  # unless it returns
        found.kv_rows = drive.compare_rows()
        found.route, found.handles = drive.receiver.route(drive.sender), handles_of(drive.sender, drive.receiver)
        for length in self.chosen.lengths:
            own, other = (self.voices[kind, length] for kind in self._kinds(pair.receiver))
            differ = apart(own, other)
            said = drive.compare(self.prompts(length), max(TIE, 2 * differ), own, other)
            found.tokens[length] = f"{said}; alone apart {differ:.2f}"
        beside = {kind: CrossDrive(equal, self.engines) for kind, equal in self.equal.items()}
        against: dict[str, list[dict[str, Any]]] = {kind: [] for kind in beside}
        found.against = against
        for length in self.chosen.lengths:
            row, *equal = side_by_side([drive, *beside.values()], length, self.chosen.repeats)
            found.rows.append(row)
            for kind, each in zip(beside, equal, strict=True):
                against[kind].append(each)
        found.ratios = ratios(found.rows, against)

    @staticmethod
    def _kinds(receiver: Side) -> tuple[str, str]:
        """The receiver's first."""
        return ("vllm", "sglang") if isinstance(receiver, VLLM) else ("sglang", "vllm")

    def print_row(self, found: Found, place: int) -> None:
        super().print_row(found, place)
        assert isinstance(found.against, dict)
        for kind, equal in found.against.items():
            super().print_row(Found(f"{kind} equal, beside", rows=equal), place)

    def print_more(self, found: Found) -> None:
        print(f"{found.name:>21s} rows {found.kv_rows}; tokens {found.said}; {found.route}")

    def verdicts(self) -> list[object]:
        return [self.weights, *super().verdicts()]


if __name__ == "__main__":
    sys.exit(main(CrossRun, __doc__ or "", "vllm", "sglang"))
