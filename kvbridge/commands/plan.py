"""`kvbridge plan`: verdict and chunks for the pools of two engines, from files, agents, or a model's config."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool
from rich.table import Table

from ..errors import KVBridgeError, OperatorError
from ..geometry.check import shortened
from ..geometry.compat import Difference, Incompatible, Verdict, changes, check_pool, obstacles, verdict
from ..geometry.explain import sentence
from ..geometry.overlap import overlaps
from ..geometry.plan import Chunk, Plan, plan
from ..geometry.shard import assign
from ..local_agents import ask_pool
from ..models.config import read
from ..models.described import pools_of
from ..models.engine_command import parse
from ..models.fleet import EngineSize
from ..oneline import plain
from ..values import Value
from .console import stdout, write, write_reasons

SHOWN_CHUNKS = 8
USUAL_SLOT_BYTES = 4 << 20
Change = tuple[Difference, str]  # and what it means, "" if it makes the two pools incompatible


class PlannedPart(Value):
    """What one rank of the sender gives."""

    pool: Pool
    takes: tuple[Take, ...]
    plan: Plan


class EngineSide(Value):
    """The named ranks of one engine, and the smallest slot of those agents that were asked (None without any).

    By a command line they are of one replica, of `size.replicas`.
    """

    pools: Sequence[Pool]
    slot_bytes: int | None
    size: EngineSize = EngineSize(1)


def show(
    sender: str, receiver: str, tokens: int, slot_bytes: int | None, rank: int, as_json: bool, model: Path | None = None
) -> None:
    """Print verdict and plan for one rank of the receiver.

    With `model` the sides are command lines of engines that need not run. Raises KVBridgeError if there are no such
    pools or they do not fit. With `as_json` stdout has code and reasons too.
    """
    try:
        giving, taking = sides_of(model, sender, receiver) if model else (side(sender), side(receiver))
        if rank >= len(taking.pools):
            raise OperatorError("bad_option", f"rank: {rank}, {receiver} has {len(taking.pools)}")
    except KVBridgeError as error:
        if as_json:
            write_reasons(error.code, error.reasons)
        raise
    usable = slot_bytes or min(filter(None, (giving.slot_bytes, taking.slot_bytes)), default=USUAL_SLOT_BYTES)
    _judge(giving.pools, taking.pools[rank], tokens, usable, as_json)


def _judge(senders: Sequence[Pool], target: Pool, tokens: int, slot_bytes: int, as_json: bool) -> None:
    found, sender_pool = _judged(senders, target)
    diffs = _changes(found, sender_pool, target)
    parts: list[PlannedPart] = []
    failure: KVBridgeError | None = None
    try:
        if isinstance(found, Incompatible):
            raise OperatorError("incompatible", *found.reasons)
        parts = parts_of(senders, target, tokens, slot_bytes)
    except KVBridgeError as error:
        failure = error
    if as_json:
        write(_plain(found, failure, diffs, target, parts))
    else:
        _print(found, diffs, target, parts)
    if failure is not None:
        raise failure


def _judged(senders: Sequence[Pool], receiver: Pool) -> tuple[Verdict, Pool]:
    """The verdict on the first rank that does not fit, and that rank; on the first rank if all fit."""
    found = [(_verdict(sender, receiver), sender) for sender in senders]
    return next((each for each in found if isinstance(each[0], Incompatible)), found[0])


def _verdict(sender: Pool, receiver: Pool) -> Verdict:
    """The verdict, including what an agent would refuse when such an engine attaches."""
    found = verdict(sender, receiver)
    if isinstance(found, Incompatible):
        return found
    sides = (("sender", sender), ("receiver", receiver))
    reasons = [f"{side} {reason}" for side, pool in sides for reason in overlaps(pool)]
    return Incompatible(shortened(reasons)) if reasons else found


def side(name: str) -> EngineSide:
    """The pools of one engine, from a comma-separated list of files and agents' sockets. Raises OperatorError."""
    found: list[Pool] = []
    slots: list[int] = []
    for path in map(Path, name.split(",")):
        if _is_socket(path):
            answer = ask_pool(str(path))
            found.append(answer.pool)
            slots.append(answer.slot_bytes)
        else:
            found += pools(path)
    return EngineSide(found, min(slots, default=None))


def sides_of(path: Path, sender: str, receiver: str) -> tuple[EngineSide, EngineSide]:
    """The pools that two engines will have for this model. Raises OperatorError with the reasons of both sides."""
    model, name = read(_config(path)), path.resolve().name
    found: list[EngineSide] = []
    errors: list[tuple[str, KVBridgeError]] = []
    for role, command in (("sender", sender), ("receiver", receiver)):
        try:
            engine = parse(command)
            pools = pools_of(model, engine, name[:256], role, role == "receiver")
            found.append(EngineSide(pools, None, EngineSize(len(pools), engine.replicas, engine.copies)))
        except KVBridgeError as error:
            errors.append((role, error))
    if errors:
        raise OperatorError(errors[0][1].code, *(f"{role}: {why}" for role, error in errors for why in error.reasons))
    return found[0], found[1]


