"""`kvbridge status`: asks agents over their unix sockets and prints what they say."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence, Sized
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec
from kvbridge_proto.pool import Pool
from kvbridge_proto.status import STILL_S, PeerStatus, SlotCounts, Status, problems
from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import OperatorError
from ..local_agents import ask, ask_pool, found, raise_any, tried
from .console import add, stdout, text_of, write

LABELS = "kvbridge/"  # before the name of each label
SCREEN_S = 1.0
ROWS = 100  # at most, per section: nobody reads more, and rich needs a second for a thousand


def show(named: Sequence[str], as_json: bool) -> None:
    """Print the status of the agents at these sockets, or of all on this host if none is named.

    Raises OperatorError if one of them does not answer, after the others are shown.
    """
    if len(named) == 1 and as_json:
        return write(_plain_json(ask(named[0])))
    answers = tried(ask, named or found())
    if as_json:
        write([_plain_answer(path, answer) for path, answer in answers.items()])
    else:
        stdout().print(*_answered(answers), sep="\n")
    raise_any(answers.values())


def watch(named: Sequence[str], every_s: float = SCREEN_S) -> None:
    """Print the status on one screen again and again, until Ctrl-C. Silent agents are named, and asked again.

    Without a terminal one status follows the other.
    """
    console = stdout()
    with (
        _interrupts() as interrupts,
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while not interrupts:
            live.update(Group(*_seen(named)), refresh=True)
            time.sleep(every_s)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C besides raising it: an exception raised inside a finalizer is lost."""
    interrupts: list[int] = []

    def note(number: int, frame: object) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _seen(named: Sequence[str]) -> list[RenderableType]:
    """The screen as it is now. Errors become lines of it."""
    try:
        return _answered(tried(ask, named or found()))
    except OperatorError as error:
        return [text_of(str(error))]


def _answered(answers: Mapping[str, Status | OperatorError]) -> list[RenderableType]:
    """A verdict, a line for each agent, then all that each says."""
    parts = _summary(answers)
    for path, answer in answers.items():
        if isinstance(answer, Status):
            parts += [*([_title(path)] if len(answers) > 1 else []), rendered(answer)]
    return parts


def _summary(answers: Mapping[str, Status | OperatorError]) -> list[RenderableType]:
    table = _pairs(3)
    healthy = 0
    for path, answer in answers.items():
        if isinstance(answer, OperatorError):
            add(table, PurePath(path).stem, f"NOT HEALTHY: {answer}", "", "")
            continue
        found = problems(answer)
        healthy += not found
        own = answer.engine
        engine = f"{' '.join(own.engine.split()[:2])} {own.shard}" if own else ""  # without its id, which is long
        work = f"{_number(answer.peers, 'peer')}, {_number(answer.transfers, 'transfer')}"
        add(table, answer.agent.name, f"NOT HEALTHY: {'; '.join(found)}" if found else "healthy", engine, work)
    verdict = f"{healthy} of {_number(answers, 'agent')} healthy"
    return [_title(verdict), _indented(table)]


