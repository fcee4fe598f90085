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

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.system.cross.fleet import joined
from tests.system.engines import weights
from tests.system.engines.fleet import PREFILL, prompt
from tests.system.gpu import pair_engines as vllm
from tests.system.gpu import sglang_servers as sglang
from tests.system.gpu.pair_run import chosen_from, exit_code, keep_logs, machine, options
from tests.system.gpu.sglang_pairs import (
    ANSWER_S,
    DECODED,
    ROW_TOKENS,
    TIE,
    Voice,
    alike,
    apart,
    greedy,
    handles_of,
    parting,
    side_by_side,
    voice,
)
from tests.system.sglang import rows

KINDS = ("vllm", "sglang")
FEW = ("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight")
SETTLE_S = 3.0  # for a prefill to say why its decode engine has failed

Side = vllm.Side | sglang.Side
Running = vllm.Running | sglang.Running


@dataclass(frozen=True)
class Pair:
    name: str
    sender: Side
    receiver: Side
    is_same_codec: bool = True


@dataclass
class Found:
    """What one pair showed; `rows` one for each prompt length, `against` those of the equal pairs in those seconds."""

    name: str
    failure: str = ""
    kv_rows: str = "-"
    tokens: dict[int, str] = field(default_factory=dict)
    route: str = ""
    handles: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    against: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ratios: list[dict[str, Any]] = field(default_factory=list)


def equal_pairs(is_cpu: bool) -> dict[str, Pair]:
    """By engine. vLLM on a CPU has no blocks of 16 tokens that its kernels like."""
    block = 32 if is_cpu else 16
    return {
        "vllm": Pair("vllm-equal", vllm.Side("vllm-p", (0,), block), vllm.Side("vllm-d", (1,), block)),
        "sglang": Pair(
            "sglang-equal",
            sglang.Side("sglang-p16", "prefill", (0,)),
            sglang.Side("sglang-d16", "decode", (1,)),
        ),
    }


def pairs_of(is_cpu: bool) -> list[Pair]:
    """In the order of their worth. vLLM on a CPU has fp8 only with AVX-512 or AMX."""
    equal = equal_pairs(is_cpu)
    of_vllm, of_sglang = equal["vllm"], equal["sglang"]
    assert isinstance(of_vllm.receiver, vllm.Side)
    page, block = 64, of_vllm.receiver.block
    large = sglang.Side("sglang-d64", "decode", (1,), page=page)
    narrow = sglang.Side("sglang-d-fp8", "decode", (1,), kv="fp8_e4m3")
    backend = of_vllm.receiver.backend if is_cpu else "TRITON_ATTN"
    of_fp8 = vllm.Side("vllm-d-fp8", (1,), block, kv="fp8", backend=backend)
    return [
        Pair(f"vllm{block}-to-sglang{page}", of_vllm.sender, large),
        Pair(f"sglang{page}-to-vllm{block}", sglang.Side("sglang-p64", "prefill", (0,), page=page), of_vllm.receiver),
        Pair("vllm-to-sglang-fp8", of_vllm.sender, narrow, is_same_codec=False),
        Pair("sglang-to-vllm-fp8", of_sglang.sender, of_fp8, is_same_codec=False),
        Pair(f"vllm{block}-to-sglang16", of_vllm.sender, of_sglang.receiver),
        Pair(f"sglang16-to-vllm{block}", of_sglang.sender, of_vllm.receiver),
    ]


class Both:
    """All engines of both kinds that are up."""

    def __init__(self, folder: Path, stack: ExitStack, is_cpu: bool, agent_options: dict[str, str]) -> None:
        for kind in KINDS:
            (folder / kind).mkdir()
        python = os.environ.get("KVBRIDGE_TEST_VLLM_PYTHON") or sys.executable
        self.engines = vllm.Engines(folder / "vllm", stack, is_cpu, agent_options, python)
        self.servers = sglang.Servers(folder / "sglang", stack, is_cpu, agent_options)
        self.rooms = self.servers.rooms
        self._names = itertools.count(1)

    def start(self, *sides: Side) -> None:
        self.engines.start(*(side for side in sides if isinstance(side, vllm.Side)))
        self.servers.start(*(side for side in sides if isinstance(side, sglang.Side)))

    def get(self, side: Side) -> Running:
        """Wait for it. Raises what kept it from starting."""
        return self.engines.get(side) if isinstance(side, vllm.Side) else self.servers.get(side)

    def drop(self, side: Side) -> None:
        self.engines.drop(side) if isinstance(side, vllm.Side) else self.servers.drop(side)

    def name(self) -> str:
        """A request id that was not used before."""
        return f"cross-{next(self._names)}"


