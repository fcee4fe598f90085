"""Nothing of ours unpickles or evaluates, or lets a library do so; and secrets are sent in one message only.

Reads the source as text. tests/integration/agent/test_security.py shows that a running agent does not pickle either.
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

pytestmark = pytest.mark.proves("G23")

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("kvbridge", "kernels", "proto") for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {  # and what is in them
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib", "yaml"),
    *("multiprocessing", "torch.multiprocessing", "concurrent.futures.process", "xmlrpc", "code", "pty"),
    *("torch.distributed", "torch.package", "torch.serialization", "torch.hub", "numpy.lib.npyio", "numpy.lib.format"),
    *("pandas.io.pickle", "copyreg", "importlib.import_module", "logging.config", "nixl._api"),
    *("torch.load", "torch.save", "torch.jit.load", "numpy.load", "np.load", "runpy", "imp"),
}
ANYWHERE = {  # whatever they are attributes of
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"),  # ZeroMQ's own wrappers
    *("get_serialized_descs", "deserialize_descs", "get_agent_metadata"),
    *("fetch_remote_metadata", "send_local_metadata"),
    *("read_pickle", "to_pickle", "import_module"),
    *("ProcessPoolExecutor", "nixl_agent"),
}
BUILT_IN = {"eval", "exec", "compile", "__import__", "execfile"}
HOOKS = {"__reduce__", "__reduce_ex__", "__setstate__", "__getstate__"}
ALLOWED = {"re.compile"}


def findings(text: str) -> Iterator[str]:
    """Whatever in it unpickles or evaluates, or is a name under which that could be done later."""
    tree = ast.parse(text)
    known = imports(tree)
    imported = {name.partition(".")[0] for names in known.values() for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    known.setdefault(target.id, {target.id}).update(meant(node.value, known))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_forbidden(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if _is_forbidden(name) or name.endswith(".*"))
        elif isinstance(node, ast.Name | ast.Attribute | ast.Call):
            for name in meant(node, known):
                if _is_forbidden(name, is_imported=name.partition(".")[0] in imported):
                    yield name
        elif "allow_pickle" in (getattr(node, "arg", ""), getattr(node, "value", "")):
            yield "allow_pickle"
        elif isinstance(node, ast.FunctionDef) and node.name in HOOKS:
            yield node.name


def imports(tree: ast.AST) -> dict[str, set[str]]:
    """What each name may stand for that an import binds, anywhere in it."""
    known: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known.setdefault(alias.asname or first, set()).add(alias.name if alias.asname else first)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                known.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")
    return known


def meant(node: ast.AST, known: dict[str, set[str]]) -> set[str]:
    """`torch.load` for `t.load` after `import torch as t`, and for `getattr(t, "load")`; nothing for a call."""
    match node:
        case ast.Name(id=name):
            return known.get(name, {name})
        case ast.Attribute(value=value, attr=name):
            return {f"{each}.{name}" for each in meant(value, known) or {""}}
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            return {f"{each}.{name}" for each in meant(value, known) or {""}}
    return set()


def _is_forbidden(name: str, is_imported: bool = True) -> bool:
    """Of what is not imported here only a whole dotted name says what it is: `code` may be anything."""
    if name in ALLOWED:
        return False
    if name.rpartition(".")[2] in ANYWHERE | BUILT_IN:
        return True
    if not is_imported:
        return "." in name and name in MODULES
    return any(name == each or name.startswith(each + ".") for each in MODULES)


@pytest.mark.proves("T38")
def test_no_file_of_ours_pickles_or_evaluates() -> None:
    found = {str(path.relative_to(ROOT)): list(findings(path.read_text())) for path in FILES}
    assert {name: names for name, names in found.items() if names} == {}
    assert len(found) > 100 and "kvbridge/transport/fabric_nixl.py" in found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "def f():\n    from pickle import loads",
        "from torch import multiprocessing",
        "agent.get_serialized_descs(x)",
        "load = agent.deserialize_descs",
        "torch.load(path)",
        "eval('1')",
        "__import__(name)",
        "class A:\n    def __reduce__(self): ...",
        "from torch import load as read",
        "import numpy as n\nn.load(path, allow_pickle=True)",
        "import torch as t\nt.load(path)",
        "import torch\nt = torch\nt.load(path)",
        "import torch as t\ndef f(t):\n    t = other\n    t.load(path)",
        "import torch\ngetattr(torch, 'load')(path)",
        "import torch\ntorch.serialization.load(path)",
        "from torch import *",
        "import importlib\nimportlib.import_module('pickle')",
        "f = eval",
        "import pandas\npandas.read_pickle(path)",
        "read(path, allow_pickle=False)",
        "read(path, **{'allow_pickle': True})",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert list(findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "from re import compile\ncompile('x')",
        "model.load(path)",
        "code = row\nprint(code, code.to(1))",
        "import torch\ntorch.zeros(1)",
    ],
)
def test_the_search_finds_nothing_in(text: str) -> None:
    assert not list(findings(text))


@pytest.mark.proves("T39")
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


@pytest.mark.proves("T41")
def test_only_a_hello_says_how_to_write_our_memory() -> None:
    assert {kind for kind in MESSAGES if within(kind, set()) & SECRET} == {Hello}
    assert within(Envelope, set()) >= SECRET and len(MESSAGES) > 25
