"""The pure parts of the serving bench's client: arrival times, reading a stream, percentiles."""

from __future__ import annotations

import itertools
import json

import pytest

from bench.serving_load import Answer, Load, asks, figures, histogram, one_by_one
from bench.timing import quantile

LOAD = Load()


def test_prompts_come_at_the_rate_and_the_same_for_the_same_seed() -> None:
    found = asks(LOAD, 50.0, 20.0, seed=3)
    assert found == asks(LOAD, 50.0, 20.0, seed=3) != asks(LOAD, 50.0, 20.0, seed=4)
    assert len(found) == 1000
    times = [each.at_s for each in found]
    assert times == sorted(times) and times[0] >= 0.0 and times[-1] < 20.0
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert 0.55 < sum(gap < 1 / 50 for gap in gaps) / len(gaps) < 0.71  # 1 - 1/e of them, were there no end of them


def test_a_higher_rate_asks_the_same_prompts_and_more() -> None:
    low, high = asks(LOAD, 2.0, 8.0, seed=3), asks(LOAD, 4.0, 8.0, seed=3)
    assert [each.prompt for each in low] == [each.prompt for each in high[:16]]
    assert len(high) == 32


def test_prompts_are_as_long_as_they_say_and_begin_differently() -> None:
    found = one_by_one(LOAD, 200, seed=5)
    assert all(
        LOAD.shortest <= each.tokens <= LOAD.longest and len(each.prompt.split()) == each.tokens for each in found
    )
    assert sum(each.tokens < 512 for each in found) > 60 < sum(each.tokens > 512 for each in found)
    assert len({tuple(each.prompt.split()[:4]) for each in found}) == 200


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.01, 1), (0.0, 1)])
def test_a_percentile_is_a_value_that_was_there(share: float, value: int) -> None:
    assert quantile(list(range(100, 0, -1)), share) == value
    assert quantile([7.0], share) == 7.0


def event(text: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text}]}).encode()


def test_every_token_has_the_time_of_its_event() -> None:
    answer = Answer(due_s=1.0)
    for said, now in (("17", 1.5), ("", 1.6), (" 4 5", 1.75), (" 6", 2.0)):
        answer.take(event(said), now)
    answer.take(b'{"choices": [], "usage": {"completion_tokens": 4}}', 9.0)
    assert (answer.text, answer.ttft_s) == ("17 4 5 6", 0.5)
    assert answer.gaps_s == [0.25, 0.0, 0.25]
    told = figures([answer, Answer(0.0, [1.0, 4.0])])
    assert (told["requests"], told["answered_per_s"]) == (2, 0.5)  # from 0 s to 4 s
    assert (told["ttft_p50_ms"], told["ttft_p99_ms"], told["tbt_p99_ms"]) == (500, 1000, 3000)


def test_an_error_in_the_stream_is_one() -> None:
    with pytest.raises(ValueError, match="no room"):
        Answer(0.0).take(b'{"error": {"message": "no room"}}', 1.0)


def test_a_histogram_is_read_by_its_label() -> None:
    page = """# TYPE wait histogram
wait_bucket{role="a",le="1.0"} 3.0
wait_sum{role="a"} 1.5
wait_count{role="a"} 3.0
wait_sum{role="b"} 4.0
wait_count{role="b"} 1.0
wait_created{role="b"} 1e9
waiting_sum 9.0
"""
    assert histogram(page, "wait", 'role="b"') == (4.0, 1.0)
    assert histogram(page, "wait", "") == (5.5, 4.0)
    assert histogram(page, "wait", 'role="c"') is None is histogram(page, "want", "")
