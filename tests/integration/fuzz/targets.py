"""All targets by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.integration.fuzz.agents import Agents
from tests.integration.fuzz.codecs import KINDS, Client, Decoding, Descriptors, Stream
from tests.integration.fuzz.files import ConfigText, IncarnationList, KeyList, PoolFile, StatusText
from tests.integration.fuzz.params import Params
from tests.integration.fuzz.pools import Pools
from tests.integration.fuzz.target import Target

NAMES: dict[str, Callable[[], Target]] = {
    **{name: partial(Decoding, name) for name in KINDS},
    "stream": Stream,
    "fds": Descriptors,
    "client": Client,
    "params": Params,
    "config": ConfigText,
    "keylist": KeyList,
    "bootlist": IncarnationList,
    "poolfile": PoolFile,
    "status": StatusText,
    "pools": Pools,
    "agents": Agents,
}


def made(name: str) -> Target:
    return NAMES[name]()
