"""`kvbridge trace`: the life of a request, from the journals of both sides' agents."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from kvbridge_proto.status import MAX_ENTRIES, Trace, TraceEntry
from rich.table import Table
from rich.text import Text

from ..agent.journal import belongs, followed, meant, names_beside
from ..errors import OperatorError
from ..local_agents import ask_trace, found, raise_any, tried
from ..values import Value
from .console import add, stdout, text_of, write

MOST_ASKINGS = 8  # each answer may bring other names of the request, under which more agents may know it
MOST_LISTED = 16  # requests, where several have the id


class Event(Value):
    """An entry, its agent, and the agent's request that it belongs to (or the transfer, if no request is known)."""

    agent: str
    entry: TraceEntry
    about: str


def _events(traces: Sequence[Trace]) -> list[Event]:
    """The entries of all traces, in the order of their times."""
    events = []
    for trace in traces:
        of_transfer = {each.transfer: each.request for each in trace.entries if each.transfer and each.request}
        for entry in trace.entries:
            request = entry.request or of_transfer.get(entry.transfer, "")
            events.append(Event(trace.agent.name, entry, request or f"transfer {entry.transfer}"))
    return sorted(events, key=lambda event: event.entry.at_s)


def show(request: str, named: Sequence[str], saved: Sequence[Path], as_json: bool, chrome: Path | None) -> None:
    """Print what became of `request`: the client's id, an engine's, a rendezvous id or a transfer.

    The slowest want if it is "".

    `saved` are files that `--json` printed on other hosts. `chrome` is a file to write for Chrome's and Perfetto's
    viewers. Raises OperatorError: `no_such_request`, `several_requests`, `bad_trace_file`, or for a silent agent as
    `kvbridge status` does.
    """
    others = [trace for path in saved for trace in _loaded(path)]
    paths = named if named or saved else found()
    answers = tried(partial(ask_trace, names=[request] if request else []), paths)
    if not request:
        request = _slowest(answers.values())
    traces = _told(paths, answers, others, _names(request, _heard(answers, others)))
    events = _events(traces)
    if as_json:
        write([msgspec.to_builtins(trace) for trace in traces])
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_trace(events)) + "\n")
    if not as_json and events:
        stdout().print(_title(request, events), timeline(events), sep="\n")
    raise_any(answers.values())
    if not events:
        reason = f"{request or 'want'}: nothing is remembered of it by {', '.join(map(str, (*paths, *saved)))}"
        raise OperatorError("no_such_request", reason)


def _loaded(path: Path) -> list[Trace]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Trace])
    except (OSError, msgspec.MsgspecError) as error:
        raise OperatorError("bad_trace_file", f"{path}: {error}; it is written by kvbridge trace --json") from None


def _slowest(answers: Iterable[Trace | OperatorError]) -> str:
    """The slowest of the requests that the agents chose, "" if they know none."""
    entries = [entry for each in answers if isinstance(each, Trace) for entry in each.entries]
    timed = [entry for entry in entries if entry.seconds is not None]
    return max(timed, key=lambda entry: entry.seconds or 0.0).request if timed else ""


def _heard(answers: dict[str, Trace | OperatorError], others: Sequence[Trace]) -> list[Trace]:
    return [each for each in (*answers.values(), *others) if isinstance(each, Trace)]


def _names(request: str, traces: Sequence[Trace]) -> set[str]:
    """All names of the request that is meant. Raises OperatorError `several_requests` if more than one may be."""
    entries = [entry for each in traces for entry in each.entries]
    beside, groups = names_beside(entries), list[set[str]]()
    for name in sorted(meant(request, beside)):
        if all(name not in group for group in groups):
            groups.append(followed([name], beside))
    if len(groups) > 1:
        reason = f"{request}: {len(groups)} requests have it; {_listed(groups, entries)}"
        raise OperatorError("several_requests", reason)
    return groups[0] if groups else {request}


