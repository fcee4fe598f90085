"""`kvbridge plan --fleet`: how many engines of each role some traffic needs, and the arithmetic behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvbridge_proto.pool import Pool

from ..errors import OperatorError, did_you_mean
from ..models.fleet import (
    MAY_BE_0,
    MOST,
    SHARES,
    SIZES,
    EngineSize,
    FleetGoal,
    FleetKV,
    FleetPlan,
    filled,
    plan_fleet,
    sequences,
    weights,
)
from .console import stdout, write
from .plan import USUAL_SLOT_BYTES, EngineSide, parts_of, sides_of

KINDS: dict[str, type] = {"int": int, "float": float, "str": str}
NOT_KNOWN = (
    "not counted: attention's own FLOPs (they grow with the square of the prompt), communication between ranks, what "
    "caches of prefixes save, time in queues; and that the stages of a pipeline (-pp) work one after the other: a step "
    "takes that many times as long. Measure before you buy: kvbridge bench, and your own engines."
)


def read_goal(text: str) -> FleetGoal:
    """NAME=VALUE with commas between. Raises OperatorError (`bad_option`)."""
    known = {each.name: KINDS[str(each.type)] for each in fields(FleetGoal)}
    needed = [each.name for each in fields(FleetGoal)][:5]  # those without a default
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, is_given, value = part.partition("=")
        if name not in known or not is_given or name in given:
            raise OperatorError("bad_option", f"fleet: got {part!r}, need NAME=VALUE once; {did_you_mean(name, known)}")
        try:
            given[name] = known[name](value)
        except ValueError:
            raise OperatorError("bad_option", f"fleet: {part}: must be a number") from None
        if (bounds := _broken(name, given[name])) is not None:
            raise OperatorError("bad_option", f"fleet: {part}: must be {bounds}")
    if missing := [name for name in needed if name not in given]:
        raise OperatorError("bad_option", f"fleet: needs {', '.join(missing)} too")
    if (goal := FleetGoal(**given)).active > goal.parameters:
        raise OperatorError("bad_option", f"fleet: active={goal.active:g}: parameters are {goal.parameters:g}")
    return goal


def _broken(name: str, value: Any) -> str | None:
    """The bounds of this value, if it is beyond them."""
    if isinstance(value, str) or (value == 0 and name in MAY_BE_0):
        return None
    most = 1 if name in SHARES else MOST[type(value)]
    return None if 0 < value <= most else f"positive and at most {most:g}"


def kv_bytes(giving: EngineSide, taking: EngineSide, goal: FleetGoal) -> FleetKV:
    """From the plans of an agent: of all ranks of the decode engine, from those of the prefill engine and their own."""

    def planned(senders: Sequence[Pool], tokens: int) -> int:
        parts = [part for pool in taking.pools for part in parts_of(senders, pool, tokens, USUAL_SLOT_BYTES)]
        return sum(part.plan.total_bytes for part in parts)

    prompt, whole = goal.prompt_tokens, goal.prompt_tokens + goal.answer_tokens
    return FleetKV(planned(giving.pools, prompt), planned(taking.pools, prompt), planned(taking.pools, whole))


def show(model: Path | None, sender: str, receiver: str, text: str, as_json: bool) -> None:
    """Print the plan. Raises OperatorError: a pair that does not fit, a fleet that is too small (`fleet_too_small`)."""
    if model is None:
        raise OperatorError("bad_option", "--fleet: needs --model")
    goal = read_goal(text)
    giving, taking = sides_of(model, sender, receiver)
    kv = kv_bytes(giving, taking, goal)
    found = plan_fleet(goal, kv, giving.size, taking.size)
    if as_json:
        shown = {name: asdict(each) for name, each in (("goal", goal), ("kv", kv), ("plan", found))}
        write(shown | {"link_bytes_per_s": link(goal, found, kv)})
    else:
        stdout().print("\n".join(_lines(goal, kv, giving.size, taking.size, found)), markup=False, highlight=False)
    if found.rate < goal.rate:
        raise OperatorError("fleet_too_small", f"serves {found.rate:.3g} of {goal.rate:g} requests/s")


def link(goal: FleetGoal, found: FleetPlan, kv: FleetKV) -> float:
    """Bytes/s out of a prefill engine so that a prompt is carried in the time that its prefill takes."""
    return kv.carried * found.prefill_rate / goal.busy


def _lines(goal: FleetGoal, kv: FleetKV, prefilling: EngineSize, decoding: EngineSize, found: FleetPlan) -> list[str]:
    flops, memory_rate, memory = filled(goal)
    active = goal.active or goal.parameters
    used = found.prefill * prefilling.gpus + found.decode * decoding.gpus
    return [
        f"{found.prefill} prefill and {found.decode} decode engines of {_gpus(prefilling)} and {_gpus(decoding)} GPUs "
        f"({used} of {goal.gpus} GPUs) serve {found.rate:.3g} requests/s",
        "",
        f"KV: {kv.carried / goal.prompt_tokens:,.0f} bytes a token carried, {kv.carried / 1e6:,.1f} MB a prompt",
        f"prefill: 2 x {active:.3g} parameters x {goal.prompt_tokens} tokens / ({prefilling.ranks} x {flops:.3g} "
        f"FLOP/s x prefill_efficiency {goal.prefill_efficiency:g}) = {found.prefill_s * 1e3:,.0f} ms a prompt",
        f"  busy {goal.busy:g}{_each(prefilling)} / {found.prefill_s:.3g} s = {found.prefill_rate:.3g} requests/s an "
        "engine",
        f"decode: ({decoding.gpus} x {memory / 1e9:g} GB x memory_share {goal.memory_share:g} - weights "
        f"{weights(goal, decoding) / 1e9:,.1f} GB) / {kv.sequence / 1e6:,.1f} MB a sequence, at most most_sequences "
        f"{goal.most_sequences}{_each(decoding)} and step_s {goal.step_s:g}: {found.sequences} sequences",
        f"  a step reads weights and KV at {decoding.gpus} x {memory_rate:.3g} B/s x decode_efficiency "
        f"{goal.decode_efficiency:g} (or is bound by FLOPs): {found.step_s * 1e3:,.1f} ms",
        f"  busy {goal.busy:g} x {found.sequences} / ({goal.answer_tokens} tokens x {found.step_s:.3g} s) = "
        f"{found.decode_rate:.3g} requests/s an engine",
        f"link: {link(goal, found, kv) / 1e9:,.2f} GB/s out of a prefill engine carry a prompt in the time of its "
        f"prefill; {min(goal.rate, found.rate) * kv.carried / found.decode / 1e9:,.2f} GB/s into a decode engine on "
        "average",
        "sizes that hold the weights and a sequence: " + _sizes(goal, kv),
        "",
        NOT_KNOWN,
    ]


def _gpus(size: EngineSize) -> str:
    return f"{size.replicas} x {size.ranks}" if size.replicas > 1 else str(size.ranks)


def _each(size: EngineSize) -> str:
    return f" x {size.replicas} replicas" if size.replicas > 1 else ""


def _sizes(goal: FleetGoal, kv: FleetKV) -> str:
    found = {size: sequences(goal, kv, EngineSize(size)) for size in SIZES}
    return ", ".join(f"{size} GPUs ({count} sequences)" for size, count in found.items() if count) or "none"
