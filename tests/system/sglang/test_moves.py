"""Running answers of real SGLang servers that move from a decode server that drains, or dies, to another.

Each client's stream, through `kvbridge proxy`, must be what a server alone gives, token for token.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from demo.model import write_model, write_tokenizer
from demo.processes import free_port
from testing.agents import PYTHON
from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.system.engines.moving import ANSWER, Stream
from tests.system.routers.fleet import CHAT, NAME
from tests.system.sglang.fleet import Answer, Fleet, assert_idle, assert_same_tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
STREAMS = 12  # half of them chats
BEFORE = 60  # tokens of each answer that are there before its server drains
MOST_S = 300.0


class Served(Fleet):
    """Prefill, two decode servers with other pages, one alone, and the proxy."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        (folder / "chat.jinja").write_text(CHAT)
        flags = ("--served-model-name", NAME, "--chat-template", str(folder / "chat.jinja"))
        super().__init__(folder, stack, _write, {"has_tokenizer": True, "flags": flags})
        self.start("p16", "d16")
        self.start("d64", "alone")
        self.control, port = folder / "proxy.ctl", free_port()
        command = [
            PYTHON,
            "-m",
            "kvbridge.cli",
            "proxy",
            "--listen",
            f"127.0.0.1:{port}",
            "--control",
            str(self.control),
        ]
        command += ["--prefill", f"{self.named('p16')},bootstrap={self['p16'].bootstrap_port}"]
        command += [option for name in ("d16", "d64") for option in ("--decode", self.named(name))]
        self.front = HttpServer(command, port, folder / "proxy.log")
        stack.callback(self.front.kill)
        self.front.wait_up()

    def named(self, name: str) -> str:
        return f"sglang={self[name].url}"

    def drain(self, name: str, *more: str) -> list[str]:
        """What `kvbridge drain` says, once it has ended well."""
        command = [PYTHON, "-m", "kvbridge.cli", "drain", self.named(name), "--control", str(self.control), *more]
        told = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
        assert told.returncode == 0, (told.stdout, told.stderr)
        return told.stdout.splitlines()

    @contextmanager
    def streams(self, numbers: Sequence[int]) -> Iterator[list[Stream]]:
        """Clients whose answers have begun, at one server and the other in turn.

        At the end of the block each waits for the rest of its own.
        """
        found, runs = [Stream(number) for number in numbers], list[Future[None]]()
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

    def moved(self, name: str, outcome: str) -> bool:
        told = self.front.ask("/metrics")[1]
        return f'kvbridge_proxy_moves_total{{engine="{self.named(name)}",outcome="{outcome}"}}' in told


def _write(folder: Path) -> Path:
    write_tokenizer(write_model(folder, eos_token_id=None))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("moves"), stack)


def test_running_answers_move_token_for_token(served: Served) -> None:
    """Of a server that drains: completions, computed again from their tokens. Chats end where they are."""
    with served.streams([4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(STREAMS)]) as streams:
        said = served.drain("d16")
    assert any(f"{STREAMS // 4} /v1/chat/completions" in line for line in said), said
    assert f"decode: 0 under way, {STREAMS // 4} moved" in said and "can be stopped" in said[-1], said
    for each in streams:
        assert not each.error
        served.assert_as_alone(each)
    assert_idle(served, "p16", "d16", "d64")


def test_answers_of_a_server_that_is_killed_go_on_at_another(served: Served) -> None:
    served.drain("d16", "--undo")
    with served.streams(range(STREAMS, 3 * STREAMS, 2)) as streams:  # completions
        served["d64"].kill()
    for each in streams:
        assert not each.error
        served.assert_as_alone(each)
    assert served.moved("d64", "resumed")
    assert_idle(served, "p16", "d16")
