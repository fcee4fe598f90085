"""Running answers of real SGLang servers that move from a decode server that drains, or dies, to another.

Each client's stream, through `kvbridge proxy`, must be what a server alone gives, token for token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from demo.model import write_model, write_tokenizer
from testing.waiting import wait_for
from tests.system.engines.moving import ANSWER, CHATS, COMPLETIONS, GENERATE, MovingProxy, Stream
from tests.system.routers.fleet import CHAT, NAME
from tests.system.sglang.fleet import CONFIGS, Answer, Fleet, assert_idle, assert_same_tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
PATHS = (COMPLETIONS, CHATS, GENERATE)
STREAMS = 12
BEFORE = 60  # tokens of each answer that are there before its server drains
MOST_S = 300.0


class Served(Fleet):
    """Prefill, two decode servers with other pages, one alone, and the proxy.

    One of the two says all of an answer in each event of /generate, the other what is new.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        (folder / "chat.jinja").write_text(CHAT)
        flags = ("--served-model-name", NAME, "--chat-template", str(folder / "chat.jinja"))
        named = {name: replace(CONFIGS[name], flags=flags, has_tokenizer=True) for name in ("p16", "d16", "alone")}
        named["d64"] = replace(CONFIGS["d64"], flags=(*flags, "--incremental-streaming-output"), has_tokenizer=True)
        super().__init__(folder, stack, _write, others=named)
        self.start("p16", "d16")
        self.start("d64", "alone")
        engines = ["--prefill", f"{self.named('p16')},bootstrap={self['p16'].bootstrap_port}"]
        engines += [option for name in ("d16", "d64") for option in ("--decode", self.named(name))]
        self.front = MovingProxy(folder, *engines)
        stack.callback(self.front.kill)
        self.front.wait_up()

    def named(self, name: str) -> str:
        return f"sglang={self[name].url}"

    def drain(self, name: str, *more: str) -> list[str]:
        return self.front.drain(self.named(name), *more)

    @contextmanager
    def streams(self, numbers: Sequence[int]) -> Iterator[list[Stream]]:
        """Clients whose answers have begun, at one server and the other in turn, of each path in turn.

        At the end of the block each waits for the rest of its own.
        """
        found, runs = [Stream(number, PATHS[at // 2 % 3]) for at, number in enumerate(numbers)], list[Future[None]]()
        with ThreadPoolExecutor(len(found)) as threads:
            for each in found:
                runs.append(threads.submit(each.run, self.front))
                wait_for(lambda each=each: each.sampled() > 0 or runs[-1].done(), MOST_S)
            wait_for(lambda: all(each.sampled() >= BEFORE for each in found) or any(run.done() for run in runs), MOST_S)
            assert not any(run.done() for run in runs), "too fast: nothing is left to move"
            yield found
            for run in runs:
                run.result(MOST_S)

    def assert_as_alone(self, stream: Stream) -> None:
        alone, found = self.alone(stream.tokens, ANSWER), tuple(map(int, stream.text.split()))
        shown = [i for i, token in enumerate(alone.tokens) if token]  # 0 is a special token, and has no text
        expected = Answer(tuple(alone.tokens[i] for i in shown), tuple(alone.gaps[i] for i in shown), 0, None)
        assert len(stream.ids) == 1
        assert_same_tokens(expected, Answer(found, (), 0, None))


def _write(folder: Path) -> Path:
    write_tokenizer(write_model(folder, eos_token_id=None))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("moves"), stack)


def test_running_answers_move_token_for_token(served: Served) -> None:
    """Of a server that drains: computed again from their tokens."""
    with served.streams(range(STREAMS)) as streams:
        said = served.drain("d16")
    assert f"decode: 0 under way, {STREAMS // 2} moved" in said and "can be stopped" in said[-1], said
    for each in streams:
        assert not each.error
        served.assert_as_alone(each)
    assert_idle(served, "p16", "d16", "d64")


def test_answers_of_a_server_that_is_killed_go_on_at_another(served: Served) -> None:
    served.drain("d16", "--undo")
    with served.streams(range(STREAMS, 2 * STREAMS)) as streams:
        served["d64"].kill()
    for each in streams:
        assert not each.error
        served.assert_as_alone(each)
    assert served.front.moves("resumed") == STREAMS // 2
    assert_idle(served, "p16", "d16")
