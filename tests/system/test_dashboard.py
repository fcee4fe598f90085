"""The dashboard is one that Grafana can show: its own types and its list of units say so, and a few rules of ours.

Grafana itself is in none of the package registries, nor is a JSON schema of dashboards. Its types are, as TypeScript
(`@grafana/schema`), so the compiler judges the dashboard as a literal of them. They know nothing of what a target of
Prometheus may have; that is a rule here. (`grafana-foundation-sdk` reads any JSON without complaint.)
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitoring import ROOT, dashboard

GRAFANA = ROOT / ".grafana"
SCHEMA = "@grafana/schema/dist/esm/raw/composable"
PANELS = dashboard()["panels"]
# A text of JSON is no enum's member, though it is its value.
JSON_OF = "type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;"
COMPILE = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]


def needs_grafana() -> None:
    if not (GRAFANA / ".ready").exists():
        pytest.skip("Grafana's types are not here: make .grafana/.ready (needs npm)")


def kinds() -> dict[str, str]:
    """Which module has the types of a kind of panel."""
    found = (GRAFANA / "node_modules" / SCHEMA).glob("*/panelcfg/x/*_types.gen.d.ts")
    return {path.parts[-4]: f"{SCHEMA}/{'/'.join(path.parts[-4:])}".removesuffix(".d.ts") for path in found}


def program(boards: list[dict[str, Any]]) -> list[str]:
    """One line for each thing that has a type; each names the board that it is of."""
    known = kinds()
    lines = ["import type { Dashboard, Panel } from '@grafana/schema';", JSON_OF]
    lines += [f"import type * as {kind} from '{known[kind]}';" for kind in {p["type"] for p in PANELS}]
    for number, board in enumerate(boards):
        own = {key: value for key, value in board.items() if key != "panels"}
        lines.append(f"export const b{number}: Json<Omit<Dashboard, 'panels'>> = {json.dumps(own)};")
        for panel in board["panels"]:
            kind, name = panel["type"], f"b{number}_{panel['id']}"
            lines.append(f"export const {name}: Json<Panel> = {json.dumps(panel)};")
            lines.append(f"export const {name}_options: Json<{kind}.Options> = {json.dumps(panel['options'])};")
            custom = json.dumps(panel["fieldConfig"]["defaults"].get("custom", {}))
            lines.append(f"export const {name}_custom: Json<{kind}.FieldConfig> = {custom};")
    return lines


def faults(folder: Path, *boards: dict[str, Any]) -> list[list[str]]:
    """What Grafana's types have against each."""
    needs_grafana()
    (folder / "node_modules").symlink_to(GRAFANA / "node_modules")
    lines = program(list(boards))
    (folder / "boards.ts").write_text("\n".join(lines) + "\n")
    compiler = GRAFANA / "node_modules/typescript/bin/tsc"
    told = subprocess.run(["node", compiler, *COMPILE, "boards.ts"], cwd=folder, capture_output=True, text=True)
    found: list[list[str]] = [[] for _ in boards]
    for line, text in re.findall(r"^boards\.ts\((\d+),\d+\): (.*)$", told.stdout, re.MULTILINE):
        name = re.search(r"export const (b(\d+)\w*)", lines[int(line) - 1])
        assert name, told.stdout
        found[int(name[2])].append(f"{name[1]}: {text}")
    assert (told.returncode == 0) == (not any(found)), told.stdout + told.stderr
    return found


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    board = dashboard()
    change(board)
    return board


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "schemaVersion": lambda board: board.pop("schemaVersion"),
    "refreshes": lambda board: board.update(refreshes="30s"),
    "type": lambda board: board["templating"]["list"][1].update(type="queries"),
    "includeAll": lambda board: board["templating"]["list"][1].update(includeAll="yes"),
    "titel": lambda board: board["panels"][0].update(titel="Fetches"),
    "h": lambda board: board["panels"][1]["gridPos"].pop("h"),
    "w": lambda board: board["panels"][1]["gridPos"].update(w="half"),
    "unit": lambda board: board["panels"][2]["fieldConfig"]["defaults"].update(unit=5),
    "mode": lambda board: board["panels"][3]["fieldConfig"]["defaults"]["custom"]["stacking"].update(mode="stacked"),
    "fillOpacities": lambda board: board["panels"][4]["fieldConfig"]["defaults"]["custom"].update(fillOpacities=4),
    "tooltip": lambda board: board["panels"][5]["options"].pop("tooltip"),
    "placement": lambda board: board["panels"][6]["options"]["legend"].update(placement="below"),
}


def test_grafanas_types_take_it_and_see_what_is_wrong(tmp_path: Path) -> None:
    ours, *wrong = faults(tmp_path, dashboard(), *map(changed, WRONG.values()))
    assert ours == []
    for field, found in zip(WRONG, wrong, strict=True):
        assert len(found) == 1, (field, found)


def test_every_panel_is_of_a_kind_that_grafana_has() -> None:
    needs_grafana()
    known = kinds()
    assert {panel["type"] for panel in PANELS} <= known.keys() and len(known) > 15 and "timeserie" not in known


def test_every_unit_is_one_that_grafana_has() -> None:
    needs_grafana()
    text = (GRAFANA / "package/dist/esm/valueFormats/categories.mjs").read_text()
    known = set(re.findall(r'\bid: "([^"]+)"', text))
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS} <= known
    assert len(known) > 200 and "seconds" not in known


@pytest.mark.parametrize("field", ["id", "title", "description"])
def test_every_panel_has_one_of_its_own(field: str) -> None:
    assert [each for each, times in Counter(panel[field] for panel in PANELS).items() if times > 1 or not each] == []


def test_panels_lie_beside_each_other() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}

    assert all(x < 24 for panel in PANELS for x, _ in cells(panel))
    assert not [(a["title"], b["title"]) for a, b in combinations(PANELS, 2) if cells(a) & cells(b)]


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_every_target_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    chosen = [each["name"] for each in dashboard()["templating"]["list"] if each["type"] == "datasource"]
    assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{chosen[0]}}}"} and len(chosen) == 1
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
    for target in panel["targets"]:
        assert target.keys() == {"refId", "expr", "legendFormat"} and all(target.values())
        assert re.search(r'[{,]instance=~"\$(instance|proxy)"', target["expr"])
