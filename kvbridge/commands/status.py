"""`kvbridge status`: asks an agent over its unix socket and prints what it says."""

from __future__ import annotations

import json
import socket
import sys

import msgspec
from kvbridge_proto.codec import BadFrame
from kvbridge_proto.engine import Refused, ToEngine
from kvbridge_proto.status import SlotCounts, Status, StatusQuery
from kvbridge_proto.stream import StreamReader, pack
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import OperatorError
from ..oneline import plain

ANSWER_S = 5.0
RECEIVE_BYTES = 1 << 16


def show(path: str, as_json: bool) -> None:
    """Print one agent's status. Raises OperatorError when no agent answers there."""
    status = ask(path)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.json.decode(msgspec.json.encode(status)), indent=2) + "\n")  # in ASCII
        return
    Console(markup=False, emoji=False).print(rendered(status))  # a key may look like markup


def ask(path: str, answer_s: float = ANSWER_S) -> Status:
    """The status of the agent at `path`. Raises OperatorError (`no_agent`, `agent_silent`, `agent_refused`)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(answer_s)
        try:
            connection.connect(path)
            connection.sendall(pack(StatusQuery()))
            return _answer(connection, path)
        except TimeoutError:
            raise OperatorError("agent_silent", f"the agent at {path} did not answer in {answer_s:g} s") from None
        except OSError as error:
            raise OperatorError("no_agent", f"no agent at {path}: {error.strerror or error}") from None
        except BadFrame as error:
            raise OperatorError("no_agent", f"what answers at {path} is no agent: {error}") from None


def _answer(connection: socket.socket, path: str) -> Status:
    reader: StreamReader[ToEngine] = StreamReader(ToEngine)
    while received := connection.recv(RECEIVE_BYTES):
        for message in reader.feed(received):
            if isinstance(message, Status):
                return message
            if isinstance(message, Refused):
                raise OperatorError("agent_refused", f"{message.code}: {'; '.join(message.reasons)}")
    raise OperatorError("no_agent", f"no agent at {path}: the connection was closed without an answer")


def rendered(status: Status) -> RenderableType:
    """The status for people."""
    parts: list[RenderableType] = [*_failpoints(status), _agent(status), _slots(status)]
    if status.peers:
        parts.append(_rows("peers", ("name", "address", "state", "route", "key", "verdict"), status.peers))
    if status.transfers:
        columns = ("role", "request", "peer", "state", "chunks_done", "chunks", "age_s")
        parts.append(_rows("transfers", columns, status.transfers))
    if status.counters:
        parts.append(_counters(status))
    return Group(*parts)


def _failpoints(status: Status) -> list[RenderableType]:
    """An agent that was started to fail must not be taken for one that serves."""
    prefix = "kvbridge_failpoints_total{armed="
    said = [name.removeprefix(prefix)[:-1] for name in status.counters if name.startswith(prefix)]
    return [plain(f"FAILPOINTS ARE ON, this agent fails on purpose: {', '.join(said)}")] if said else []


def _agent(status: Status) -> Table:
    table = Table(title="agent", show_header=False, title_justify="left")
    agent, engine = status.agent, status.engine
    _add(table, "name", f"{agent.name} (kvbridge {agent.version}, boot {agent.boot})")
    _add(table, "state", f"{status.state}, up {status.uptime_s:.0f} s")
    _add(table, "address", agent.address)
    _add(table, "links", status.security)
    _add(table, "device", status.device)
    _add(table, "fabric", status.fabric)
    if engine is None:
        _add(table, "engine", "none attached")
    else:
        _add(table, "engine", f"{engine.engine}, pid {engine.pid}, epoch {engine.epoch}")
        size = f"{engine.pool_bytes / 2**20:.1f} MiB in {engine.planes} planes"
        _add(table, "pool", f"{engine.model}, {engine.shard}, {size}")
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of plain text: peers choose their names, which may be rich's markup or a terminal's commands."""
    table.add_row(*(Text(plain(cell)) for cell in cells))


def _slots(status: Status) -> Table:
    table = Table(title=f"slots of {status.slot_bytes / 2**20:g} MiB", title_justify="left")
    if status.rebuild_refused:
        table.caption = Text(plain(f"cannot be made anew: {status.rebuild_refused}; its log has the reason"))
    columns = SlotCounts.__struct_fields__
    for name in ("staging", *columns):
        table.add_column(name, justify="left" if name == "staging" else "right")
    for name, counts in (("inbound", status.inbound), ("outbound", status.outbound)):
        _add(table, name, *(str(getattr(counts, column)) for column in columns))
    return table


def _rows(title: str, columns: tuple[str, ...], records: tuple[msgspec.Struct, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for record in records:
        values = (getattr(record, column) for column in columns)
        _add(table, *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values))
    return table


def _counters(status: Status) -> Table:
    table = Table(title="counters", show_header=False, title_justify="left")
    for name, value in sorted(status.counters.items()):
        if value:
            _add(table, name, f"{value:,.0f}")
    return table
