"""What pages name exists: tests by their whole path, links and anchors, options; and each page can be found."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest

from kvbridge.options import defaults, options
from kvbridge.proxy.fleet import Waits
from tests.support.cited import ROOT, cited
from tests.support.page_blocks import BLOCKS
from tests.support.pages import blocks

FOLDERS = ("docs", "deploy", "proto", "kernels", "bench", "tests")
CODE = ("kvbridge", "kernels", "proto", "testing", "tests", "bench", "demo")
FILES = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
LINK = re.compile(r'\]\(([^()\s]+)\)|\b(?:href|src|srcset)="([^"]+)"')
BROKEN = re.compile(r"\]\((?![^()\s]+\)).{0,40}")  # a blank or a line's end before it is closed, or no target


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen: Counter[str] = Counter()
    found = set()
    for name in names:
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(name: str) -> Iterator[tuple[str, str]]:
    """Of each link of a page that leads into this repository: a path from its root, and an anchor or ""."""
    for found in LINK.finditer(prose(PAGES[name])):
        path, _, anchor = (found[1] or found[2]).partition("#")
        if "://" not in path:
            target = (ROOT / name).parent / path if path else ROOT / name
            yield str(target.resolve().relative_to(ROOT)), anchor


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_is_named_is_there(name: str) -> None:
    assert [each for each in cited(PAGES[name]) if not each.exists] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    assert [path for path, _ in links(name) if not (ROOT / path).exists()] == []
    anchored = [(path, anchor) for path, anchor in links(name) if anchor]
    assert [(path, anchor) for path, anchor in anchored if anchor not in anchors(PAGES[path])] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_is_closed_and_has_no_blank(name: str) -> None:
    """Else its target, and what stood behind it, may be gone."""
    assert BROKEN.findall(re.sub(r"`[^`\n]+`", "", prose(PAGES[name]))) == []


def test_functions_that_the_architecture_names_are_in_the_files_it_names() -> None:
    table = PAGES["docs/architecture.md"].partition("### A pull, function by function")[2].partition("\n## ")[0]
    rows = re.findall(r"\]\(\.\./(kvbridge/[\w/]+\.py)\) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) > 10
    named = [(path, name) for path, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert [each for each in named if not re.search(rf"def {each[1]}\(", (ROOT / each[0]).read_text())] == []


@pytest.mark.parametrize(("name", "least"), [("failures", 15), ("vllm", 3), ("sglang", 4)])
def test_functions_of_a_page_are_in_the_files_it_names(name: str, least: int) -> None:
    named = re.findall(r"\[`(\w+)`\]\(\.\./(kvbridge/[\w/]+\.py)\)", PAGES[f"docs/{name}.md"])
    assert len(named) >= least
    assert [each for each in named if not re.search(rf"def {each[0]}\(", (ROOT / each[1]).read_text())] == []


def test_names_that_contributors_are_told_are_in_the_code() -> None:
    words = set(re.findall(r"`(_?[A-Za-z]+_\w+|[A-Z]+\w+)`", PAGES["CONTRIBUTING.md"]))
    code = "\n".join(each.read_text() for top in CODE for each in (ROOT / top).rglob("*.py"))
    code += (ROOT / "Makefile").read_text()
    assert len(words) > 40
    assert [word for word in words if not re.search(rf"\b{word}\b", code)] == []


# A constant of the code is a row of docs/timeouts.md, with its file and its value, or it is no timeout.
ROW = re.compile(r"^\| \[`(\w+_S)`\]\(\.\./([\w/]+\.py)\) \| ([\d.]+) \|", re.MULTILINE)
# How often a loop looks or shows life. In another file a name as general as these is that of a timeout.
LOOKS = {
    "kvbridge/adapters/engine/conversation.py": {"CHECK_S"},
    "kvbridge/adapters/engine/link.py": {"WATCH_S", "LEFT_S"},
    "kvbridge/adapters/sglang/manager.py": {"EARLY_S", "REGISTER_S", "RANKS_S"},
    "kvbridge/agent/daemon.py": {"TICK_S", "IDLE_TICK_S"},
    "kvbridge/agent/rebuild.py": {"REBUILD_LOOK_S", "LOOK_PAUSED_S"},
    "kvbridge/agent/runners.py": {"CHECK_UNREAD_S", "KEEP_S"},
    "kvbridge/commands/drain.py": {"DRAIN_LOOK_S"},
    "kvbridge/commands/status.py": {"SCREEN_S"},
    "kvbridge/commands/up.py": {"REST_S"},
    "kvbridge/dataplane/data_plane.py": {"ALIVE_S", "IDLE_S"},
    "kvbridge/dataplane/threads.py": {"WATCHDOG_LOOK_S"},
    "kvbridge/proxy/pulse.py": {"BEAT_S"},
    "kvbridge/transport/control.py": {"LINK_TICK_S", "REST_TICK_S", "NEXT_SOCKETS_S", "PING_ROUND_S"},
}
LOOKS_RARELY = {("kvbridge/adapters/sglang/manager.py", "RANKS_S"): 5}
# What else is no timeout in these files.
NO_TIMEOUTS = {
    "kernels/kvbridge_kernels/tiling.py": {"LEAST_GB_S"},
    "kvbridge/adapters/sglang/manager.py": {"TURN_S", "IDLE_REST_S"},
    "kvbridge/adapters/vllm/scheduler.py": {"SHORT_WARN_S"},
    "kvbridge/adapters/vllm/step.py": {"EMPTY_STEP_REST_S", "LONG_REST_S"},
    "kvbridge/agent/daemon.py": {"SWITCH_S"},
    "kvbridge/agent/logs.py": {"WINDOW_S"},
    "kvbridge/agent/metrics.py": {"WARN_SOON_S", "WARN_EVERY_S"},
    "kvbridge/agent/peers.py": {"WARN_REJECTED_S"},
    "kvbridge/agent/runners.py": {"WARN_LATE_WRITES_S"},
    "kvbridge/agent/scraping.py": {"POLL_S"},
    "kvbridge/agent/spans.py": {"WARN_DROPPED_SPANS_S"},
    "kvbridge/dataplane/data_plane.py": {
        *("POLL_NAP_S", "POLL_NAPS_S", "LONGEST_NAP_S", "LINGER_ON_GPU_S", "GATHERING_S", "LOOKING_S"),
    },
    "kvbridge/dataplane/threads.py": {"LINGER_NAP_S", "SPIN_S"},
    "kvbridge/failpoints.py": {"LONGEST_S"},
    "kvbridge/proxy/sparing.py": {"EVERY_S"},
    "kvbridge/routes/rate.py": {"SLOW_BYTES_PER_S", "SLOW_S"},
    "proto/kvbridge_proto/common.py": {"DAY_S"},
}


def of_files(names: dict[str, set[str]]) -> set[tuple[str, str]]:
    return {(path, name) for path, found in names.items() for name in found}


def times() -> dict[tuple[str, str], float]:
    """All constants of the product whose names end in `_S`, by file and name."""
    found, known = dict[tuple[str, str], float](), dict[str, object]()
    folders = ("proto/kvbridge_proto", "kvbridge/exchange", "kvbridge", "kernels/kvbridge_kernels")
    for path in dict.fromkeys(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    pairs = [(name, value)]
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    pairs = [(ast.unparse(name), value) for name, value in zip(names, values, strict=True)]
                case _:
                    continue
            for name, value in pairs:
                with contextlib.suppress(NameError, SyntaxError, TypeError, AttributeError):
                    known[name] = eval(ast.unparse(value), {"__builtins__": {}}, known)
                    if name.endswith("_S") and isinstance(known[name], float | int):
                        found[str(path.relative_to(ROOT)), name] = float(known[name])
    return found


def test_every_timeout_is_told_with_its_value() -> None:
    page = PAGES["docs/timeouts.md"]
    told = {(path, name): float(value) for name, path, value in ROW.findall(page)}
    pauses = page.partition("## Not timeouts")[2]
    looks, others = of_files(LOOKS), of_files(NO_TIMEOUTS)
    found = times()
    left = {each: s for each, s in found.items() if each not in looks | others}
    assert len(left) > 70 and told == pytest.approx(left)
    assert {name for _, name in looks | others} == set(re.findall(r"`(\w+_S)`", pauses))
    assert {each: found[each] for each in looks if found[each] > 1} == LOOKS_RARELY


def test_defaults_of_settings_are_told_as_they_are() -> None:
    page = PAGES["docs/timeouts.md"]
    told = dict(re.findall(r"^\| \[`(\w+_s)`\]\(configuration.+?\| (\d+) \|", page, re.MULTILINE))
    ours = {name: value for name, value in defaults().items() if name.endswith("_s") and value is not None}
    assert {name: float(value) for name, value in told.items()} == ours
    waits = dict(re.findall(r"^\| `(\w+_s)` \| (\d+) \|", page.partition("## The proxy")[2], re.MULTILINE))
    assert {name: float(value) for name, value in waits.items()} == {
        each.name: each.default for each in dataclasses.fields(Waits)
    }


# At least seven hexadecimal digits, of which seven are looked at. Numbers alone must be called a commit.
COMMIT = re.compile(r"\b((?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}|(?<=commit )\d{7})[0-9a-f]{0,3}\b")
RESULTS = {str(path.relative_to(ROOT)): path for path in (ROOT / "bench" / "results").glob("*.*")}


def commits(name: str) -> set[str]:
    """Those that a page names, or a file of figures."""
    if name in PAGES:
        return set(COMMIT.findall(PAGES[name]))
    text = RESULTS[name].read_text()
    told = text if name.endswith(".txt") else " ".join(re.findall(r'"commit": "[^"]*"', text))
    return set(COMMIT.findall(told))


def history() -> set[str]:
    """The commits of which this tree is made, by seven digits. Nobody else can have one that was never landed."""
    git = [shutil.which("git") or "true", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True).stdout
    if shallow.strip() != "false":
        pytest.skip("no history of commits here")
    return {each[:7] for each in subprocess.check_output([*git, "rev-list", "HEAD"], text=True).split()}


def test_every_file_of_figures_is_named_by_a_page() -> None:
    """One that later figures replaced is in the history."""
    told = "".join(PAGES.values())
    assert [name for name in RESULTS if name.rpartition("/")[2] not in told] == []


def test_nothing_that_is_built_or_fetched_is_committed() -> None:
    """One who clones would get it; make fetches it again."""
    history()
    named = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-ci", "--exclude-standard"], text=True)
    assert named.split() == []


def test_every_commit_that_is_named_is_one_of_the_history() -> None:
    named = {name: commits(name) for name in [*PAGES, *RESULTS]}
    assert len(set().union(*named.values())) > 40
    ours = history()
    assert {name: found - ours for name, found in named.items() if found - ours} == {}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, fresh = set[str](), {"README.md"}
    while fresh:
        reached |= fresh
        fresh = {path for path, _ in chain.from_iterable(map(links, fresh)) if path in PAGES} - reached
    assert PAGES.keys() - reached == set()


def test_every_option_that_is_shown_is_one() -> None:
    shown = re.findall(r"^(\w+) = ", PAGES["SECURITY.md"], re.MULTILINE)
    assert {"key", "peers"} <= set(shown) <= options().keys()


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_commands_is_run_by_a_test_or_it_is_said_why_not(name: str) -> None:
    """A new block goes into tests/support/page_blocks.py, with the test that runs it."""
    known, found = BLOCKS.get(name, []), blocks(name)
    assert [begins for begins, _ in known] == [
        text[: len(begins)] for text, (begins, _) in zip(found, known, strict=False)
    ]
    assert not found[len(known) :], f"blocks that nothing is said of: {found[len(known) :]}"
    assert [each for _, said in known for each in cited(said) if not each.exists] == []
