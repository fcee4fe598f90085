"""`kvbridge status --fleet`: asks agents of any host for their page /status, all at once, and says which are well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
from kvbridge_proto.status import PAGE_SCHEMA, PagePeer, StatusPage
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import OperatorError
from ..transport.listed import ServiceName, read_entry, read_list
from ..transport.names import MOST_LOOKUPS, Names
from .console import add, stdout, write

PAGE_ANSWER_S = 1.5  # for one agent: its name, its connection and its page
PROMETHEUS = "prometheus="
PROMETHEUS_S = 10.0
AT_ONCE = MOST_LOOKUPS  # more names would not be looked up
MOST_BYTES = 1 << 22
SLOWEST = 5
NOBODY = ("peer_unreachable", "too_many_links", "peer_not_allowed")  # no agent has answered at that address
# What Prometheus may have scraped of agents lately, so that those that are down now are known.
AGENTS = "last_over_time(kvbridge_build_info[1d])"


class PagePlace(NamedTuple):
    """Where an agent serves its metrics. `path` is that of its page."""

    host: str
    port: int
    path: str = "/status"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class PairRefused(NamedTuple):
    """`receiver` dialled `sender`, and there is no session.

    `is_meant` is False if only a request named that address and nobody answered there: a client may make it up.
    """

    receiver: str
    sender: str
    code: str
    reason: str
    age_s: float
    is_meant: bool


class MeasuredRoute(NamedTuple):
    receiver: str
    sender: str
    route: str
    bytes_per_s: float


Answer = StatusPage | str  # or why there is none


def show(wheres: Sequence[str], as_json: bool) -> None:
    """Print a line for each agent, pairs without a session, and the slowest routes.

    Raises OperatorError `fleet_ill` afterwards, unless all agents are healthy and none refuses another.
    """
    begun = time.monotonic()
    answers = asyncio.run(_asked(wheres))
    names = _names(answers)
    without, routes = list(_refused(answers, names)), sorted(_routes(answers, names), key=lambda each: each.bytes_per_s)
    refused, in_vain = [pair for pair in without if pair.is_meant], [pair for pair in without if not pair.is_meant]
    ill = [str(place) for place, answer in answers.items() if isinstance(answer, str) or answer.problems]
    verdict = f"{len(answers) - len(ill)} of {len(answers)} agents healthy, {len(refused)} pairs without a session"
    if as_json:
        write(_plain_json(verdict, answers, refused, in_vain, routes[:SLOWEST]))
    else:
        asked = Text(f"asked in {time.monotonic() - begun:.2f} s", style="dim")
        stdout().print(
            Group(Text(verdict, style="bold"), *_sections(answers, refused, in_vain, routes[:SLOWEST]), asked)
        )
    if ill or refused or not answers:
        raise OperatorError("fleet_ill", verdict)


# Ask:


async def _asked(wheres: Sequence[str]) -> dict[PagePlace, Answer]:
    places: dict[PagePlace, str] = {}
    for where in wheres:
        places |= await _found(where)
    limit = asyncio.Semaphore(AT_ONCE)
    names = Names()

    async def one(place: PagePlace, why: str) -> Answer:
        async with limit:
            return why or await _page(place, names)

    return dict(zip(places, await asyncio.gather(*(one(*each) for each in places.items())), strict=True))


async def _found(where: str) -> dict[PagePlace, str]:
    """The agents that this names; a reason for what names none that can be asked. Raises OperatorError."""
    if where.startswith(PROMETHEUS):
        return dict.fromkeys(await _of_prometheus(where.removeprefix(PROMETHEUS)), "")
    entry = read_entry(where.replace("http://", "tcp://", 1), "fleet")
    entries: Sequence[str | ServiceName] = _read(entry) if isinstance(entry, Path) else [entry]
    found: dict[PagePlace, str] = {}
    for each in entries:
        if isinstance(each, str):
            found[_place(each)] = ""
            continue
        addresses, why = await _looked_up(Names(), each.host)
        found |= {PagePlace(address, int(each.port)): "" for address in addresses}
        if not addresses:
            found[PagePlace(each.host, int(each.port))] = f"no address of this name: {why}"
    return found


def _read(file: Path) -> list[str | ServiceName]:
    try:
        return read_list(file.read_text().replace("http://", "tcp://"), "fleet")
    except (OSError, ValueError) as error:
        raise OperatorError("bad_option", f"fleet: {file}: {error}") from None


def _place(address: str) -> PagePlace:
    split = urlsplit(address)
    assert split.hostname is not None and split.port is not None, address
    return PagePlace(split.hostname, split.port)


async def _of_prometheus(url: str) -> list[PagePlace]:
    """The targets that serve an agent's metrics, and those of their jobs that are down. Raises OperatorError."""
    try:
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise OperatorError("bad_option", f"fleet: got {PROMETHEUS}{url!r}, need {PROMETHEUS}http://HOST:PORT")
        at = partial(PagePlace, split.hostname, split.port or 80)
        api = f"{split.path.rstrip('/')}/api/v1"
        async with asyncio.timeout(PROMETHEUS_S):
            known, targets = [
                json.loads(await _get(at(f"{api}/{what}"), at().host))["data"]
                for what in (f"query?query={quote(AGENTS)}", "targets?state=active")
            ]
        agents = {(each["metric"].get("job"), each["metric"].get("instance")) for each in known["result"]}
        jobs = {job for job, _ in agents}
        labels = [
            (each["labels"].get("job"), each["labels"].get("instance"), each) for each in targets["activeTargets"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, asyncio.IncompleteReadError) as error:
        raise OperatorError("no_prometheus", f"fleet: {url}: {error or type(error).__name__}") from None
    chosen = [
        each["scrapeUrl"]
        for job, instance, each in labels
        if (job, instance) in agents or (job in jobs and each["health"] != "up")
    ]
    return [_place(scraped)._replace(path=_beside(urlsplit(scraped).path)) for scraped in chosen]


def _beside(metrics: str) -> str:
    return metrics.rpartition("/")[0] + "/status"


async def _page(place: PagePlace, names: Names) -> Answer:
    """Its page, or why there is none, within PAGE_ANSWER_S."""
    try:
        async with asyncio.timeout(PAGE_ANSWER_S):
            addresses, why = await _looked_up(names, place.host)
            if not addresses:
                return f"no address of this name: {why}"
            return msgspec.json.decode(await _get(place, addresses[0]), type=StatusPage)
    except TimeoutError:
        return f"does not answer within {PAGE_ANSWER_S:g} s"
    except (msgspec.MsgspecError, RecursionError) as error:
        return f"what answers is no agent, or one of another version: {error}"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"


async def _looked_up(names: Names, host: str) -> tuple[Sequence[str], str]:
    if ":" in host or host.replace(".", "").isdigit():
        return [host], ""
    found: asyncio.Future[tuple[Sequence[str], str]] = asyncio.get_running_loop().create_future()

    def tell(addresses: Sequence[str], why: str) -> None:
        if not found.done():
            found.set_result((addresses, why))

    names.look_up(host, tell)
    return await found


async def _get(place: PagePlace, address: str) -> bytes:
    """A page. Raises OSError, or ValueError if it is none or too long."""
    reader, writer = await asyncio.open_connection(address, place.port, limit=MOST_BYTES)
    with contextlib.closing(writer):
        writer.write(f"GET {place.path} HTTP/1.0\r\nHost: {place}\r\n\r\n".encode())
        answer = bytearray()
        while part := await reader.read(MOST_BYTES):
            answer += part
            if len(answer) > MOST_BYTES:
                raise ValueError(f"its page is longer than {MOST_BYTES} bytes")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0].split()
    if len(status) < 2 or status[1] != b"200":
        number = status[1].decode(errors="replace") if len(status) > 1 else "no HTTP"
        why = "it has no /status: is it an agent, and is status_page on?" if number == "404" else body[:200].decode()
        raise ValueError(f"answers {number}: {why.strip()}")
    return body


