"""Which folder may import which, and what no file may do. Reads the source as text: nothing is imported."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("kvbridge", "kvbridge_proto", "kvbridge_kernels")

# What runs inside an engine may use of what runs beside it.
INSIDE = {
    "kvbridge_proto",
    "kvbridge.cache_kinds",
    "kvbridge.errors",
    "kvbridge.failpoints",
    "kvbridge.oneline",
    "kvbridge.state_machines",
    "kvbridge.unix_socket",
    "kvbridge.values",
    "kvbridge.device.handles",
    "kvbridge.device.fence",
}
# What both the data plane and the rest of an agent are made of.
BESIDE = {
    *("kvbridge_proto", "kvbridge.errors", "kvbridge.failpoints", "kvbridge.options", "kvbridge.unix_socket"),
    *("kvbridge.values", "kvbridge.geometry", "kvbridge.exchange", "kvbridge.device", "kvbridge.transport"),
}


@dataclass(frozen=True)
class Room:
    """What of ours it may import besides itself, and what of others; None: anything."""

    may: Set[str] = frozenset()
    third: Set[str] | None = frozenset()


# A room inside another comes before it.
ROOMS = {
    "kvbridge_proto": Room(third={"msgpack", "msgspec"}),
    "kvbridge_kernels": Room(third={"torch", "triton", "numpy", "xxhash"}),
    "kvbridge.cache_kinds": Room({"kvbridge_proto"}),
    "kvbridge.errors": Room(),
    "kvbridge.oneline": Room(),
    "kvbridge.unix_socket": Room(),
    "kvbridge.values": Room(third={"msgspec"}),
    "kvbridge.descriptors": Room(),
    "kvbridge.failpoints": Room({"kvbridge.errors"}),
    "kvbridge.options": Room({"kvbridge_proto"}, {"msgspec"}),
    "kvbridge.config": Room({"kvbridge_proto", "kvbridge.errors", "kvbridge.options"}, {"msgspec"}),
    "kvbridge.local_agents": Room(
        {"kvbridge_proto", "kvbridge.errors", "kvbridge.options", "kvbridge.config"}, {"msgspec"}
    ),
    "kvbridge.geometry": Room(
        {"kvbridge_proto", "kvbridge.cache_kinds", "kvbridge.errors", "kvbridge.values"}, {"msgspec", "numpy"}
    ),
    "kvbridge.state_machines": Room(),
    "kvbridge.exchange": Room(
        {"kvbridge_proto", "kvbridge.cache_kinds", "kvbridge.errors", "kvbridge.geometry", "kvbridge.state_machines"}
        | {"kvbridge.values"},
        {"msgspec", "numpy"},
    ),
    "kvbridge.device": Room(
        {"kvbridge_proto", "kvbridge_kernels", "kvbridge.errors", "kvbridge.geometry", "kvbridge.values"},
        {"torch", "numpy", "cuda"},
    ),
    "kvbridge.transport": Room(
        {
            f"kvbridge.{name}"
            for name in ("errors", "descriptors", "failpoints", "state_machines", "unix_socket", "values")
        }
        | {"kvbridge_proto"},
        {"msgspec", "numpy", "zmq", "nixl", "uvloop"},
    ),
    "kvbridge.adapters.engine": Room(INSIDE, {"msgspec", "torch"}),
    "kvbridge.adapters.vllm": Room(INSIDE | {"kvbridge.adapters.engine"}, None),
    "kvbridge.adapters.sglang": Room(INSIDE | {"kvbridge.adapters.engine"}, None),
    "kvbridge.adapters": Room(),
    "kvbridge.models": Room(
        {"kvbridge_proto", "kvbridge.cache_kinds", "kvbridge.errors", "kvbridge.adapters.engine"}
        | {"kvbridge.adapters.vllm.backends"}
    ),
    "kvbridge.dataplane.data_plane": Room(BESIDE | {"kvbridge.routes", "kvbridge.dataplane"}),  # runs all their jobs
    "kvbridge.dataplane": Room(BESIDE),
    "kvbridge.routes": Room(BESIDE | {"kvbridge.cache_kinds", "kvbridge.state_machines", "kvbridge.dataplane"}),
    "kvbridge.agent": Room(
        BESIDE | {f"kvbridge.{name}" for name in ("descriptors", "oneline", "state_machines", "routes", "dataplane")},
        {"msgspec", "torch", "numpy", "uvloop", "prometheus_client", "opentelemetry"},
    ),
    "kvbridge.proxy": Room(
        {"kvbridge.errors", "kvbridge.oneline", "kvbridge.descriptors"},
        {"prometheus_client", "aiohttp", "msgspec"},
    ),
}
TOP = ("kvbridge.cli", "kvbridge.commands", "kvbridge.doctor", "kvbridge.loopback")  # may import any room
EVERY = (*ROOMS, *TOP)

PURE = (
    *("kvbridge_proto", "kvbridge.cache_kinds", "kvbridge.options", "kvbridge.state_machines"),
    *("kvbridge.values", "kvbridge.geometry", "kvbridge.exchange", "kvbridge.models"),
    *(f"kvbridge.routes.{name}" for name in ("registry", "pull.halves", "slots.halves", "slots.receive_slots")),
    "kvbridge.dataplane.orders",
    *(f"kvbridge.proxy.{name}" for name in ("bodies", "events", "generate", "legs", "logprobs")),
)
IMPURE = {
    *("asyncio", "datetime", "logging", "os", "pathlib", "random", "secrets", "select", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "uuid"),
}
LIGHT = (
    "kvbridge_proto",
    "kvbridge.errors",
    "kvbridge.failpoints",
    "kvbridge.unix_socket",
    "kvbridge.values",
    "kvbridge.device.handles",
    "kvbridge.adapters.engine",
)
READS = {"os.getenv", "os.environ.get", "os.environ.items", "os.environ.copy"}
FUNCTION_LINES = 60


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] in ("proto", "kernels") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _module(path): path
    for folder in ("kvbridge", "proto/kvbridge_proto", "kernels/kvbridge_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(), str(FILES[module]))


@functools.cache
def _nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(module)))


@functools.cache
def _imports(module: str) -> tuple[tuple[str, int], ...]:
    """Every module that `module` imports anywhere in it, in full, with the line."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in _nodes(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            inner = [f"{origin}.{alias.name}" for alias in node.names]
            found += [(name if name in FILES else origin, node.lineno) for name in inner]
    return tuple(found)


