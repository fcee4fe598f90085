"""One pair of engines, request by request: prefill in one, decode in the other, whichever kind either is of."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.system.cross.fleet import decode_body, fetch_params, greedy, prefill_body
from tests.system.engines.fleet import PREFILL, prompt
from tests.system.gpu.pair_engines import ANSWER_S, DECODED, Engines, Running, RunningSGLang, RunningVLLM, Side, Voice
from tests.system.sglang import rows
from tests.system.sglang.server import Server

TIE = 0.25  # the best of 128256 logits lie between 16 and 32, where bf16 goes by 0.125: two steps
ROW_TOKENS = (300, 1024)  # the first ends inside a block, of 16 and of 64
SETTLE_S = 3.0  # for a prefill to say why its decode engine has failed


@dataclass(frozen=True)
class Pair:
    name: str
    sender: Side
    receiver: Side
    is_same_codec: bool = True
    beside: Pair | None = None  # measured in turns with it


@dataclass(frozen=True)
class Came:
    """A prompt that was prefilled on one side and decoded on the other. `first_at` is by the clock of the marks."""

    tokens: list[int]
    ttft_s: float  # from the first request to either engine
    decode_s: float  # from the request to the decode engine, by that engine if it is vLLM
    first_at: float
    room: int
    sender_name: str = ""  # of the request, where the engine is vLLM
    receiver_name: str = ""
    wait_s: float = 0.0  # of that, until the decode engine, if it is vLLM, knew that the KV had come


class Drive:
    """Requests are made as by `kvbridge proxy`: SGLang prefills while the decode engine waits, vLLM before it is
    asked."""

    row_tokens: Sequence[int] = ROW_TOKENS

    def __init__(self, pair: Pair, engines: Engines) -> None:
        self.pair = pair
        self.sender, self.receiver = engines.get(pair.sender), engines.get(pair.receiver)
        self.engines = engines

    def decode(self, tokens: list[int], amount: int) -> Came:
        """Prefilled there, decoded here."""
        room, began = next(self.engines.rooms), time.monotonic()
        if isinstance(self.sender, RunningVLLM):
            return self._one_after_the_other(self.sender, tokens, amount, room, began)
        assert isinstance(self.sender, RunningSGLang)
        server = self.sender.engine
        if isinstance(self.receiver, RunningSGLang):
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": server.bootstrap_port, "bootstrap_room": room}
            body = greedy(tokens, amount) | where
            with _asked(server, body):
                return self._decoded_by_sglang(self.receiver, body, amount, room, began)
        with _asked(server, prefill_body(tokens, room, amount)):
            params = fetch_params(self.sender.agents[0], room)
            return self._decoded_by_vllm(tokens, amount, params, room, began)

    def _one_after_the_other(
        self, sender: RunningVLLM, tokens: list[int], amount: int, room: int, began: float
    ) -> Came:
        name = self.engines.name()
        sender.engine.submit(name, tokens, 1, PREFILL | {"bootstrap_room": room})
        prefilled = sender.engine.result(name, ANSWER_S)
        params = prefilled.params
        assert params, f"prefill ended with {prefilled.reason} and gave no kv_transfer_params"
        if isinstance(self.receiver, RunningVLLM):
            return self._decoded_by_vllm(tokens, amount, params, room, began, name)
        assert isinstance(self.receiver, RunningSGLang)
        body = decode_body(tokens, room, prefilled, amount)
        return self._decoded_by_sglang(self.receiver, body, amount, room, began, name)

    def _decoded_by_vllm(
        self, tokens: list[int], amount: int, params: dict[str, Any], room: int, began: float, sender_name: str = ""
    ) -> Came:
        """vLLM tells of a request when it has ended: its first token is the only one where it is timed."""
        assert isinstance(self.receiver, RunningVLLM)
        name = self.engines.name()
        self.receiver.engine.submit(name, tokens, amount, params)
        result = self.receiver.engine.result(name, ANSWER_S)
        now = time.monotonic()
        assert len(result.tokens) == amount, f"decode ended with {result.reason} after {len(result.tokens)} tokens"
        return Came(list(result.tokens), now - began, result.seconds, now, room, sender_name, name, result.came_s)

    @staticmethod
    def _decoded_by_sglang(
        receiver: RunningSGLang, body: dict[str, Any], amount: int, room: int, began: float, sender_name: str = ""
    ) -> Came:
        asked = time.monotonic()
        tokens, first_s = _streamed(receiver.engine, body)
        assert len(tokens) == amount, f"{len(tokens)} tokens, {amount} were asked for"
        first_at = asked + first_s
        return Came(tokens, first_at - began, first_s, first_at, room, sender_name)

    def compare(self, prompts: Sequence[list[int]], tie: float, own: Sequence[Voice], others: Any = ()) -> str:
        """As `verdict` says, of these prompts."""
        found = [self.decode(tokens, DECODED).tokens for tokens in prompts]
        return verdict(found, own, tie, self.pair.is_same_codec, others)

    def compare_rows(self) -> str:
        """KV of prompts on both sides, every layer. AssertionError where they differ."""
        self.engines.keep_rows(True)
        try:
            for length in self.row_tokens:
                came = self.decode(prompt(length, seed=300 + length), 2)
                # vLLM computes the row of the last token itself.
                until = length - 1 if isinstance(self.receiver, RunningVLLM) else length
                given = self._rows(self.sender, "prefill", came, until)
                taken = self._rows(self.receiver, "decode", came, until)
                assert self.pair.is_same_codec == (given.codec == taken.codec), f"{given.codec} to {taken.codec}"
                self.assert_carried(given.first(until), taken, until)
        finally:
            self.engines.keep_rows(False)
            for file in self.engines.kept.glob("*.npz"):
                file.unlink()
        return "yes" if self.pair.is_same_codec else "as converted"

    def assert_carried(self, given: rows.SavedRows, taken: rows.SavedRows, until: int) -> None:
        rows.assert_carried(given, taken)

    def _rows(self, where: Running, side: str, came: Came, until: int) -> rows.SavedRows:
        """Of the first tokens. vLLM's are read from its blocks, which nobody has had since."""
        if isinstance(where, RunningSGLang):
            return rows.load(self.engines.kept, side, came.room, len(where.side.gpus))
        assert isinstance(where, RunningVLLM)
        name = came.sender_name if side == "prefill" else came.receiver_name
        found = where.engine.dump(name, 0, until, self.engines.folder / f"{side}.npz")
        assert all(set(codec["scales"]) <= {1.0} for codec in found.codecs.values()), "scales that are not 1"
        return found