def _number(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def probe(named: Sequence[str]) -> None:
    """Print nothing. Raises OperatorError unless all agents answer and their data threads came round lately."""
    for path in named or found():
        if (still_s := ask(path).still_s) > STILL_S:
            raise OperatorError("data_plane_stuck", f"{path}: the data thread has not come round for {still_s:.0f} s")


def show_labels(named: Sequence[str]) -> None:
    """Print labels for the attached engine's pod, for schedulers: `name=value` on one line.

    Raises OperatorError if an agent does not answer or has no engine, or if the engines differ.
    """
    found_labels = {_labels(path) for path in named or found()}
    if len(found_labels) > 1:
        raise OperatorError("bad_option", "engines: several that differ are attached here; name a --socket of one")
    sys.stdout.write(found_labels.pop() + "\n")


def _labels(path: str) -> str:
    engine = ask(path).engine
    if engine is None:
        raise OperatorError("agent_refused", f"{path}: no_engine: no engine is attached to this agent")
    labels = {"model_key": engine.model_key, **(msgspec.to_builtins(engine.traits) or {})}
    return " ".join(f"{LABELS}{name.replace('_', '-')}={value}" for name, value in labels.items())


def show_pools(named: Sequence[str]) -> None:
    """Print the pool of the engine behind these sockets, as `kvbridge plan` reads it: one, or a list of its ranks.

    Raises OperatorError if an agent does not answer or has no engine, or if there are several engines.
    """
    pools = [ask_pool(path).pool for path in named or found()]
    engines = sorted({pool.engine.id for pool in pools})
    if len(engines) > 1:
        reason = f"engines: {', '.join(engines)} are attached here; name the sockets of one with --socket"
        raise OperatorError("bad_option", reason)
    write(_plain_json(pools[0] if len(pools) == 1 else sorted(pools, key=_rank)))


def _rank(pool: Pool) -> tuple[int, int]:
    return pool.shard.pp_rank, pool.shard.tp_rank


def _plain_json(answer: Any) -> Any:
    return json.loads(msgspec.json.encode(answer))  # JSON has no infinity, which a peer may name


def _plain_answer(path: str, answer: Status | OperatorError) -> dict[str, Any]:
    if isinstance(answer, Status):
        return {"socket": path, "status": _plain_json(answer)}
    return {"socket": path, "code": answer.code, "reasons": list(answer.reasons)}


# For people: a function for each section, which is no wider than it must be.


def rendered(status: Status) -> RenderableType:
    sections = (_failpoints, _agent, _slots, _peers, _refusals, _transfers, _offers, _readers, _prompts, _errors)
    return Group(*(part for section in (*sections, _counters) for part in section(status)))


def _failpoints(status: Status) -> list[RenderableType]:
    """Shown first: an agent that was started to fail must not be taken for a healthy one."""
    armed = ", ".join(status.failpoints)
    return [text_of(f"FAILPOINTS ARE ON, this agent fails on purpose: {armed}")] if armed else []


def _agent(status: Status) -> list[RenderableType]:
    rows = _pairs()
    agent, engine = status.agent, status.engine
    add(rows, "name", f"{agent.name} (kvbridge {agent.version}, incarnation {agent.incarnation})")
    add(rows, "state", f"{status.state}, up {status.uptime_s:.0f} s")
    add(rows, "address", agent.address)
    add(rows, "links", status.security)
    add(rows, "metrics", status.metrics or "off")
    add(rows, "device", status.device)
    if status.still_s > STILL_S:
        add(rows, "data thread", f"has not come round for {status.still_s:.0f} s")
    add(rows, "fabric", status.fabric)
    if engine is None:
        add(rows, "engine", "none attached")
    else:
        add(rows, "engine", f"{engine.engine}, pid {engine.pid}, epoch {engine.epoch}, protocol {engine.protocol}")
        size = f"{engine.pool_bytes / 2**20:.1f} MiB in {engine.planes} planes"
        add(rows, "pool", f"{engine.model}, {engine.shard}, {size}")
        add(rows, "model key", engine.model_key)
    return [_title("agent"), _indented(rows)]


def _slots(status: Status) -> list[RenderableType]:
    columns = SlotCounts.__struct_fields__
    table = _table("", *columns, numbers=columns)
    for name, counts in (("receive_slots", status.receive_slots), ("send_slots", status.send_slots)):
        add(table, name, *(str(getattr(counts, column)) for column in columns))
    parts: list[RenderableType] = [_title(f"slots of {status.slot_bytes / 2**20:g} MiB"), _indented(table)]
    if status.rebuild_refused:
        parts.append(_indented(text_of(f"cannot be made anew: {status.rebuild_refused}; its log has the reason")))
    return parts


def _peers(status: Status) -> list[RenderableType]:
    parts: list[RenderableType] = [_title("peers")] if status.peers else []
    for peer in status.peers[:ROWS]:
        parts += _peer(peer)
    return parts + _left_out(status.peers)


def _peer(peer: PeerStatus) -> list[RenderableType]:
    rows = _pairs()
    for name in ("state", "protocol", "address", "key", "route", "verdict"):
        if value := getattr(peer, name):
            add(rows, name, str(value))
    return [_indented(text_of(peer.name or "(no handshake yet)")), _indented(rows, 4)]


def _refusals(status: Status) -> list[RenderableType]:
    table = _table("when", "peer", "why", numbers=("when",))
    for each in status.refusals:
        add(table, f"{each.age_s:,.0f} s ago", each.address, f"{each.code}: {each.reason}")
    return _section("no session with", table)


def _transfers(status: Status) -> list[RenderableType]:
    table = _table("role", "state", "chunks", "age", "request, peer", numbers=("chunks", "age"))
    for each in status.transfers[:ROWS]:
        done = f"{each.chunks} being read" if each.chunks_done is None else f"{each.chunks_done}/{each.chunks}"
        add(table, each.role, each.state, done, f"{each.age_s:.1f} s", f"{each.request}, {each.peer}")
    return _section("transfers", table, status.transfers)


def _offers(status: Status) -> list[RenderableType]:
    """Offers, the oldest first."""
    numbers = "tokens", "blocks", "age"
    table = _table("state", *numbers, "request, who asked", numbers=numbers)
    for each in status.offers[:ROWS]:
        who = f"{each.request}, {each.peer or 'nobody'}"
        add(table, each.state, str(each.tokens), str(each.blocks), f"{each.age_s:.1f} s", who)
    return _section("offers", table, status.offers)


def _readers(status: Status) -> list[RenderableType]:
    """Which agents have our engine's memory mapped, and which should have closed it."""
    numbers = "epoch", "age", "pid"
    table = _table(*numbers, "agent", numbers=numbers)
    for each in status.readers[:ROWS]:
        late = "" if each.over_s is None else f", to be closed for {each.over_s:.1f} s"
        add(table, str(each.epoch), f"{each.age_s:.1f} s", str(each.pid), f"{each.agent} (uid {each.uid}){late}")
    return _section("readers of our engine's memory", table, status.readers)


def _prompts(status: Status) -> list[RenderableType]:
    """What became of the prompts that our engine wanted and offered, since the agent started."""
    rows, counts = _pairs(), status.prompts
    fetched, both = counts.fetched_tokens, counts.fetched_tokens + counts.computed_tokens
    if both:
        add(rows, "came by the bridge", f"{fetched:,} of {both:,} prompt tokens ({fetched / both:.1%})")
    if counts.computed:
        add(rows, "computed here", f"{sum(counts.computed.values()):,} prompts: {_each(counts.computed)}")
    if counts.released:
        others = {code: count for code, count in counts.released.items() if code != "served"}
        taken = f"{counts.released.get('served', 0):,} fetched{f'; {_each(others)}' if others else ''}"
        add(rows, "offered", f"{sum(counts.released.values()):,} prompts: {taken}")
    return _section("prompts", rows)


def _errors(status: Status) -> list[RenderableType]:
    table = _table("when", "what", numbers=("when",), show_header=False)
    for error in reversed(status.errors):
        add(table, f"{error.age_s:,.0f} s ago", f"{error.level} {error.logger}: {error.text}")
    return _section("last errors", table)


def _left_out(rows: Sized) -> list[RenderableType]:
    return [_indented(text_of(f"and {len(rows) - ROWS:,} more; --json has them all"))] if len(rows) > ROWS else []


def _each(counts: Mapping[str, int]) -> str:
    """The largest first."""
    return ", ".join(f"{value:,} {name}" for name, value in sorted(counts.items(), key=lambda each: -each[1]))


def _counters(status: Status) -> list[RenderableType]:
    table = _table("count", "what", numbers=("count",), show_header=False)
    for name, value in sorted(status.counters.items()):
        if value:
            add(table, f"{value:,.0f}", name)
    return _section("counters", table)


def _section(title: str, table: Table, rows: Sized = ()) -> list[RenderableType]:
    """Nothing if the table is empty. It has the first ROWS of `rows`."""
    return [_title(title), _indented(table), *_left_out(rows)] if table.row_count else []


def _title(text: str) -> Text:
    return text_of(text, style="bold")


def _table(*columns: str, numbers: Container[str], show_header: bool = True) -> Table:
    """A table with these columns: `numbers` stand at the right and stay whole."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for name in columns:
        is_number = name in numbers
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def _pairs(values: int = 1) -> Table:
    """A table of names and values. A value too long for its line continues below itself."""
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True, overflow="fold")
    for _ in range(values):
        rows.add_column(overflow="fold")
    return rows


def _indented(part: RenderableType, columns: int = 2) -> Padding:
    return Padding(part, (0, 0, 0, columns), expand=False)  # else each line ends in blanks up to the console's width