def _config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OperatorError("bad_model_config", f"{file}: {error}") from None


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except (OSError, ValueError):
        return False  # reading it raises a better error


def pools(path: Path) -> Sequence[Pool]:
    """The pool, or the pools, in a file. Raises OperatorError (`bad_pool_file`)."""
    try:
        read = msgspec.json.decode(path.read_bytes(), type=Pool | tuple[Pool, ...])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OperatorError("bad_pool_file", f"{path}: {error}") from None
    found: tuple[Pool, ...] = read if isinstance(read, tuple) else (read,)
    if not found:
        raise OperatorError("bad_pool_file", f"{path}: an empty list of pools")
    return found


def parts_of(senders: Sequence[Pool], receiver: Pool, tokens: int, slot_bytes: int) -> list[PlannedPart]:
    """What each sender gives. Raises OperatorError (`rows_not_held`) if the senders are not the whole engine."""
    try:
        takes = assign(senders, receiver)
    except KVBridgeError as error:
        reason = f"{error}; name every rank of the sender, with commas between, or as a JSON list"
        raise OperatorError(error.code, reason if len(senders) == 1 else str(error)) from None
    return [
        PlannedPart(pool, taken, plan(pool, receiver, taken, 0, tokens, slot_bytes))
        for pool, taken in zip(senders, takes, strict=True)
    ]


def _changes(found: Verdict, sender: Pool, receiver: Pool) -> list[Change]:
    """What is converted, or what prevents that. Nothing for malformed pools: the verdict says why."""
    if isinstance(found, Incompatible):
        is_nonsense = check_pool(sender) or check_pool(receiver)
        return [] if is_nonsense else [(each, "") for each in obstacles(sender, receiver)]
    return [(each, sentence(each, sender, receiver)) for each in changes(sender, receiver)]


def _plain(
    found: Verdict, failure: KVBridgeError | None, diffs: Sequence[Change], receiver: Pool, parts: Sequence[PlannedPart]
) -> dict[str, Any]:
    """The answer as JSON. `code` is empty if rows can be moved; otherwise the reasons say why they cannot."""
    return {
        "verdict": type(found).__name__,
        "code": failure.code if failure else "",
        "reasons": list(failure.reasons) if failure else [str(each) for each, _ in diffs],
        "changes": [
            {name: str(value) for name, value in asdict(each).items()} | {"words": words} for each, words in diffs
        ],
        "receiver": _rank(receiver),
        "senders": [
            {
                "rank": _rank(part.pool),
                "takes": [dict(zip(Take.__struct_fields__, msgspec.to_builtins(t), strict=True)) for t in part.takes],
                "chunks": part.plan.chunks,
                "bytes": part.plan.total_bytes,
                "digest": part.plan.digest,
            }
            for part in parts
        ],
    }


def _print(found: Verdict, diffs: Sequence[Change], receiver: Pool, parts: Sequence[PlannedPart]) -> None:
    console = stdout()
    console.print(type(found).__name__, style="bold")
    if not isinstance(found, Incompatible):  # its reasons are the error's text
        for each, words in diffs:
            console.print(f"  {plain(str(each))}")
            console.print(f"    {plain(words)}", style="dim")
    if parts:
        console.print(f"\nto {_rank(receiver)}")
    for part in parts:
        if not part.takes:
            continue
        console.print(f"\nfrom {_rank(part.pool)}")
        console.print(_takes(part))
        console.print(f"{part.plan.chunks} chunks, {part.plan.total_bytes:,} bytes, plan {part.plan.digest}")
        console.print(_chunks(part.plan))


def _takes(part: PlannedPart) -> Table:
    table = Table()
    for column in ("part", "layers", "heads"):
        table.add_column(column)
    for take in part.takes:
        layers, heads = (take.first_layer, take.end_layer), (take.first_head, take.end_head)
        table.add_row(plain(take.part or "all"), *(f"{first}-{end - 1}" for first, end in (layers, heads)))
    return table


def _chunks(plan: Plan) -> Table:
    table = Table()
    for column in ("chunk", "tokens", "pairs", "bytes"):
        table.add_column(column, justify="right")
    for index in range(min(plan.chunks, SHOWN_CHUNKS)):
        table.add_row(*_row(plan.chunk(index)))
    if plan.chunks > SHOWN_CHUNKS:
        table.add_row("...", "", "", "")
        table.add_row(*_row(plan.chunk(plan.chunks - 1)))
    return table


def _row(chunk: Chunk) -> tuple[str, str, str, str]:
    tokens = f"{chunk.first_local}-{chunk.end_local - 1}"
    return str(chunk.index), tokens, f"{chunk.first_pair}-{chunk.end_pair - 1}", f"{chunk.size_bytes:,}"


def _rank(pool: Pool) -> str:
    shard = pool.shard
    share = f" cp {shard.cp_rank}/{shard.cp_size}" if shard.cp_size > 1 else ""
    return f"{plain(pool.engine.id)} tp {shard.tp_rank}/{shard.tp_size} pp {shard.pp_rank}/{shard.pp_size}{share}"
