"""A hundred answers move between two vLLM engines under load, through `kvbridge proxy`, on CPUs, token for token.

A prefill engine, two decode engines with other blocks and `kvbridge_return_s`, an agent beside each, and the proxy
(tests/system/engines/moving.py). `--at-once` clients stream one answer after the other; `kvbridge drain` empties one
decode engine, takes it back, empties the other, and so on until so many streams have moved. Each must have the tokens
and the text that the prefill engine computes by itself, of a salted prompt, so that neither finds the other's KV.

Engines compute in fp32, whose rounding depends on the batch. Prompts are left out for which an engine alone has at any
token a second one less than `TIE` behind: there rounding could choose.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scenario import Bench, Problem
from bench.timing import quantile
from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.system.engines.moving import ANSWER, MOST_S, Served, Stream, fetched
from tests.system.routers.fleet import NAME

TIE = 1e-3  # between log probabilities; rounding in fp32 moves them by about 1e-5
DECODING = ("d0", "d1")
SOURCES = ("local_cache_hit", "external_kv_transfer", "local_compute")  # of prompts' tokens, as vLLM names them
ASKED = {"skip_special_tokens": False}  # so that each token is a word


@dataclass(frozen=True)
class Alone:
    """What one engine answers by itself. `gap`: of the log probabilities of the first and second token, the least."""

    tokens: list[int]
    text: str
    gap: float


def measure(bench: Bench, *, streams: int = 160, at_once: int = 32, moves: int = 100) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # and the servers with it
    with tempfile.TemporaryDirectory(prefix="kvbridge-moves-") as folder, ExitStack() as stack:
        served = Served(Path(folder), stack)
        bench.say("engines serve")
        chosen = picked(served.engines["prefill"], streams, at_once)
        clients, alone = [client for client, _ in chosen], [each for _, each in chosen]
        bench.say(f"{len(chosen)} prompts, the closest second token {min(each.gap for each in alone):.4f} behind")
        before = tokens(served)
        drains_s = load(served, clients, at_once, moves)
        carried = {name: after - before[name] for name, after in tokens(served).items()}
        outcomes = {outcome: int(served.proxy.moves(outcome)) for outcome in ("moved", "returned", "resumed")}
    wrong = [why for client, each in chosen if (why := difference(client, each))]
    found_gaps, counted = gaps(clients), of_moves(carried, clients)
    for line in (*found_gaps, counted):
        bench.show(line)
    lines = goals(outcomes["moved"], moves, len(wrong), streams)
    for line in lines:
        if not line["met"]:
            bench.problem(line["goal"], f"{line['measured']}; {wrong[:3]}")
    return {
        **{"goals": lines, "streams": streams, "at_once": at_once, "answer_tokens": ANSWER},
        **{"outcomes": outcomes, "streams_moved": sum(client.moved_at > 0 for client in clients)},
        **{"drains": len(drains_s), "drain_p50_s": round(quantile(drains_s, 0.5), 2)},
        **{"drain_most_s": round(max(drains_s), 2), "gaps": found_gaps, "tokens_of_moves": counted},
    }


def picked(server: HttpServer, count: int, at_once: int) -> list[tuple[Stream, Alone]]:
    """Clients, and what they must get."""
    found: list[tuple[Stream, Alone]] = []
    with ThreadPoolExecutor(at_once) as threads:
        for first in itertools.count(0, at_once):
            if first > 3 * count + at_once:
                raise Problem(f"{len(found)} of {first} prompts without a tie")
            clients = [Stream(number, **ASKED, **_ids(number)) for number in range(first, first + at_once)]
            answers = threads.map(lambda client: alone(server, client.tokens), clients)
            found += [(client, each) for client, each in zip(clients, answers, strict=True) if each.gap >= TIE]
            if len(found) >= count:
                return found[:count]
    raise AssertionError


def _ids(number: int) -> dict[str, Any]:
    """Every other completion asks for token ids; the others are compared by their text."""
    return {} if number % 4 else {"return_token_ids": True}


def alone(server: HttpServer, prompt: list[int]) -> Alone:
    body = {"model": NAME, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "logprobs": 2, **ASKED}
    body |= {"return_token_ids": True, "cache_salt": "alone"}
    answer = json.loads(server.answer("/v1/completions", body, MOST_S))
    (choice,) = answer["choices"]
    ordered = [sorted(each.values()) for each in choice["logprobs"]["top_logprobs"]]
    return Alone(choice["token_ids"], choice["text"], min(each[-1] - each[-2] for each in ordered))


def load(served: Served, clients: Sequence[Stream], at_once: int, moves: int) -> list[float]:
    """Run the clients, and drain engines meanwhile. The seconds of each drain."""
    found: list[float] = []
    with ThreadPoolExecutor(at_once) as threads:
        runs: list[Future[None]] = [threads.submit(client.run, served.proxy) for client in clients]
        for name in itertools.cycle(DECODING):
            wait_for(
                lambda name=name: outstanding(served, name) >= at_once // 4 or all(run.done() for run in runs), MOST_S
            )
            if all(run.done() for run in runs) or sum(client.moved_at > 0 for client in clients) >= moves:
                break
            began = time.monotonic()
            served.drain(name)
            found.append(time.monotonic() - began)
            served.drain(name, "--undo")
        for run in runs:
            run.result(MOST_S)
    return found


def outstanding(served: Served, name: str) -> float:
    told = served.proxy.ask("/metrics")[1]
    series = rf'^kvbridge_proxy_engine_outstanding\{{engine="vllm={served.engines[name].url}",role="decode"\}} (\S+)$'
    return sum(map(float, re.findall(series, told, re.MULTILINE)))


def tokens(served: Served) -> dict[str, float]:
    """Of prompts so far: those of the prefill engine by source, computed by decode engines, fetched by agents."""
    prefill = _sources(served.engines["prefill"])
    decode = [_sources(served.engines[name]) for name in DECODING]
    return {
        **{f"prefill {source}": prefill[source] for source in SOURCES},
        "decode local_compute": sum(each["local_compute"] for each in decode),
        "prefill fetched": fetched(served.agents["prefill"]),
        "decode fetched": sum(fetched(served.agents[name]) for name in DECODING),
    }


def _sources(server: HttpServer) -> dict[str, float]:
    told = server.ask("/metrics")[1]
    series = r'^vllm:prompt_tokens_by_source_total\{{.*source="{}".*\}} (\S+)$'
    return {each: sum(map(float, re.findall(series.format(each), told, re.MULTILINE))) for each in SOURCES}


def difference(client: Stream, each: Alone) -> str:
    """What a client got other than an engine alone gives; "" if nothing."""
    if client.error:
        return f"{client.path}: {client.error} after {len(client.seconds)} tokens"
    got, expected = client.text.split(), each.text.split()
    if "return_token_ids" in client.body and client.token_ids != each.tokens:
        return f"{client.path}: token ids {client.token_ids} are {each.tokens} alone"
    if client.text == each.text and len(got) == len(each.tokens):
        return ""
    first = next((place for place, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), -1)
    return f"{client.path}: {len(got)} tokens of {len(expected)}, the first that differs {first}: {got[first:][:3]}"


def gaps(clients: Sequence[Stream]) -> list[dict[str, Any]]:
    """Milliseconds between events: over a stream's first move, and before it or where a stream never moved."""
    over, without = list[float](), list[float]()
    for client in clients:
        between = [after - before for before, after in itertools.pairwise(client.seconds)]
        without += between[: client.moved_at - 1] if client.moved_at else between
        over += between[client.moved_at - 1 : client.moved_at] if client.moved_at else []
    return [
        {
            "gap": name,
            "n": len(each),
            **{f"p{share}_ms": round(1e3 * quantile(each, share / 100), 1) for share in (50, 99)},
            "most_ms": round(1e3 * max(each), 1),
        }
        for name, each in (("over a move", over), ("without", without))
    ]


def of_moves(counted: dict[str, float], clients: Sequence[Stream]) -> dict[str, Any]:
    """Tokens of prompts and answers that moved, without those of the first prefills, which nobody had before."""
    prompts = sum(len(client.tokens) for client in clients)
    return {
        "in_prefill_s_cache": int(counted["prefill local_cache_hit"]),
        "fetched_from_decode": int(counted["prefill external_kv_transfer"]),
        "computed_again": int(counted["prefill local_compute"]) - prompts,
        "fetched_by_decode": round(counted["decode fetched"]) - (prompts - len(clients)),
        "computed_by_decode": int(counted["decode local_compute"]) - len(clients),
    }


def goals(moved: int, least: int, wrong: int, streams: int) -> list[dict[str, Any]]:
    """Lines of goals (goals.py). One that is missed is a problem."""
    return [
        {"goal": "answers moved", "measured": str(moved), "against": f"{least} at least", "met": moved >= least},
        {
            "goal": "streams other than of one engine alone",
            "measured": f"{wrong} of {streams}",
            "against": "0",
            "met": not wrong,
        },
    ]
