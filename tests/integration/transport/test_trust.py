"""Which addresses may be dialled and listened on. Pure, except that names to listen on are resolved."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.errors import OperatorError, PeerError
from kvbridge.transport.endpoint import canonical, check_listened, check_metrics, is_loopback, is_place, with_key
from kvbridge.transport.keys import Keys
from kvbridge.transport.trust import Trust
from testing.refusals import refused

pytestmark = pytest.mark.proves("G23")

OURS = "^EnJB*q2ORa@%F(j9I*hdIA2zmAvUaAO?IvjGWHD"  # as any other run has them: parametrized tests are named by them
THEIRS = "DKrUP&&CJWfmbg(miCLm-c!(7PbGS9N4E8Nzm6H8"
FOREIGN = "3qXj.a+mnELQK4?MP&!3=X^c+3@6u6x=iQ?O&0#?"


def keys(*known: str) -> Keys:
    return Keys(OURS, "", {key: f"name{i}" for i, key in enumerate(known)})


def refusal(trust: Trust, address: str) -> str:
    with refused(PeerError, "peer_not_allowed") as caught:
        trust.check_dialled(address)
    return str(caught.value)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("tcp://LocalHost:7700", "tcp://localhost:7700"),
        ("tcp://A.kv.Internal:07700", "tcp://a.kv.internal:7700"),
        ("tcp://127.0.0.1:00080", "tcp://127.0.0.1:80"),
        ("tcp://[2001:DB8:0:0::1]:1", "tcp://[2001:db8::1]:1"),
        ("tcp://[0:0:0:0:0:0:0:1]:1", "tcp://[::1]:1"),
        ("tcp://[FE80::1%eth0]:1", "tcp://[fe80::1%eth0]:1"),
        ("tcp://[::ffff:10.0.0.1]:1", "tcp://10.0.0.1:1"),
        ("tcp://H:1#", "tcp://h:1"),
        (f"tcp://H:1#{THEIRS}", f"tcp://h:1#{THEIRS}"),
    ],
)
def test_an_address_has_one_spelling(said: str, meant: str) -> None:
    assert canonical(said) == meant == canonical(meant)


@pytest.mark.parametrize("address", ["", "P0", "TCP://H:1", "tcp://H", "tcp://H:*", "tcp://A:1;B:2", "tcp://H:1 #k"])
def test_what_is_no_address_is_left_as_it_was_said(address: str) -> None:
    assert canonical(address) == address


LOOPBACK = [
    f"tcp://{place}:1" for place in ("127.0.0.1", "127.8.9.1", "localhost", "LocalHost", "[::1]", "[::ffff:127.0.0.1]")
]
ELSEWHERE = [
    f"tcp://{place}"
    for place in (
        *("10.0.0.1:1", "169.254.169.254:80", "host:1", "127.0.0.1.example.com:1", "[fe80::1]:1", "2130706433:1"),
        *("0x7f.1:1", "127.1:1", "localhost.:1", "LOCALHOST.evil:1", "lo:1", "[::ffff:10.0.0.1]:1", "[2001:db8::1]:1"),
    )
]


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_needs_no_key(address: str) -> None:
    assert Trust().check_dialled(address) == (address, "")
    assert is_loopback(address)


@pytest.mark.proves("T4")
@pytest.mark.parametrize("address", ELSEWHERE)
def test_nothing_else_is_dialled_without_a_key(address: str) -> None:
    for places in ((), ("*:*",)):  # a place alone is no proof
        said = refusal(Trust(None, places), address)
        assert "key" in said and address in said


@pytest.mark.proves("T4")
@pytest.mark.parametrize("address", ELSEWHERE)
def test_a_key_alone_opens_no_place_beyond_loopback(address: str) -> None:
    place = canonical(address).removeprefix("tcp://")
    for known in (keys(THEIRS), None):  # nor does it open one to need none
        said = refusal(Trust(known, allow_unauthenticated=known is None), address)
        assert said == f'dial: {address} is beyond loopback and no pattern of dial names it; add "{place}"'
        for places in ((place,), (f"*:{place.rpartition(':')[2]}",), ("10.9.0.0/16:1", "*:*")):
            trust = Trust(known, places, allow_unauthenticated=known is None)
            assert trust.check_dialled(address) == (address, THEIRS if known else "")


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_is_dialled_with_a_key_as_without(address: str) -> None:
    assert Trust(keys(THEIRS)).check_dialled(address) == (address, THEIRS)


def test_the_pattern_that_a_refusal_names_is_one_that_helps() -> None:
    address = "tcp://[fe80::1%eth0]:7700"
    assert 'add "[fe80::1]:7700"' in refusal(Trust(keys(THEIRS)), address)
    assert Trust(keys(THEIRS), ("[fe80::1]:7700",)).check_dialled(address) == (address, THEIRS)


def test_with_keys_who_proves_one_is_spoken_to_where_dial_says() -> None:
    trust = Trust(keys(OURS, THEIRS), ("10.0.0.1:1", "127.0.0.1:1"))
    assert trust.check_dialled(f"tcp://10.0.0.1:1#{THEIRS}") == ("tcp://10.0.0.1:1", THEIRS)
    assert trust.check_dialled(f"tcp://127.0.0.1:1#{OURS}") == ("tcp://127.0.0.1:1", OURS)


@pytest.mark.proves("T16")
def test_a_key_that_is_not_ours_to_trust_is_refused_whatever_the_address_says() -> None:
    assert FOREIGN in refusal(Trust(keys(OURS, THEIRS), ("*:*",)), f"tcp://10.0.0.1:1#{FOREIGN}")
    assert OURS in refusal(Trust(keys(THEIRS), ("*:*",)), f"tcp://10.0.0.1:1#{OURS}")
    assert refusal(Trust(keys(THEIRS)), "tcp://127.0.0.1:1#" + "x" * 5000)


def test_an_address_without_a_key_does_where_there_is_but_one() -> None:
    assert Trust(keys(THEIRS), ("*:1",)).check_dialled("tcp://10.0.0.1:1") == ("tcp://10.0.0.1:1", THEIRS)
    assert "#PUBLICKEY" in refusal(Trust(keys(OURS, THEIRS), ("*:1",)), "tcp://10.0.0.1:1")
    assert "#PUBLICKEY" in refusal(Trust(keys(OURS, THEIRS), ("*:1",)), "tcp://10.0.0.1:1#")


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://a:1;b:2", "tcp://*:1", "ipc:///x", f"#{THEIRS}", "", "tcp://h:1 #k", "tcp://h:0"),
        *("tcp://0.0.0.0:1", "tcp://h", "tcp://h:1\n", "inproc://x"),
    ],
)
def test_what_is_no_address_is_none_with_keys_either(address: str) -> None:
    for trust in (Trust(keys(THEIRS)), Trust(allow_unauthenticated=True), Trust()):
        with refused(PeerError, "bad_address"):
            trust.check_dialled(address)


@pytest.mark.parametrize(
    ("place", "yes", "no"),
    [
        ("10.1.0.0/16:7700", ["10.1.2.3:7700", "[::ffff:10.1.2.3]:7700"], ["10.2.0.1:7700", "10.1.2.3:7701", "h:7700"]),
        ("10.1.2.3:*", ["10.1.2.3:1", "10.1.2.3:65535"], ["10.1.2.4:1"]),
        ("[2001:db8::/32]:7700", ["[2001:db8:1::1]:7700"], ["[2001:db9::1]:7700", "10.0.0.1:7700"]),
        (
            "*.kv.internal:7700",
            ["a.kv.internal:7700", "A.KV.internal:7700"],
            ["kv.internal:7700", "a.kv.internal.evil:7700"],
        ),
        ("decode-*:*", ["decode-1:9"], ["prefill-1:9", "xdecode-1:9"]),
        ("*:7700", ["anything:7700", "10.0.0.1:7700", "[2001:db8::1]:7700"], ["anything:7701"]),
        ("*:*", ["anything:1", "10.0.0.1:65535", "[::1]:7700"], []),
        ("0.0.0.0/0:*", ["8.8.8.8:1"], ["name:1", "[::1]:1"]),
    ],
)
def test_patterns_of_places(place: str, yes: list[str], no: list[str]) -> None:
    assert [where for where in yes if not is_place(f"tcp://{where}", place)] == []
    assert [where for where in no if is_place(f"tcp://{where}", place)] == []


def test_places_bind_whoever_has_a_key_and_who_needs_none() -> None:
    for trust in (Trust(keys(THEIRS), ("10.1.0.0/16:*",)), Trust(None, ("10.1.0.0/16:*",), True)):
        assert trust.check_dialled("tcp://10.1.2.3:1")[0] == "tcp://10.1.2.3:1"
        assert 'add "10.2.2.3:1"' in refusal(trust, "tcp://10.2.2.3:1")
        said = 'dial: tcp://127.0.0.1:1 is on loopback, dial is set and no pattern of dial names it; add "127.0.0.1:1"'
        assert refusal(trust, "tcp://127.0.0.1:1") == said
    assert "key" in refusal(Trust(None, ("10.1.0.0/16:*",)), "tcp://10.1.2.3:1")  # a place alone is no proof


@pytest.mark.parametrize(
    "place", ["", "10.0.0.1", ":1", "10.0.0.1:99999", "10.0.0.1/8:1", "10.0.0.0/40:1", "a b:1", "h:1;x"]
)
def test_a_pattern_that_is_none_is_refused_at_start(place: str) -> None:
    with pytest.raises(OperatorError) as caught:
        Trust(places=(place,))
    assert caught.value.code == "bad_option" and repr(place) in str(caught.value)


@pytest.mark.parametrize("host", ["10.9.8.7", "eth0", "host.invalid", "127.0.0.77.example", "[2001:db8::1]"])
def test_listening_beyond_loopback_needs_a_key_or_the_hatch(host: str) -> None:
    address = f"tcp://{host}:7700"
    with refused(OperatorError, "unauthenticated_listen") as caught:
        Trust().check_listened(address, allow_wildcard=False)
    assert all(word in str(caught.value) for word in (address, "kvbridge keygen", "allow_unauthenticated"))
    Trust(keys(OURS)).check_listened(address, allow_wildcard=False)
    Trust(allow_unauthenticated=True).check_listened(address, allow_wildcard=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_is_listened_on_without_a_key(host: str) -> None:
    Trust().check_listened(f"tcp://{host}:0", allow_wildcard=False)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "0", "[::]"])
def test_a_wildcard_needs_its_own_word_and_a_key(host: str) -> None:
    for guarded in (True, False):
        with refused(OperatorError, "wildcard_listen"):
            check_listened(f"tcp://{host}:1", allow_wildcard=False, is_guarded=guarded)
    with refused(OperatorError, "unauthenticated_listen"):
        check_listened(f"tcp://{host}:1", allow_wildcard=True, is_guarded=False)
    check_listened(f"tcp://{host}:1", allow_wildcard=True, is_guarded=True)


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "*:9400", "[::]:9400", ":::9400", "0:9400"])
def test_metrics_are_not_served_on_every_interface_unasked(address: str) -> None:
    with refused(OperatorError, "wildcard_metrics"):
        check_metrics(address, allow_wildcard=False)
    check_metrics(address, allow_wildcard=True)
    check_metrics("127.0.0.1:9400", allow_wildcard=False)


def test_an_address_is_told_with_its_key_once() -> None:
    assert with_key("tcp://h:1", OURS) == f"tcp://h:1#{OURS}" == with_key(f"tcp://h:1#{OURS}", OURS)
    assert with_key("tcp://h:1", "") == "tcp://h:1"


LOCAL = ("127.0.0.1:1", "127.0.0.0/8:*", "[::1]:7700", "[::1/128]:*", "localhost:7700", "LOCALHOST:*")
WIDE = ("10.0.0.0/24:7700", "*:7700", "0.0.0.0/0:*", "126.0.0.0/7:*", "localhost.example:1", "*host:1", "[fd00::/8]:*")


@pytest.mark.parametrize("guard", [{"keys": keys(OURS)}, {"allow_unauthenticated": True}])
def test_whoever_deals_with_other_hosts_must_say_by_which_network(guard: dict[str, Any]) -> None:
    assert Trust(**guard).data_devices("tcp://127.0.0.1:0", "", "") == "lo"
    assert Trust(**guard, places=LOCAL).data_devices("tcp://[::1]:0", "", "") == "lo"
    wide = [("tcp://10.0.0.5:7700", LOCAL), ("tcp://0.0.0.0:0", ()), ("tcp://a.name:1", ())]
    for listen, places in wide + [("tcp://127.0.0.1:0", (*LOCAL, place)) for place in WIDE]:
        trust = Trust(**guard, places=places)
        with refused(OperatorError, "no_net_devices") as caught:
            trust.data_devices(listen, "", "")
        assert (f"listen: {listen}" if "127" not in listen else f"dial: {places[-1]}") in str(caught.value)
        assert trust.data_devices(listen, "", "lo,all") == "lo,all"
    with pytest.raises(OperatorError, match=r"advertise: tcp://10\.0\.0\.5:1"):
        Trust(**guard).data_devices("tcp://127.0.0.1:0", "tcp://10.0.0.5:1", "")


def test_without_a_guard_the_data_stays_on_loopback() -> None:
    assert Trust(places=WIDE).data_devices("tcp://10.0.0.5:7700", "", "") == "lo"
    assert Trust().data_devices("tcp://127.0.0.1:0", "", "all") == "all"