@dataclass(frozen=True)
class Came:
    """A prompt that was prefilled on one side and decoded on the other. `first_at` is by the clock of the marks."""

    tokens: list[int]
    ttft_s: float
    first_at: float
    room: int
    sender_name: str = ""  # of the request, where the engine is vLLM
    receiver_name: str = ""
    carried: dict[str, Any] = field(default_factory=dict)  # the decode side's note


class Drive:
    """One pair, request by request."""

    def __init__(self, pair: Pair, both: Both) -> None:
        self.pair = pair
        self.sender, self.receiver = both.get(pair.sender), both.get(pair.receiver)
        self._both = both
        host, _, port = self.sender.agents[0].address.removeprefix("tcp://").partition(":")
        self._at = {"remote_host": host, "remote_port": int(port)}

    def decode(self, tokens: list[int], amount: int) -> Came:
        """AssertionError where the prompt did not travel: vLLM could have computed it."""
        room, known = next(self._both.rooms), len(self.receiver.noted("carried"))
        if isinstance(self.sender, vllm.Running):
            came = self._one_after_the_other(self.sender, tokens, amount, room)
        else:
            came = self._at_once(self.sender, tokens, amount, room)
        return replace(came, carried=_awaited(self.receiver, "carried", known))

    def _one_after_the_other(self, sender: vllm.Running, tokens: list[int], amount: int, room: int) -> Came:
        began, name = time.monotonic(), self._both.name()
        sender.engine.submit(name, tokens, 1, PREFILL | {"bootstrap_room": room})
        prefilled = sender.engine.result(name, ANSWER_S)
        params = prefilled.params
        assert params, f"prefill ended with {prefilled.reason} and gave no kv_transfer_params"
        if isinstance(self.receiver, vllm.Running):
            return self._decoded_by_vllm(self.receiver, tokens, amount, params, began, room, name)
        told = {
            "sender": f"tcp://{params['remote_host']}:{params['remote_port']}",
            "first_token": prefilled.tokens[0],
            "rendezvous": params["remote_request_id"],
        }
        body = _told(greedy(tokens, amount), told) | {"bootstrap_host": "kvbridge", "bootstrap_room": room}
        return self._decoded_by_sglang(self.receiver, body, amount, began, room, name)

    def _at_once(self, sender: sglang.Running, tokens: list[int], amount: int, room: int) -> Came:
        began = time.monotonic()
        body = greedy(tokens, amount) | {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}
        if isinstance(self.receiver, sglang.Running):
            body["bootstrap_port"] = sender.server.bootstrap_port
            with _asked(sender, body):
                return self._decoded_by_sglang(self.receiver, body, amount, began, room)
        params = {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room, **self._at}
        with _asked(sender, _told(body, {"fetched_by": "vllm"})):
            return self._decoded_by_vllm(self.receiver, tokens, amount, params, began, room)

    def _decoded_by_vllm(
        self,
        receiver: vllm.Running,
        tokens: list[int],
        amount: int,
        params: dict[str, Any],
        began: float,
        room: int,
        sender_name: str = "",
    ) -> Came:
        """vLLM tells of a request when it has ended: its first token is the only one where it is timed."""
        name = self._both.name()
        receiver.engine.submit(name, tokens, amount, params)
        result = receiver.engine.result(name, ANSWER_S)
        now = time.monotonic()
        assert len(result.tokens) == amount, f"decode ended with {result.reason} after {len(result.tokens)} tokens"
        return Came(list(result.tokens), now - began, now, room, sender_name, name)

    def _decoded_by_sglang(
        self,
        receiver: sglang.Running,
        body: dict[str, Any],
        amount: int,
        began: float,
        room: int,
        sender_name: str = "",
    ) -> Came:
        asked = time.monotonic()
        answer = sglang.ask(receiver.server, body, ANSWER_S)
        assert len(answer.tokens) == amount, f"{len(answer.tokens)} tokens, {amount} were asked for"
        first_at = asked + answer.first_s
        return Came(answer.tokens, first_at - began, first_at, room, sender_name)

    def timed(self, tokens: list[int]) -> dict[str, float]:
        """How one prompt came: bytes, and milliseconds."""
        reports = len(self.sender.noted("reported"))
        came = self.decode(tokens, 1 if isinstance(self.receiver, vllm.Running) else 2)
        carried, said = came.carried, ((self.receiver, "wanted"), (self.sender, "offered"))
        began = max(side.noted(what, carried["room"])[-1]["at_s"] for side, what in said)
        found = {
            "transfer_ms": (carried["at_s"] - began) * 1e3,
            "ttft_ms": came.ttft_s * 1e3,
            "handover_ms": (came.first_at - began) * 1e3,
            "asked_ms": carried["agent_s"] * 1e3,
            "bytes": carried["bytes"],
        }
        if isinstance(self.sender, sglang.Running):
            found["reported_ms"] = _awaited(self.sender, "reported", reports)["latency_ms"]
        return found

    def compare(self, voices: dict[str, list[Voice]], prompts: list[list[int]], tie: float) -> str:
        """Whether decoding goes on as the decode engine alone does, as long as both engines alone agree."""
        kind = _kind(self.pair.receiver)
        verdicts, equal, continuations = [], 0, set()
        for number, tokens in enumerate(prompts):
            ours = self.decode(tokens, DECODED).tokens
            own, other = voices[kind][number], voices[_other(kind)][number]
            same, agreed = alike(ours, own.tokens), alike(own.tokens, other.tokens)
            equal += same
            continuations.add(tuple(ours))
            if same < agreed:
                verdicts.append(parting(ours, own, same, tie))
            elif agreed < DECODED:
                verdicts.append(f"yes, alone they part: {parting(other.tokens, own, agreed, tie)}")
        if len(continuations) != len(prompts):
            return "NO: other prompts go on alike"
        if not self.pair.is_same_codec:
            return f"{equal}/{len(prompts) * DECODED} alike"
        return "; ".join(sorted(set(verdicts))) or "yes"

    def compare_rows(self) -> str:
        """KV of prompts on both sides, every layer. AssertionError where they differ."""
        self._both.servers.keep_rows(True)
        try:
            for length in ROW_TOKENS:
                came = self.decode(prompt(length, seed=300 + length), 2)
                given = self._rows(self.sender, "prefill", came, length)
                # vLLM computes the row of the last token itself.
                until = length - 1 if isinstance(self.receiver, vllm.Running) else length
                taken = self._rows(self.receiver, "decode", came, until)
                assert self.pair.is_same_codec == (given.codec == taken.codec), f"{given.codec} to {taken.codec}"
                rows.assert_carried(given.first(until), taken)
        finally:
            self._both.servers.keep_rows(False)
            for file in self._both.servers.kept.glob("*.npz"):
                file.unlink()
        return "yes" if self.pair.is_same_codec else "as converted"

    def _rows(self, where: Running, side: str, came: Came, until: int) -> rows.SavedRows:
        """Of the first tokens. vLLM's are read from its blocks, which nobody has had since."""
        if isinstance(where, sglang.Running):
            return rows.load(self._both.servers.kept, side, came.room, 1)
        name = came.sender_name if side == "prefill" else came.receiver_name
        found = where.engine.dump(name, 0, until, self._both.engines.folder / f"{side}.npz")
        assert all(set(codec["scales"]) <= {1.0} for codec in found.codecs.values()), "scales that are not 1"
        return joined(found)


