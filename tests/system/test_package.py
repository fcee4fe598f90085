"""The wheel, built from the sdist, in a clean environment that has only what the metadata asks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.packaged import PROJECT, PYTHONS, ROOT, built_wheel, told

# Only machines with a GPU need them: constraints-gpu.txt has them, constraints.txt leaves them out.
FOR_GPUS = {"cuda-bindings", "nixl-cu12"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and what its extra `agent` names, by links to ours."""
    return environment(tmp_path_factory.mktemp("clean"), wheel, "agent")


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(extra):
        for part in {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "bin")}:
            place = Path(str(distribution(name).locate_file(part)))
            if place.exists() and part != "__pycache__" and not (site / part).exists():
                (site / part).symlink_to(place)
    into = str(folder / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", into, "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", wheel], check=True)
    return folder / "bin"


def needed(extra: str) -> list[str]:
    """Every package that `kvbridge[extra]` asks for, and those ask for. Raises for one that this environment lacks."""
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, ())]
    found: dict[str, None] = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        asked = requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", extra))
        if name in found or name in FOR_GPUS or not asked:
            continue
        try:
            wanted += distribution(name).requires or ()
            assert requirement.specifier.contains(distribution(name).version, prereleases=True), requirement
        except PackageNotFoundError:
            raise AssertionError(f"{requirement} is not here") from None
        found[name] = None
    return list(found)


def test_wheel_has_all_of_ours_and_nothing_else(wheel: Path) -> None:
    roots = (ROOT, ROOT / "proto", ROOT / "kernels")
    ours = {
        str(path.relative_to(root))
        for root, name in zip(roots, ("kvbridge", "kvbridge_proto", "kvbridge_kernels"), strict=True)
        for path in (root / name).rglob("*")
        if path.suffix == ".py" or path.name in ("py.typed", "troubleshooting.txt")
    }
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == ours and sum(name.endswith("py.typed") for name in ours) == 3


def test_the_version_is_written_once(wheel: Path, clean: Path, tmp_path: Path) -> None:
    version = PROJECT["version"]
    assert wheel.name == f"kvbridge-{version}-py3-none-any.whl"
    assert told([clean / "kvbridge", "--version"], tmp_path) == f"kvbridge {version}\n"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_the_wheel_answers(clean: Path, tmp_path: Path) -> None:
    where = told([clean / "python", "-c", "import kvbridge.cli as c; print(c.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(clean.parent)
    assert "Commands" in told([clean / "kvbridge", "--help"], tmp_path)
    found = json.loads(told([clean / "kvbridge", "config", "show", "--json"], tmp_path))
    assert found["options"]["name"]["value"] == "agent-0"


def test_doctor_of_the_wheel_brings_the_page_that_it_quotes(clean: Path, tmp_path: Path) -> None:
    said = told([clean / "kvbridge", "doctor", "--only", "metrics", "--metrics", "", "--json"], tmp_path)
    (found,) = json.loads(said)
    assert found["outcome"] == "warning" and found["entry"].startswith("As listen, for the port of"), found


@pytest.mark.parametrize("version", PYTHONS)
def test_every_python_that_is_named_installs_the_wheel(version: str, wheel: Path, tmp_path: Path) -> None:
    """Without what it needs: that is not here for other Pythons. Each of its files is Python to this one."""
    python = python_of(version)
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "clean"], check=True)
    into = str(tmp_path / "clean/bin/python")
    pip = [sys.executable, "-m", "pip", "--python", into, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    assert told([tmp_path / "clean/bin/kvbridge", "--version"], tmp_path) == f"kvbridge {PROJECT['version']}\n"
    told(
        [tmp_path / "clean/bin/python", "-m", "compileall", "-q", "-f", *(tmp_path / "clean").glob("lib/*/*")], tmp_path
    )


def python_of(version: str) -> str:
    """A Python of this version, of pyenv's too. Skips where there is none."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    for found in filter(None, (shutil.which(f"python{version}"), sys.executable, *map(str, kept))):
        asked = [found, "-c", "import sys; print(sys.executable, *sys.version_info[:2])"]
        path, *numbers = subprocess.run(asked, capture_output=True, text=True).stdout.split() or [""]
        if ".".join(numbers) == version:
            return path
    pytest.skip(f"no Python {version} here")


def test_the_base_install_is_what_an_engine_needs(wheel: Path, tmp_path: Path) -> None:
    base = environment(tmp_path / "base", wheel, "")
    assert sorted(needed("")) == ["msgpack", "msgspec"]
    told([base / "python", "-c", "import kvbridge_proto.engine, kvbridge.config, kvbridge.errors"], tmp_path)
    done = subprocess.run([base / "kvbridge", "status"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'kvbridge[agent]'" in done.stderr


def test_the_wheel_tells_type_checkers_its_types(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("from kvbridge.errors import did_you_mean\ndid_you_mean(5, [])\n")
    places = ["--python-executable", str(clean / "python"), "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *places]
    done = subprocess.run([*command, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert 'Argument 1 to "did_you_mean" has incompatible type "int"' in done.stdout, done.stdout + done.stderr