def _heads(module: str) -> set[str]:
    """The top-level packages that it imports."""
    return {name.split(".")[0] for name, _ in _imports(module)}


def _calls(module: str) -> Iterator[tuple[int, str]]:
    return ((node.lineno, ast.unparse(node.func)) for node in _nodes(module) if isinstance(node, ast.Call))


def _at(module: str, line: int) -> str:
    return f"{FILES[module].relative_to(ROOT)}:{line}"


def _is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def _room(module: str) -> str:
    """A module outside all rooms is one of its own."""
    return next((room for room in EVERY if _is_in(module, room)), module)


def test_every_module_is_in_a_room() -> None:
    assert {_room(module) for module in FILES} == {*EVERY, "kvbridge"}  # the package itself is empty


def test_imports_point_one_way() -> None:
    assert not [
        f"{_at(module, line)} imports {name}"
        for module in FILES
        if (room := _room(module)) in ROOMS
        for name, line in _imports(module)
        if name.split(".")[0] in OURS and not any(_is_in(name, place) for place in ROOMS[room].may | {room})
    ]


def _circles(imports: Mapping[str, set[str]]) -> set[str]:
    """What imports itself by way of others, and what lies between two circles."""
    left = dict(imports)
    while outside := {each for each in left if not left[each] & left.keys()} | left.keys() - set().union(
        *left.values()
    ):
        left = {each: names for each, names in left.items() if each not in outside}
    return set(left)


