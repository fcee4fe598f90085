"""Real SGLang servers that change their roles while they run: answers are those of one server alone all the while."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from demo.processes import free_port
from testing.agents import PYTHON
from testing.http_server import HttpServer
from testing.kept import kept
from testing.proc import descendants, descriptors
from testing.waiting import wait_for
from tests.system.engines.moving import MovingProxy
from tests.system.sglang.fleet import Fleet, answer_of, prompt, seed_of
from tests.system.sglang.server import ServerConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
CHANGES = 6
SWITCHES = ("--enable-pd-role-switch",)
CACHES = "--disaggregation-decode-enable-radix-cache"
ENVIRONMENT = {"KVBRIDGE_ENGINE_RETURN_S": "600", "KVBRIDGE_ENGINE_CONNECT_S": "5"}
KEEPS = ServerConfig("prefill", flags=(*SWITCHES, CACHES), environment=ENVIRONMENT)
PLAIN = replace(KEEPS, keeps_prefixes=False, flags=SWITCHES)
OTHERS = {
    "s16": KEEPS,
    "s64": replace(KEEPS, role="decode", page_size=64, flags=SWITCHES),
    "s16-plain": PLAIN,
    "s16-default": replace(KEEPS, flags=SWITCHES),
    "s64-plain": replace(PLAIN, role="decode", page_size=64),
    "s16-keys": replace(KEEPS, flags=(*KEEPS.flags, "--api-key", "user", "--admin-api-key", "admin")),
    "s32-two": replace(PLAIN, page_size=32, tensor_parallel_size=2),
}
fleet = kept(Fleet, others=OTHERS, start=("s16", "s64"))


def change(fleet: Fleet, name: str, role: str) -> str:
    """What SGLang says to it."""
    asked = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
    said: str = json.loads(fleet[name].ask("/pd_role_switch", asked)[1])["message"]
    return said


def changed(fleet: Fleet, **roles: str) -> None:
    """As soon as their requests are over."""
    for name, role in roles.items():
        said = list[str]()
        wait_for(lambda name=name, role=role, said=said: said.append(change(fleet, name, role)) or said[-1] == "ok", 30)
        assert json.loads(fleet[name].ask("/model_info")[1])["disaggregation_mode"] == role


def assert_carries(fleet: Fleet, sender: str, receiver: str, number: int) -> None:
    """A new prompt, its beginning, and what goes on with it."""
    tokens = prompt(150 + 40 * number, seed=seed_of(sender, receiver, number))
    (answer,) = fleet.crossed(sender, receiver, tokens)
    fleet.assert_same_as_alone(tokens, answer)
    for said in (tokens[:100], tokens + prompt(70, seed=number)):
        ((_, answer),) = fleet.ask(sender, receiver, [said])
        fleet.assert_same_as_alone(said, answer)


def used(fleet: Fleet, name: str) -> tuple[int, int]:
    """Threads and descriptors of its scheduler."""
    (pid,) = (
        pid
        for pid in descendants(fleet[name].process.pid)
        if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return len(list(Path(f"/proc/{pid}/task").iterdir())), descriptors(pid)


def no_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return now[0] <= before[0] and now[1] <= before[1]


@pytest.mark.parametrize("names", [("s16", "s64"), ("s16-plain", "s64-plain")], ids=["prefix caches", "none"])
def test_a_pair_changes_its_roles_again_and_again(fleet: Fleet, names: tuple[str, str]) -> None:
    """Both keep what they have computed, and give it back each time. Threads or sockets that stay would add up."""
    sender, receiver = names
    fleet.start(*names, "alone")
    first = {}
    for number in range(CHANGES):
        assert_carries(fleet, sender, receiver, number)
        assert all(fleet.agents[name][0].status.offers for name in names), "nothing is kept"
        if number < 4:  # from the third on each has had each role, and all that stays
            first[sender] = used(fleet, sender), used(fleet, receiver)
        else:
            before = dict(zip((sender, receiver), first[sender], strict=True))
            wait_for(lambda before=before: all(no_more(used(fleet, each), before[each]) for each in before), 30)
        changed(fleet, **{sender: "decode", receiver: "prefill"})
        assert not any(fleet.agents[name][0].status.offers for name in names)
        sender, receiver = receiver, sender
    assert CHANGES % 2 == 0, "the next test finds the roles that their names say"


def test_a_decode_server_knows_a_prefill_server_that_was_none_for_a_while(fleet: Fleet) -> None:
    """Meanwhile it is told at once, though nobody asks it to prefill: its control socket is where it was."""
    fleet.start("s16", "d64", "alone")
    assert_carries(fleet, "s16", "d64", 0)
    changed(fleet, s16="decode")
    status, said = fleet["d64"].generate(fleet.body("s16", prompt(100, seed=1), fleet.room()))
    assert status != 200 and "it prefills nothing" in str(said)
    changed(fleet, s16="prefill")
    assert_carries(fleet, "s16", "d64", 1)


def test_a_server_with_requests_stays_what_it_is(fleet: Fleet) -> None:
    """One whose half waits for the other server's. Then it is answered."""
    fleet.start("s16", "s64", "alone")
    for number, (first, second, role) in enumerate((("s16", "s64", "decode"), ("s64", "s16", "prefill"))):
        tokens = prompt(200, seed=30 + number)
        body = fleet.body("s16", tokens, fleet.room())
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(fleet[first].generate, body)
            wait_for(lambda first=first: sum(v for k, v in fleet[first].held().items() if k.endswith("_reqs")) > 0, 30)
            assert "not idle" in change(fleet, first, role)
            answers = {second: fleet[second].generate(body), first: begun.result()}
        assert [status for status, _ in answers.values()] == [200, 200], answers
        fleet.assert_same_as_alone(tokens, answer_of(answers["s64"][1]))