@contextlib.contextmanager
def _asked(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """SGLang prefills meanwhile. Where the decode engine fails, what the prefill server says goes with it."""
    connection = server.begin(body)
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


def _streamed(server: Server, body: dict[str, Any]) -> tuple[list[int], float]:
    """The tokens of one request, and the seconds to the first. AssertionError with what the server says if it fails."""
    tokens, first_s, began = list[int](), 0.0, time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)) as connection:
        sent = json.dumps(body | {"stream": True})
        connection.request("POST", "/generate", sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, f"{server.log.stem}: {response.status} {response.read()[:500]!r}"
        for line in map(bytes.strip, response):
            if not line.startswith(b"data:") or line == b"data: [DONE]":
                continue
            said = json.loads(line[5:])
            assert "error" not in said, f"{server.log.stem}: {said['error']}"
            reason = said["meta_info"].get("finish_reason") or {}
            assert reason.get("type") != "abort", f"{server.log.stem}: {reason}"
            first_s = first_s or time.perf_counter() - began
            tokens = said["output_ids"]  # all so far
    return tokens, first_s


def alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens, from the first on."""
    return sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(ours, theirs, strict=True)))


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


def verdict(
    found: Sequence[Sequence[int]], own: Sequence[Voice], tie: float, is_same_codec: bool, others: Sequence[Voice] = ()
) -> str:
    """Whether prompts go on as an engine alone says: "yes", a tie, "NO", or how often (other codec).

    Where another engine alone parts from that one, nothing more is asked.
    """
    verdicts, equal = set(), 0
    for ours, one, other in zip(found, own, others or own, strict=True):
        same, agreed = alike(ours, one.tokens), alike(one.tokens, other.tokens)
        equal += same
        if same < agreed:
            verdicts.add(parting(ours, one, same, tie))
        elif agreed < DECODED:
            verdicts.add(f"yes, alone they part: {parting(other.tokens, one, agreed, tie)}")
    if len(set(map(tuple, found))) != len(found):
        return "NO: other prompts go on alike"
    if not is_same_codec:
        return f"{equal}/{len(found) * DECODED} alike"
    return "; ".join(sorted(verdicts)) or "yes"


def side_by_side(drives: Sequence[Any], length: int, repeats: int) -> list[dict[str, Any]]:
    """One prompt length, a row for each pair: they take turns, every prompt is used once.

    Their `timed` tells `bytes`, and times in milliseconds, `transfer_ms` among them.
    """
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
