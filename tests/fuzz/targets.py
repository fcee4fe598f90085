"""All targets by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .agents import Agents
from .codecs import KINDS, Client, Decoding, Descriptors, Stream
from .files import ConfigText, PoolFile, StatusText
from .lists import BootList, KeyList
from .machines import Machines
from .params import Params
from .pools import Pools
from .target import Target

NAMES: dict[str, Callable[[], Target]] = {
    **{name: partial(Decoding, name) for name in KINDS},
    "stream": Stream,
    "fds": Descriptors,
    "client": Client,
    "params": Params,
    "config": ConfigText,
    "keylist": KeyList,
    "bootlist": BootList,
    "poolfile": PoolFile,
    "status": StatusText,
    "pools": Pools,
    "machines": Machines,
    "agents": Agents,
}


def made(name: str) -> Target:
    return NAMES[name]()
