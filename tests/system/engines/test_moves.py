"""Running answers of real engines that move from a decode engine that drains to another, through `kvbridge proxy`.

Each client's stream must be what an engine alone gives, token for token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from testing.waiting import wait_for
from tests.system.engines.moving import MOST_S, Served, Stream, fetched

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
STREAMS = 16
BEFORE = 140  # tokens of each answer that are there before its engine drains


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("moves"), stack)


@pytest.mark.parametrize("agent_is", ["there", "killed"])
def test_running_answers_move_token_for_token(served: Served, agent_is: str) -> None:
    """By `kvbridge drain`; and off the list, and without its agent: its KV cannot be fetched, and is computed again."""
    served.wait_decoding(2)
    agents, moved = served.agents, served.proxy.moves("moved")
    streams = [Stream(number + STREAMS * (agent_is == "killed")) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        runs = [threads.submit(each.run, served.proxy) for each in streams]
        wait_for(lambda: all(each.sampled() >= BEFORE for each in streams) or any(run.done() for run in runs), MOST_S)
        assert not any(run.done() for run in runs), "too fast: nothing is left to move"
        if agent_is == "killed":
            agents["d0"].process.kill()
            agents["d0"].process.wait(MOST_S)
        back, to = fetched(agents["prefill"]), fetched(agents["d1"])
        if agent_is == "killed":
            served.list_decoding("d1")
            served.reload()
        else:
            said = served.drain("d0")
            assert f"decode: 0 under way, {STREAMS // 2} moved" in said and "can be stopped" in said[-1], said
        for run in runs:
            run.result(MOST_S)
    moved = served.proxy.moves("moved") - moved
    assert moved == STREAMS / 2 and not served.proxy.moves("returned")
    for each in streams:
        assert not each.error and each.text == each.alone(served.engines["prefill"])
        assert len(each.ids) == 1
    # To the engine that goes on, all but the last token; to prefill, whole multiples of what it does not have itself.
    assert fetched(agents["d1"]) - to >= moved * (100 + BEFORE)
    if agent_is == "there":
        served.drain("d0", "--undo")
    back = fetched(agents["prefill"]) - back
    assert back == 0 if agent_is == "killed" else back >= moved * PREFIX_TOKENS


def test_a_draining_engine_is_killed_as_its_answers_begin_to_move(served: Served) -> None:
    """Each client has its whole answer, or a right beginning and an error: wherever it was when the engine died."""
    served.list_decoding("d0", "d1")
    served.reload()
    served.wait_decoding(2)
    streams = [Stream(number + 2 * STREAMS) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        runs = [threads.submit(each.run, served.proxy) for each in streams]
        wait_for(lambda: all(each.sampled() >= BEFORE for each in streams) or any(run.done() for run in runs), MOST_S)
        served.list_decoding("d1")
        served.reload()
        wait_for(lambda: served.proxy.ask("/health")[1].count("vllm=") == 2, MOST_S)
        served.engines["d0"].kill()
        for run in runs:
            run.result(MOST_S)
    for each in streams:
        whole = each.alone(served.engines["prefill"])
        assert whole.startswith(each.text) if each.error else each.text == whole, (each.error, each.text, whole)
    assert sum(not each.error for each in streams) >= STREAMS / 2, "those of the other engine go on"