def _told(body: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What SGLang is told of the other engine."""
    return body | {"sampling_params": body["sampling_params"] | {"custom_params": {"kvbridge": said}}}


@contextlib.contextmanager
def _asked(sender: sglang.Running, body: dict[str, Any]) -> Iterator[None]:
    """SGLang prefills meanwhile. Where the decode engine fails, what the prefill server says goes with it."""
    connection = sender.server.begin(body)
    with contextlib.closing(connection):
        try:
            yield
        except Exception as error:
            said = "nothing"
            with contextlib.suppress(Exception):
                assert connection.sock is not None
                connection.sock.settimeout(SETTLE_S)
                said = connection.getresponse().read()[:500].decode(errors="replace")
            raise AssertionError(f"{type(error).__name__}: {error}\nThe prefill server said: {said}") from error
        answer = connection.getresponse()
        body_said = answer.read()
        assert answer.status == 200, f"prefill: {answer.status} {body_said[:500]!r}"


def _awaited(where: Running, what: str, known: int) -> dict[str, Any]:
    """The one note of this kind that has come since there were `known`."""
    end = time.monotonic() + sglang.TIMES_S
    while len(found := where.noted(what)[known:]) != 1:
        assert time.monotonic() < end, f"{where.side.name}: {len(found)} times {what}, for one request"
        time.sleep(0.02)
    return found[0]


def _kind(side: Side) -> str:
    return "vllm" if isinstance(side, vllm.Side) else "sglang"


def _other(kind: str) -> str:
    return KINDS[1 - KINDS.index(kind)]


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


class Run:
    """All pairs, in order; what each showed is written at once."""

    def __init__(self, chosen: argparse.Namespace, both: Both, about: dict[str, Any]) -> None:
        self.chosen = chosen
        self.results: list[Found] = []
        self.weights = "-"
        self._both = both
        self._about = about
        self._began = time.monotonic()
        self._equal = equal_pairs(chosen.cpu)
        self._alone = sglang.Side(sglang.ALONE, sglang.ALONE, (0,))
        self._voices: dict[str, Voice] = {}
        every = pairs_of(chosen.cpu)
        self.pairs = [pair for pair in every if not chosen.only or pair.name in chosen.only.split(",")]
        unknown = set(filter(None, chosen.only.split(","))) - {pair.name for pair in every}
        assert not unknown, f"no such pairs: {unknown}; there are {[pair.name for pair in every]}"

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def start_all(self) -> None:
        """All at once, and wait: one that starts would disturb what is measured."""
        every = [*self.pairs, *self._equal.values()]
        sides = {side.name: side for pair in every for side in (pair.sender, pair.receiver)}
        sides[self._alone.name] = self._alone
        self._both.start(*sides.values())
        up: dict[str, dict[str, int]] = {}
        for side in sides.values():
            try:
                running = self._both.get(side)
                up[side.name] = _digests(running)
                said = f"is up, {_seeding(running)}; digest of {len(up[side.name])} weights"
                said += f" {weights.digest(up[side.name])}"
            except Exception as error:  # its pairs will say so
                said = f"did not start: {type(error).__name__}: {str(error)[-3000:]}"
            print(f"{self.spent_s:6.1f} s  {side.name} {said}", flush=True)
        self.weights = _same_weights(up)
        print(f"{self.spent_s:6.1f} s  weights are the same: {self.weights}", flush=True)
        self._about["weights"] = {
            "same": self.weights,
            "digests": {name: weights.digest(each) for name, each in up.items()},
            "few": {name: {key: each.get(key) for key in FEW} for name, each in up.items()},
        }

    def all(self) -> None:
        for pair in self.pairs:
            if self.spent_s > self.chosen.limit_s:
                reason = f"not begun: {self.spent_s:.0f} s of {self.chosen.limit_s:.0f} were spent"
                self.results.append(Found(pair.name, failure=reason))
                continue
            self.results.append(self._drive(pair))
            said = self.results[-1].failure.strip()[-600:] or "done"
            print(f"{self.spent_s:6.1f} s  {pair.name}: {said}", flush=True)
            self.write()

    def write(self) -> None:
        kept = {**self._about, "seconds": round(self.spent_s, 1), "pairs": [vars(each) for each in self.results]}
        (self.chosen.out / "cross_pairs.json").write_text(json.dumps(kept, indent=1) + "\n")

    def _drive(self, pair: Pair) -> Found:
        """First what must be so, then how long it takes: an equal pair that fails costs the times only."""
        found = Found(pair.name)
        try:
            drive = Drive(pair, self._both)
            found.kv_rows = "NO"  # unless it returns
            found.kv_rows = drive.compare_rows()
            found.route = drive.receiver.route(drive.sender)
            found.handles = handles_of([*drive.sender.agents, *drive.receiver.agents])
            for length in self.chosen.lengths:
                found.tokens[length] = self._compare(drive, length)
            beside = {kind: Drive(equal, self._both) for kind, equal in self._equal.items()}
            found.against = {kind: [] for kind in beside}
            for length in self.chosen.lengths:
                row, *against = side_by_side([drive, *beside.values()], length, self.chosen.repeats)
                found.rows.append(row)
                for kind, each in zip(beside, against, strict=True):
                    found.against[kind].append(each)
            found.ratios = ratios(found.rows, found.against)
        except AssertionError as error:
            found.failure = str(error) or traceback.format_exc(limit=-2)
        except Exception as error:  # the other pairs are worth their time
            found.failure = f"{type(error).__name__}: {error}"
        if found.failure:
            self._say_all(pair)
            self._drop_the_sick(pair)
        return found

    def _compare(self, drive: Drive, length: int) -> str:
        prompts = [prompt(length, seed=200 + number) for number in range(self.chosen.prompts)]
        voices = {kind: [self._voice(kind, tokens) for tokens in prompts] for kind in KINDS}
        differ = apart(*voices.values())
        said = drive.compare(voices, prompts, max(TIE, 2 * differ))
        return f"{said}; alone apart {differ:.2f}"

    def _voice(self, kind: str, tokens: list[int]) -> Voice:
        """What this engine says alone; asked once."""
        key = f"{kind} {tokens}"
        if key not in self._voices:
            self._voices[key] = self._ask_alone(kind, tokens)
        return self._voices[key]

    def _ask_alone(self, kind: str, tokens: list[int]) -> Voice:
        if kind == "sglang":
            return voice(self._both.servers.get(self._alone), tokens)
        side = self._equal["vllm"].sender
        assert isinstance(side, vllm.Side)
        running = self._both.engines.get(side)
        return Voice(*running.likely(self._both.name(), tokens, DECODED))

    def _say_all(self, pair: Pair) -> None:
        """What the pair's engines and agents said last, and what those know now: to see why it failed."""
        for side in (pair.sender, pair.receiver):
            with contextlib.suppress(Exception):  # it never started, or is gone
                running = self._both.get(side)
                print(f"--- {side.name}:\n{_tail(running)}")
                for each in running.agents:
                    print("--- its agent:\n" + "\n".join(each.text().splitlines()[-16:]))
                    print(each.status, flush=True)
                print(_held(running), flush=True)

    def _drop_the_sick(self, pair: Pair) -> None:
        for side in (pair.sender, pair.receiver):
            try:
                is_well = self._both.get(side).is_well()
            except Exception:  # it never started, and said why before: another try would cost the other pairs' time
                continue
            if not is_well:
                self._both.drop(side)


def _digests(running: Running) -> dict[str, int]:
    if isinstance(running, vllm.Running):
        return running.digests()
    return {name: value for each in running.noted("weights") for name, value in each["digests"].items()}


def _seeding(running: Running) -> str:
    if isinstance(running, vllm.Running):
        return f"with its dummy weights: {running.weights_failure}" if running.weights_failure else "seeded"
    return "seeded" if running.is_seeded else "with SGLang's dummy weights"


def _same_weights(up: dict[str, dict[str, int]]) -> str:
    """Of all engines that are up: both fuse tensors in the same way, and name them alike."""
    names = set().union(*up.values())
    differ = sorted(name for name in names if len({each.get(name) for each in up.values()}) > 1)
    if differ or not names:
        return f"NO: {len(differ)} of {len(names)} differ {', '.join(differ[:3])}".rstrip()
    return f"yes, {len(names)} tensors in {len(up)} engines"


def _held(running: Running) -> Any:
    return running.engine.state() if isinstance(running, vllm.Running) else running.server.held()


def _tail(running: Running) -> str:
    return running.engine.tail(16) if isinstance(running, vllm.Running) else running.server.tail(16)


def _of(key: str, found: Found, place: int) -> str:
    """To vLLM's equal pair, and to SGLang's."""
    if place >= len(found.ratios):
        return "-"
    ratio = found.ratios[place][key]
    return f"{ratio['vllm']:.2f} {ratio['sglang']:.2f}"


COLUMNS = (
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


def report(results: list[Found]) -> None:
    print("".join(f"{head:>{width}s}" for head, width, _ in COLUMNS))
    for found in results:
        for place, row in enumerate(found.rows):
            print("".join(f"{value(found, row, place)!s:>{width}s}" for _, width, value in COLUMNS))
            for kind, equal in found.against.items():
                beside = Found(f"{kind} equal, beside", rows=equal)
                print("".join(f"{value(beside, equal[place], place)!s:>{width}s}" for _, width, value in COLUMNS))
    for found in results:
        said = "; ".join(f"{length}: {verdict}" for length, verdict in found.tokens.items())
        print(f"{found.name:>21s} rows {found.kv_rows}; tokens {said or '-'}; {found.route}")
        if found.failure:
            print(f"{found.name:>21s} FAILED: {found.failure.strip()[-1500:]}")


def main() -> int:
    chosen = chosen_from(options(__doc__ or "", repeats=11, limit_s=340.0))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines are sessions of their own: end them
    agent_options = dict(part.split("=", 1) for part in chosen.agent)
    with tempfile.TemporaryDirectory(prefix="pairs-") as name, ExitStack() as stack:
        both = Both(Path(name), stack, chosen.cpu, agent_options)
        stack.callback(keep_logs, Path(name), chosen.out / "cross_logs.tar.gz")
        run = Run(chosen, both, machine("vllm", "sglang"))
        run.start_all()
        run.all()
    report(run.results)
    said = [run.weights, *(each.kv_rows for each in run.results)]
    said += [verdict for each in run.results for verdict in each.tokens.values()]
    return exit_code(said, (each.failure for each in run.results))


if __name__ == "__main__":
    sys.exit(main())