def _listed(groups: Sequence[set[str]], entries: Sequence[TraceEntry]) -> str:
    """A name for each of these requests, and when it was first heard of. The newest first."""
    firsts = [min((each for each in entries if belongs(each, group)), key=lambda each: each.at_s) for group in groups]
    firsts.sort(key=lambda each: -each.at_s)
    lines = [
        f"{each.request or each.transfer or each.rendezvous} ({time.strftime('%H:%M:%S', time.localtime(each.at_s))})"
        for each in firsts[:MOST_LISTED]
    ]
    more = f" and {len(firsts) - MOST_LISTED} older" if len(firsts) > MOST_LISTED else ""
    return f"name one of them: {', '.join(lines)}{more}"


def _told(
    paths: Sequence[str], answers: dict[str, Trace | OperatorError], others: Sequence[Trace], names: set[str]
) -> list[Trace]:
    """Everything known of the request under all its names: both engines have one for it, and so has each transfer."""
    count = 0
    for _ in range(MOST_ASKINGS):
        if count == len(names):
            break
        count = len(names)
        asked = sorted(names)[:MAX_ENTRIES]
        living = [path for path in paths if isinstance(answers[path], Trace)]
        answers.update(tried(partial(ask_trace, names=asked), living))
        names = followed(names, names_beside(entry for each in _heard(answers, others) for entry in each.entries))
    kept = [
        msgspec.structs.replace(each, entries=tuple(entry for entry in each.entries if belongs(entry, names)))
        for each in _heard(answers, others)
    ]
    return [each for each in kept if each.entries]


def _title(request: str, events: Sequence[Event]) -> Text:
    first, last = events[0].entry.at_s, events[-1].entry.at_s
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first)) + f".{int(first % 1 * 1000):03d}"
    return text_of(f"{request}: {(last - first) * 1e3:.2f} ms from {began}", style="bold")


def timeline(events: Sequence[Event]) -> Table:
    """A row per event: milliseconds since the first and since the one before, the agent, what happened."""
    table = Table(box=None, pad_edge=False)
    for name in ("ms", "+ms", "agent", "what", "of", ""):
        table.add_column(name, justify="right" if "ms" in name else "left", no_wrap="ms" in name, overflow="fold")
    before = first = events[0].entry.at_s
    for event in events:
        entry = event.entry
        times = (f"{(entry.at_s - first) * 1e3:.2f}", f"{(entry.at_s - before) * 1e3:.2f}")
        cells = (*times, event.agent, entry.what, event.about, entry.text)
        add(table, *cells)
        before = entry.at_s
    return table


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The events in Trace Event Format: a process for each agent, a thread for each request and transfer."""
    agents = {name: number for number, name in enumerate(dict.fromkeys(event.agent for event in events), 1)}
    lines = {key: number for number, key in enumerate(dict.fromkeys(map(_line, events)), 1)}
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for name, number in agents.items()
    ]
    for (agent, name), number in lines.items():
        named.append({"ph": "M", "name": "thread_name", "pid": agents[agent], "tid": number, "args": {"name": name}})
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *_slices(events, agents, lines)]}


def _line(event: Event) -> tuple[str, str]:
    return event.agent, event.about


def _slices(
    events: Sequence[Event], agents: dict[str, int], lines: dict[tuple[str, str], int]
) -> Iterator[dict[str, Any]]:
    """Each event lasts until the next of its line. The last one of a line is an instant."""
    by_line: dict[tuple[str, str], list[TraceEntry]] = {}
    for event in events:
        by_line.setdefault(_line(event), []).append(event.entry)
    for line, entries in by_line.items():
        place = {"pid": agents[line[0]], "tid": lines[line]}
        for entry, after in zip(entries, [*entries[1:], None], strict=True):
            shown = {"name": entry.what, "ts": entry.at_s * 1e6, "args": {"text": entry.text}, **place}
            if after is None:
                yield {"ph": "i", "s": "t", **shown}
            else:
                yield {"ph": "X", "dur": (after.at_s - entry.at_s) * 1e6, **shown}