def test_a_prefix_cache_that_decode_would_not_use_is_refused(fleet: Fleet) -> None:
    """SGLang does not: it loses pages of the prefixes that prompts share, and ends."""
    fleet.start("s16-default", "d64", "alone")
    assert "does not support runtime role switch" in change(fleet, "s16-default", "decode")
    assert "cache_unsupported: --disaggregation-decode-enable-radix-cache: off" in fleet["s16-default"].text()
    assert_carries(fleet, "s16-default", "d64", 0)


def test_a_role_changes_without_an_agent(fleet: Fleet) -> None:
    fleet.start("s16", "s64", "alone")
    fleet.agents["s16"][0].kill()
    changed(fleet, s16="decode", s64="prefill")
    fleet.start_agents("s16")
    wait_for(lambda: fleet.agents["s16"][0].status.engine is not None, 30)
    assert_carries(fleet, "s64", "s16", 7)
    changed(fleet, s16="prefill", s64="decode")


def test_the_proxy_has_servers_change_their_roles_as_its_list_does(fleet: Fleet) -> None:
    fleet.start("s16", "s64", "alone")
    listed, port = fleet.folder / "engines", free_port()

    def write(sender: str, receiver: str) -> None:
        first = f"prefill sglang={fleet[sender].url},bootstrap={fleet[sender].bootstrap_port}"
        listed.write_text(f"{first}\ndecode sglang={fleet[receiver].url}\n")

    def ask(number: int) -> None:
        tokens = prompt(200, seed=40 + number)
        body = {key: each for key, each in fleet.body("s16", tokens, None).items() if not key.startswith("bootstrap_")}
        status, text = proxy.ask("/generate", body, 90.0)
        assert status == 200, text
        fleet.assert_same_as_alone(tokens, answer_of(json.loads(text)))

    write("s16", "s64")
    command = [PYTHON, "-m", "kvbridge.cli", "proxy", "--engines", str(listed), "--listen", f"127.0.0.1:{port}"]
    proxy = HttpServer(command, port, fleet.folder / "proxy.log")
    try:
        proxy.wait_up()
        for number, names in enumerate([("s64", "s16"), ("s16", "s64")]):
            ask(number)
            write(*names)
            proxy.process.send_signal(signal.SIGHUP)
            wait_for(lambda number=number: proxy.text().count("server now") == 2 * (number + 1), 60)
            proxy.wait_up()
        ask(2)
    finally:
        proxy.kill()


def test_all_ranks_of_a_server_change_their_role(fleet: Fleet) -> None:
    fleet.start("s32-two", "s64-plain", "alone")
    for number in range(2):
        assert_carries(fleet, "s32-two", "s64-plain", number)
        changed(fleet, **{"s32-two": "decode", "s64-plain": "prefill"})
        assert_carries(fleet, "s64-plain", "s32-two", number)
        changed(fleet, **{"s32-two": "prefill", "s64-plain": "decode"})


def test_the_proxy_changes_a_server_that_wants_keys(fleet: Fleet, tmp_path: Path) -> None:
    """Nobody serves the other side."""
    fleet.start("s16-keys")
    server, listed, keys = fleet["s16-keys"], tmp_path / "engines", tmp_path / "keys"
    named, nobody = f"sglang={server.url}", f"sglang=http://127.0.0.1:{free_port()}"
    listed.write_text(f"prefill {named},bootstrap={server.bootstrap_port}\ndecode {nobody}\n")
    keys.write_text("user\nadmin\n")
    proxy = MovingProxy(tmp_path, "--engines", str(listed), "--sglang-keys", str(keys))
    try:
        wait_for(lambda: f"prefill engine {named} is healthy" in proxy.text(), 60)
        listed.write_text(f"decode {named}\nprefill {nobody}\n")
        proxy.process.send_signal(signal.SIGHUP)
        wait_for(lambda: f"decode engine {named} is healthy" in proxy.text(), 60)
    finally:
        proxy.kill()
    asked = server.ask("/model_info", headers={"Authorization": "Bearer user"})
    assert json.loads(asked[1])["disaggregation_mode"] == "decode"
