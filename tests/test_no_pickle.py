"""Nothing of ours unpickles, evaluates, or lets a library do so; and a secret travels in one message only.

Reads the source as text. That a running agent does not pickle either is shown in tests/agent/test_security.py.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbridge_proto import engine, peer
from kvbridge_proto.peer import DeviceCard, Envelope, FabricCard, Hello, Notice

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("kvbridge", "kernels", "proto") for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib", "yaml"),
    *("multiprocessing", "torch.multiprocessing", "concurrent.futures.process", "xmlrpc", "code", "pty"),
    *("torch.distributed", "torch.package", "numpy.lib.npyio", "nixl._api"),
}
CALLS = {
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"),  # ZeroMQ's own wrappers
    *(
        "get_serialized_descs",
        "deserialize_descs",
        "get_agent_metadata",
        "fetch_remote_metadata",
        "send_local_metadata",
    ),
    *("eval", "exec", "compile", "__import__", "execfile"),
    *("ProcessPoolExecutor", "nixl_agent"),
}
QUALIFIED = {"torch.load", "torch.save", "torch.jit.load", "np.load", "numpy.load", "torch.hub.load", "copyreg.pickle"}


def findings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_forbidden(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name for name in names if _is_forbidden(name))
        elif isinstance(node, ast.Call | ast.Attribute):
            called = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            if (
                called in QUALIFIED
                or (isinstance(node, ast.Attribute) and node.attr in CALLS and called != "re.compile")
                or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and called in CALLS)
            ):
                yield called
        elif isinstance(node, ast.FunctionDef) and node.name in ("__reduce__", "__reduce_ex__", "__setstate__"):
            yield node.name


def _is_forbidden(module: str) -> bool:
    return any(module == each or module.startswith(each + ".") for each in MODULES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_ours_pickles_or_evaluates(path: Path) -> None:
    assert list(findings(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import torch.distributed as dist",
        "from multiprocessing import Queue",
        "def f():\n    from pickle import loads",
        "from torch import multiprocessing",
        "socket.recv_pyobj()",
        "agent.get_serialized_descs(x)",
        "load = agent.deserialize_descs",
        "torch.load(path)",
        "f = torch.load",
        "eval('1')",
        "exec(text)",
        "__import__(name)",
        "class A:\n    def __reduce__(self): ...",
        "from nixl._api import nixl_agent",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert list(findings(text))


def test_the_search_looks_at_all_of_it() -> None:
    assert len(FILES) > 100 and "kvbridge/transport/fabric_nixl.py" in {str(p.relative_to(ROOT)) for p in FILES}


def test_nixl_never_listens_and_its_python_agent_is_not_used() -> None:
    """Its listener binds every interface and trusts whoever comes; its Python agent wraps descriptors in pickle."""
    text = (ROOT / "kvbridge/transport/fabric_nixl.py").read_text()
    (listens,) = [
        ast.unparse(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("useListenThread")
    ]
    assert listens == "False"
    names = {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}
    assert "nixl._bindings" in names and "nixl._api" not in names


# What lets somebody write our staging is said in one message:

SECRET = {FabricCard, DeviceCard}
MESSAGES: set[Any] = {
    *typing.get_args(peer.Body),
    *typing.get_args(engine.ToAgent),
    *typing.get_args(engine.ToEngine),
    Notice,
}


def within(kind: Any, seen: set[Any]) -> set[Any]:
    """Every record that a message of this type may hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in seen:
            seen.add(kind)
            for hint in typing.get_type_hints(kind).values():
                within(hint, seen)
    else:
        for part in typing.get_args(kind):
            within(part, seen)
    return seen


def test_only_a_hello_says_how_to_write_our_memory() -> None:
    assert {kind for kind in MESSAGES if within(kind, set()) & SECRET} == {Hello}
    assert within(Envelope, set()) >= SECRET and len(MESSAGES) > 25
