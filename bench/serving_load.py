"""The client of the serving bench: prompts and their arrival times, streamed answers, and figures of their times.

Pure, except `drive`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from bench.timing import quantile
from kvbridge.errors import KVBridgeError
from kvbridge.proxy.events import DONE, ERROR_EVENT, Events

WORDS = 1023  # words of the model's tokenizer that prompts are made of: the numbers from 1 on


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of the shortest and the longest prompt, and of each answer."""

    shortest: int = 128
    longest: int = 2048
    answer: int = 32


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of `tokens` words, to be sent `at_s` after the start, for an answer of `answer` tokens."""

    at_s: float
    tokens: int
    prompt: str
    answer: int


@dataclass(slots=True)
class Answer:
    """When the prompt was due and when each token came, on the client's clock. `error` is "" if all is well."""

    due_s: float
    tokens_s: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between tokens. If several tokens come in one event, only the first has waited."""
        return [after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    def take(self, event: bytes, now: float) -> None:
        """Take one event of the stream. ValueError if it is an error."""
        if ERROR_EVENT.match(event):
            raise ValueError(event.decode(errors="replace"))
        for choice in json.loads(event)["choices"]:
            text = choice.get("text") or ""
            self.text += text
            self.tokens_s += [now] * len(text.split())


def asks(load: Load, rate: float, seconds: float, seed: int) -> list[Ask]:
    """`rate` times `seconds` Poisson arrivals. A seed gives the same prompts at any rate."""
    prompts, times = one_by_one(load, max(1, round(rate * seconds)), seed), random.Random(seed + 1)
    moments = sorted(times.uniform(0.0, seconds) for _ in prompts)
    return [replace(each, at_s=at_s) for each, at_s in zip(prompts, moments, strict=True)]


def one_by_one(load: Load, count: int, seed: int) -> list[Ask]:
    """Prompts without arrival times."""
    chance = random.Random(seed)
    return [Ask(0.0, *prompt(load, chance), load.answer) for _ in range(count)]


def prompt(load: Load, chance: random.Random) -> tuple[int, str]:
    """The length and text of a prompt. Lengths are uniform in their logarithm."""
    tokens = round(math.exp(chance.uniform(math.log(load.shortest), math.log(load.longest))))
    return tokens, " ".join(str(chance.randint(1, WORDS)) for _ in range(tokens))


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Times in milliseconds, and requests per second from the first arrival to the last token."""
    ends = max(each.tokens_s[-1] for each in answers) - min(each.due_s for each in answers)
    gaps = [gap for each in answers for gap in each.gaps_s]
    whole = [each.tokens_s[-1] - each.due_s for each in answers]
    found = {"requests": len(answers), "answered_per_s": round(len(answers) / ends, 3)}
    for name, values in (("ttft", [each.ttft_s for each in answers]), ("tbt", gaps), ("whole", whole)):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = round(quantile(values, share / 100) * 1e3, 2)
    found["ttft_mean_ms"] = round(statistics.fmean(each.ttft_s for each in answers) * 1e3, 2)
    return found


def histogram(page: str, series: str, label: str) -> tuple[float, float] | None:
    """The sum and the count of a histogram that a page of metrics has, or of those with `label`."""
    lines = [line for line in page.splitlines() if line.startswith(f"{series}_") and label in line]
    told = [
        [float(line.split()[-1]) for line in lines if line.startswith(f"{series}_{what}")] for what in ("sum", "count")
    ]
    return (sum(told[0]), sum(told[1])) if all(told) else None


def digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


async def drive(
    urls: Sequence[str], model: str, asked: Sequence[Ask], patience_s: float, at_once: bool = True
) -> list[Answer]:
    """Send each prompt at its time, whatever became of those before. Unless `at_once`, wait for each answer.

    The servers at `urls` take turns.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=patience_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        if not at_once:
            turns = zip(asked, itertools.cycle(urls), strict=False)
            return [await _asked(http, url, model, each, time.perf_counter()) for each, url in turns]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            started = []
            for each, url in zip(asked, itertools.cycle(urls), strict=False):
                await asyncio.sleep(max(0.0, began + each.at_s - time.perf_counter()))
                started.append(tasks.create_task(_asked(http, url, model, each, began + each.at_s)))
        return [task.result() for task in started]


async def _asked(http: aiohttp.ClientSession, url: str, model: str, ask: Ask, due_s: float) -> Answer:
    """Does not raise: errors of the server are in the answer."""
    answer = Answer(due_s)
    body: dict[str, Any] = {"model": model, "prompt": ask.prompt, "max_tokens": ask.answer, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "skip_special_tokens": False}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {await reply.text()}")
            is_done, cutter = False, Events()
            async for chunk in reply.content.iter_any():
                now = time.perf_counter()
                for event in (each.data for each in cutter.take(chunk)):
                    if event == DONE:
                        is_done = True
                    else:
                        answer.take(event, now)
        if not is_done or len(answer.tokens_s) != ask.answer:
            raise ValueError(f"{len(answer.tokens_s)} tokens of {ask.answer}, done: {is_done}")
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, KVBridgeError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:500]
    return answer
