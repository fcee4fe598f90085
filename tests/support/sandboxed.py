"""Runs inside the unit's sandbox: does what an agent on a GPU does at its first kernel, and prints the results."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src

LAUNCHER = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "stub", "", -1, methods};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&module); }
"""


@triton.jit  # type: ignore[untyped-decorator]
def copy(source, sink, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sink + at, tl.load(source + at, at < count), at < count)


def compiled() -> str:
    """Compile a kernel. This needs no GPU."""
    signature = {"source": "*i32", "sink": "*i32", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=copy, signature=signature, constexprs={"BLOCK": 128})
    return f"{len(triton.compile(source, target=GPUTarget('cuda', 90, 32)).asm['cubin'])} bytes"


def launched() -> str:
    """Compile, cache and load C code, as Triton does with its launcher."""
    return str(compile_module_from_src(src=LAUNCHER, name="stub").answer())


def stored() -> str:
    with tempfile.NamedTemporaryFile() as made:
        made.write(b"x")
        return str(Path(made.name).parent)


def at_home() -> str:
    """Write to ~/.nv, where the driver caches what it compiled."""
    Path("~/.nv").expanduser().mkdir()
    return str(Path("~").expanduser())


def outside() -> str:
    """The folders in which it can write but should not."""
    found = []
    for folder in ("/", "/tmp", "/var/tmp", "/var/cache", "/run", "/etc", "/usr", sys.argv[1]):
        try:
            Path(folder, f"kvbridge-{os.getpid()}").touch()
        except OSError:
            continue
        found.append(folder)
    return " ".join(found)


def tried(what: Callable[[], str]) -> str:
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({what.__name__: tried(what) for what in (stored, at_home, launched, compiled, outside)}))