# Judge:


def _names(answers: Mapping[PagePlace, Answer]) -> dict[str, str]:
    """By address. Agents that have the same name are told apart by their addresses."""
    pages = [answer for answer in answers.values() if isinstance(answer, StatusPage)]
    names = [page.name for page in pages]
    return {
        page.address: page.name if names.count(page.name) == 1 else f"{page.name} ({page.address})" for page in pages
    }


def _refused(answers: Mapping[PagePlace, Answer], names: Mapping[str, str]) -> Iterator[PairRefused]:
    for page in (each for each in answers.values() if isinstance(each, StatusPage)):
        for each in page.refusals:
            sender = names.get(each.address, each.address)
            is_meant = each.to_meet or each.address in names or each.code not in NOBODY
            yield PairRefused(names[page.address], sender, each.code, each.reason, each.age_s, is_meant)


def _routes(answers: Mapping[PagePlace, Answer], names: Mapping[str, str]) -> Iterator[MeasuredRoute]:
    """Open sessions whose rate was measured, as their receivers see them."""
    for page in (each for each in answers.values() if isinstance(each, StatusPage)):
        for peer in page.peers:
            if peer.bytes_per_s is not None and peer.role == "sender" and peer.state == "open":
                sender = names.get(peer.address, peer.name or peer.address)
                yield MeasuredRoute(names[page.address], sender, peer.route, peer.bytes_per_s)