def test_no_modules_import_each_other() -> None:
    """Neither at run time nor for types: a file can be read when those that it imports are known."""
    assert _circles({module: {name for name, _ in _imports(module)} - {module} for module in FILES}) == set()


def test_no_rooms_import_each_other() -> None:
    found: dict[str, set[str]] = {_room(module): set() for module in FILES}
    for module in FILES:
        found[_room(module)] |= {_room(name) for name, _ in _imports(module) if name in FILES} - {_room(module)}
    assert _circles(found) == set()


def test_foreign_imports_are_the_ones_the_room_is_for() -> None:
    assert not [
        f"{_at(module, line)} imports {name}"
        for module in FILES
        if (room := _room(module)) in ROOMS and (allowed := ROOMS[room].third) is not None
        for name, line in _imports(module)
        if name.split(".")[0] not in {*sys.stdlib_module_names, *OURS, *allowed}
    ]


def test_pure_rooms_touch_no_clock_no_environment_no_loop() -> None:
    for module in (m for m in FILES if any(_is_in(m, room) for room in PURE)):
        assert not _heads(module) & IMPURE, module
        assert not [n.lineno for n in _nodes(module) if isinstance(n, ast.Await | ast.AsyncFunctionDef)], module
        assert not [line for line, called in _calls(module) if called == "print"], module


@pytest.mark.parametrize("room", LIGHT)
def test_what_runs_inside_an_engine_stays_light(room: str) -> None:
    """These are imported in the engine's process: the base install and the engine's own torch must do."""
    modules = [m for m in FILES if _is_in(m, room)]
    assert modules
    for module in modules:
        assert _heads(module) - sys.stdlib_module_names - set(OURS) <= {"msgpack", "msgspec", "torch"}, module


def test_adapters_know_one_engine_each() -> None:
    for module in FILES:
        seen = _heads(module) & {"vllm", "sglang"}
        assert len(seen) <= 1, module
        assert all(_is_in(module, f"kvbridge.adapters.{engine}") for engine in seen), module


def test_environment_is_read_in_config_only() -> None:
    may = ("kvbridge.config", "kvbridge.failpoints", "kvbridge.adapters")
    assert not [
        _at(module, node.lineno)
        for module in FILES
        if not any(_is_in(module, room) for room in may)
        for node in _nodes(module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in READS
    ]


def test_file_says_what_it_is_for() -> None:
    assert not [m for m, path in FILES.items() if path.read_text() and not ast.get_docstring(_tree(m))]


def test_functions_fit_a_screen() -> None:
    """Its parameters apart: a Triton kernel has one a line, and they are a list to look things up in."""
    assert not [
        f"{_at(module, node.lineno)} {node.name}: {size} lines"
        for module in FILES
        for node in _nodes(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.body[0].lineno + 1) > FUNCTION_LINES
    ]


def test_the_product_does_without_its_tools() -> None:
    """The simulator, the demo, the bench and the tests import it; nothing of it imports them."""
    assert not [m for m in FILES if _heads(m) & {"testing", "demo", "tests", "bench"}]


def test_a_class_name_stands_once() -> None:
    """Who searches for a name finds one thing."""
    tools = [path for folder in ("testing/sim", "demo") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert tools
    found: dict[str, list[str]] = {}
    for path in (*FILES.values(), *tools):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@pytest.mark.parametrize("folder", ["kernels", "proto"])
def test_containers_are_no_packages(folder: str) -> None:
    """The import names `kernels` and `proto` belong to others."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_every_room_is_watched() -> None:
    """A check that finds no files proves nothing."""
    for room in ("kvbridge_proto", "kvbridge.geometry", "kvbridge.exchange", "kvbridge.adapters.engine"):
        assert sum(_is_in(module, room) for module in FILES) > 3, room
    for room in (*ROOMS, *TOP, *PURE, *LIGHT):
        assert any(_is_in(module, room) for module in FILES), room
