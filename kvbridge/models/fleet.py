"""How many prefill and decode engines some traffic needs: arithmetic on a data sheet and named assumptions. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from ..errors import OperatorError

# Dense bf16 FLOP/s, bytes/s of memory, bytes: NVIDIA's data sheets of the SXM boards.
GPUS = {
    "a100": (312e12, 2.039e12, 80e9),
    "h100": (989e12, 3.35e12, 80e9),
    "h200": (989e12, 4.8e12, 141e9),
}
SIZES = (1, 2, 4, 8)  # GPUs of an engine
SHARES = ("prefill_efficiency", "decode_efficiency", "memory_share", "busy")
MAY_BE_0 = ("active", "flops", "memory_rate", "memory")
MOST = {int: 10_000_000, float: 1e30}


@dataclass(frozen=True, slots=True)
class FleetGoal:
    """What the fleet is for, what it is made of, and what is assumed of both. Each field can be given.

    parameters    of the model; `active` of them for each token (0: all)
    flops, memory_rate, memory    of a GPU: FLOP/s, bytes/s and bytes; 0: those of `gpu`
    prefill_efficiency    the share of `flops` that a prefill reaches. On an H200 at least 0.5 was seen, and no limit
    decode_efficiency     the share of `memory_rate` that a decode step reaches. Not measured here
    memory_share    what weights and KV may have of a GPU's memory
    busy            the share of the time that an engine may work: the rest is for what arrives unevenly
    most_sequences  that one replica decodes at once
    step_s          how long a decode step may take at most
    """

    gpus: int
    rate: float
    prompt_tokens: int
    answer_tokens: int
    parameters: float
    gpu: str = "h100"
    active: float = 0.0
    parameter_bytes: float = 2.0
    flops: float = 0.0
    memory_rate: float = 0.0
    memory: float = 0.0
    prefill_efficiency: float = 0.5
    decode_efficiency: float = 0.6
    memory_share: float = 0.9
    busy: float = 0.7
    most_sequences: int = 256
    step_s: float = 0.05


@dataclass(frozen=True, slots=True)
class EngineSize:
    """`replicas` of an engine with so many `ranks` each, one a GPU, and how many copies of the weights they hold."""

    ranks: int
    replicas: int = 1
    copies: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks * self.replicas


@dataclass(frozen=True, slots=True)
class FleetKV:
    """Bytes of KV: of a prompt as it is carried, of a prompt and of a whole sequence in a decode engine's memory."""

    carried: int
    prompt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`prefill_s` is for one prompt. `sequences` and `step_s` are of a full decode engine. Rates are requests/s.

    Engines are counted with all their replicas.
    """

    prefill: int
    decode: int
    prefill_s: float
    prefill_rate: float
    sequences: int
    step_s: float
    decode_rate: float
    rate: float


def filled(goal: FleetGoal) -> tuple[float, float, float]:
    """FLOP/s, bytes/s and bytes of a GPU. Raises OperatorError."""
    given = (goal.flops, goal.memory_rate, goal.memory)
    if goal.gpu not in GPUS and not all(given):
        raise OperatorError(
            "bad_option", f"fleet: gpu={goal.gpu}: know {', '.join(GPUS)}; or give flops, memory_rate, memory"
        )
    flops, memory_rate, memory = (own or known for own, known in zip(given, GPUS.get(goal.gpu, given), strict=True))
    return flops, memory_rate, memory


def prefill_s(goal: FleetGoal, ranks: int) -> float:
    """By a replica. 2 FLOPs for each active parameter and token; what attention adds with the square is left out."""
    flops, _, _ = filled(goal)
    return 2 * (goal.active or goal.parameters) * goal.prompt_tokens / (ranks * flops * goal.prefill_efficiency)


def step_s(goal: FleetGoal, kv: FleetKV, size: EngineSize, sequences: int) -> float:
    """A decode step reads all weights and each sequence's KV, half of its answer on average; or FLOPs bind it."""
    flops, memory_rate, _ = filled(goal)
    read = weights(goal, size) + sequences * (kv.prompt + kv.sequence) / 2
    computed = 2 * (goal.active or goal.parameters) * sequences
    return max(read / (memory_rate * goal.decode_efficiency), computed / (flops * goal.prefill_efficiency)) / size.gpus


def weights(goal: FleetGoal, size: EngineSize) -> float:
    """Bytes of them in an engine."""
    return goal.parameters * goal.parameter_bytes * size.copies


def room_for_kv(goal: FleetGoal, size: EngineSize) -> float:
    """Bytes that weights leave of an engine's memory; below 0 if they do not fit."""
    _, _, memory = filled(goal)
    return size.gpus * memory * goal.memory_share - weights(goal, size)


def sequences(goal: FleetGoal, kv: FleetKV, size: EngineSize) -> int:
    """How many whole sequences one engine decodes at once: by memory, `most_sequences` and `step_s`; 0 if none fits."""
    room = room_for_kv(goal, size)
    most = min(goal.most_sequences * size.replicas, int(room // kv.sequence)) if room > 0 else 0
    return bisect_right(range(1, most + 1), goal.step_s, key=lambda count: step_s(goal, kv, size, count))


def plan_fleet(goal: FleetGoal, kv: FleetKV, prefilling: EngineSize, decoding: EngineSize) -> FleetPlan:
    """The split of the GPUs that serves most: the slower side decides. Raises OperatorError (`fleet_too_small`)."""
    each_s, count = prefill_s(goal, prefilling.ranks), sequences(goal, kv, decoding)
    prefill_gpus, decode_gpus = prefilling.gpus, decoding.gpus
    if room_for_kv(goal, prefilling) < kv.prompt * prefilling.replicas:
        raise OperatorError(
            "fleet_too_small", f"prefill: {prefill_gpus} GPUs do not hold the weights and a prompt of each replica"
        )
    if not count:
        raise OperatorError(
            "fleet_too_small", f"decode: {decode_gpus} GPUs do not decode one sequence within step_s={goal.step_s}"
        )
    step = step_s(goal, kv, decoding, count)
    prefill_rate = goal.busy * prefilling.replicas / each_s
    decode_rate = goal.busy * count / (goal.answer_tokens * step)
    if goal.gpus < (least := prefill_gpus + decode_gpus):
        raise OperatorError("fleet_too_small", f"gpus: got {goal.gpus}, one engine of each role needs {least}")
    prefill, decode = math.ceil(goal.rate / prefill_rate), math.ceil(goal.rate / decode_rate)
    if prefill * prefill_gpus + decode * decode_gpus > goal.gpus:
        most = (goal.gpus - decode_gpus) // prefill_gpus
        splits = ((number, (goal.gpus - number * prefill_gpus) // decode_gpus) for number in range(1, 1 + most))
        prefill, decode = max(splits, key=lambda each: min(each[0] * prefill_rate, each[1] * decode_rate))
    rate = min(prefill * prefill_rate, decode * decode_rate)
    return FleetPlan(prefill, decode, each_s, prefill_rate, count, step, decode_rate, rate)
