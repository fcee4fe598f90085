"""Two agents on two hosts, with NIXL over TCP: what a long, lossy or broken path costs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from testing.agents import is_at_rest
from testing.hosts import why_not
from testing.proc import Stopwatch
from testing.waiting import wait_for
from tests.system.faults.two_hosts import HostPair, host_pair

TRIES = 3
LOST_S = 1.0  # as Stopwatch counts them: after a busier try, a first want may need another
NEXT_TRY_S = 12.0  # TCP tries again after pauses that double; this one is its seventh or eighth
SOON_S = NEXT_TRY_S - 2.0  # 3 s at most where nothing else runs
RETRANSMITS = 1  # in /proc/net/tcp, a timer that is on
QUIET_S = 45.0  # writes of before end when their old connection tries again, or is given up


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[HostPair]:
    if reason := why_not():
        pytest.skip(reason)
    with host_pair(tmp_path, deadline_s=15.0) as made:
        yield made


def test_a_first_want_finds_staging_made(pair: HostPair) -> None:
    for agent, status in zip(pair.agents, pair.at_start, strict=True):
        assert (status.receive_slots.free, status.send_slots.free) == (32, 16), "an agent served before it had slots"
        assert agent.log.read_text().index("made slots") < agent.log.read_text().index("serving")
    assert pair.request()["code"] == ""
    for agent in pair.agents:
        assert agent.log.read_text().count("made slots") == 1, "a first want waits for no others"


@pytest.mark.parametrize(("round_trip_s", "loss"), [(0.16, 0.0), (0.05, 0.05)])
def test_a_long_or_lossy_path_gets_a_route(pair: HostPair, round_trip_s: float, loss: float) -> None:
    pair.path.becomes(round_trip_s=round_trip_s, loss=loss)
    for _ in range(TRIES):
        watch = Stopwatch()
        ended = pair.request()
        if not ended["code"] or not (loss or watch.lost_s() > LOST_S):  # what is lost is up to chance
            break
    assert ended["code"] == "", f"{ended}\n{pair.agents[0].tail()}"
    (peer,) = pair.agents[1].serving().peers
    assert peer.bytes_per_s is not None and peer.bytes_per_s < 1e7, "the best write that finished counts"


@pytest.mark.parametrize("is_seen", [False, True], ids=["packets dropped", "no carrier"])
def test_after_an_outage_nothing_waits_for_old_connections(is_seen: bool, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with host_pair(tmp_path, deadline_s=2.0, prompts=24) as pair:

        def is_far() -> bool:
            pair.keep_on(0.5)
            return next_try_s(pair.agents[0].pid) > NEXT_TRY_S

        pair.seconds_to_success(60.0)
        pair.path.becomes(round_trip_s=0.05)
        pair.keep_on(2.0, every_s=0.1)  # so that some writes are under way
        (pair.path.down if is_seen else pair.path.cut)()
        wait_for(is_far)
        assert "code=peer_lost" in pair.agents[1].log.read_text(), "the link waits for its silence_s, 15 s"
        (pair.path.up if is_seen else pair.path.heal)()
        assert pair.seconds_to_success(60.0) < SOON_S
        wait_for(lambda: all(is_at_rest(agent.serving()) for agent in pair.agents), QUIET_S)
        pair.audit()


@pytest.mark.proves("G6")
def test_after_an_outage_nothing_waits_for_slots_that_old_connections_read(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with host_pair(tmp_path, {"send_slots": "2"}, deadline_s=60.0, prompts=24) as pair:
        sender = pair.agents[0]
        pair.seconds_to_success(60.0)
        wait_for(lambda: is_at_rest(sender.serving()))
        numbers = [pair.want() for _ in range(2)]
        wait_for(lambda: len(sender.serving().transfers) == 2)  # claimed: all that is left to do is to write
        pair.path.cut()
        for number in numbers:
            pair.offer(number)
        wait_for(lambda: next_try_s(sender.pid) > NEXT_TRY_S)
        pair.path.heal()
        assert pair.seconds_to_success(60.0) < SOON_S
        assert sender.serving().counters["kvbridge_rebuilds_total{replaced=send_slots}"] >= 1


@pytest.mark.proves("G6")
@pytest.mark.parametrize(
    ("options", "is_one_machine"),
    [({"routes": "nixl"}, False), ({"no_share_memory": True}, True)],
    ids=["on another machine, without pull", "on this machine, without share_memory"],
)
def test_slots_of_a_pod_that_was_replaced_are_free_again(
    options: Mapping[str, str | bool], is_one_machine: bool, tmp_path: Path
) -> None:
    """Nobody knows that it is dead. It could reach them by the receiver's fabric only, and that is replaced.

    Agents say where they are whether or not their engines' memory may be read there.
    """
    if reason := why_not():
        pytest.skip(reason)
    options = {"rebuild_s": "0.3", **options}
    with host_pair(tmp_path, options, is_one_machine, deadline_s=60.0, prompts=24) as pair:
        pair.seconds_to_success(60.0)
        receiver = pair.agents[1]
        wait_for(lambda: is_at_rest(receiver.serving()))
        pair.want()
        wait_for(lambda: receiver.serving().receive_slots.lent)
        pair.replace_sender()
        wait_for(lambda: receiver.serving().receive_slots.free == 32, why=receiver.tail)
        counters = receiver.serving().counters
        replaced = [counters[f"kvbridge_rebuilds_total{{replaced={what}}}"] for what in ("slots", "fabric")]
        assert replaced == [0, 1], "the same slots are free again"
        pair.seconds_to_success(60.0)
        pair.audit()


def next_try_s(pid: int) -> float:
    """When TCP will try again to send what most is left of in this process's network."""
    waiting = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        timer, ticks = (int(part, 16) for part in fields[5].split(":"))
        if timer == RETRANSMITS:
            waiting.append((int(fields[4].split(":")[0], 16), ticks / os.sysconf("SC_CLK_TCK")))
    return max(waiting, default=(0, 0.0))[1]