# Show:


def _plain_json(
    verdict: str,
    answers: Mapping[PagePlace, Answer],
    refused: Sequence[PairRefused],
    in_vain: Sequence[PairRefused],
    routes: Sequence[MeasuredRoute],
) -> dict[str, Any]:
    agents = [
        {"at": str(place)} | ({"error": each} if isinstance(each, str) else json.loads(msgspec.json.encode(each)))
        for place, each in answers.items()
    ]
    return {
        "schema": PAGE_SCHEMA,
        "verdict": verdict,
        "agents": agents,
        "refused": [each._asdict() for each in refused],
        "in_vain": [each._asdict() for each in in_vain],
        "slowest": [each._asdict() for each in routes],
    }


def _sections(
    answers: Mapping[PagePlace, Answer],
    refused: Sequence[PairRefused],
    in_vain: Sequence[PairRefused],
    routes: Sequence[MeasuredRoute],
) -> Iterator[RenderableType]:
    agents = _table()
    for line in sorted((_line(*each) for each in answers.items()), key=lambda line: (line[1] == "healthy", line[0])):
        add(agents, *line)
    yield agents
    for title, pairs in (("no session", refused), ("named by requests, and nobody is there", in_vain)):
        if pairs:
            table = _table()
            for each in pairs:
                ago = f"{each.age_s:.0f} s ago"
                add(table, f"{each.receiver} from {each.sender}", ago, f"{each.code}: {each.reason}")
            yield from (Text(title, style="bold"), table)
    if routes:
        slow = _table()
        for route in routes:
            add(slow, f"{route.receiver} from {route.sender}", route.route, f"{route.bytes_per_s / 1e9:.3g} GB/s")
        yield from (Text("slowest routes", style="bold"), slow)


def _line(place: PagePlace, answer: Answer) -> tuple[str, ...]:
    if isinstance(answer, str):
        return str(place), f"NOT HEALTHY: {answer}", "", "", ""
    engine = f"{' '.join(answer.engine.engine.split()[:2])} {answer.engine.shard}" if answer.engine else ""
    health = f"NOT HEALTHY: {'; '.join(answer.problems)}" if answer.problems else "healthy"
    return answer.name, health, engine, _sessions(answer.peers), _fetched(answer)


def _sessions(peers: Sequence[PagePeer]) -> str:
    routes = [each.route for each in peers if each.state == "open"]
    counts = ", ".join(f"{routes.count(route)} by {route}" for route in dict.fromkeys(routes))
    return counts or "no session"


def _fetched(page: StatusPage) -> str:
    both = page.fetched_tokens + page.computed_tokens
    return f"{page.fetched_tokens / both:.1%} of prompts fetched" if both else ""


def _table() -> Table:
    return Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
