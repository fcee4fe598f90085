"""`kvbridge doctor`: checks the machine and an agent's options, and moves bytes by every route."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvbridge_proto.status import Status
from rich.table import Table
from rich.text import Text

from ..config import of_libraries, resolve
from ..doctor import machine, peer, rdma, routes, settings
from ..doctor.entries import of_check, of_code
from ..doctor.finding import CheckOutcome, DoctorCheck, Finding, Subject, failed
from ..errors import KVBridgeError, OperatorError, did_you_mean
from ..local_agents import ask
from ..oneline import plain
from .console import stdout, write

STYLES = {
    CheckOutcome.OK: "green",
    CheckOutcome.WARNING: "yellow",
    CheckOutcome.FAILED: "bold red",
    CheckOutcome.NOT_HERE: "dim",
}
CHECKS = (
    DoctorCheck("gpu", "GPU and driver", machine.gpu),
    DoctorCheck("gpu-ipc", "GPU memory between processes", machine.gpu_ipc),
    DoctorCheck("allocator", "allocator", machine.allocator),
    DoctorCheck("mps", "MPS", machine.mps),
    DoctorCheck("namespaces", "PID and IPC namespaces", machine.namespaces),
    DoctorCheck("shm", "shared memory", machine.shm),
    DoctorCheck("ptrace", "reading another process", machine.ptrace),
    DoctorCheck("clock", "clock", machine.clock),
    DoctorCheck("keys", "keys", settings.keys),
    DoctorCheck("sockets", "sockets", settings.sockets),
    DoctorCheck("listen", "address for other agents", settings.listen),
    DoctorCheck("metrics", "address for Prometheus", settings.metrics),
    DoctorCheck("rdma", "RDMA devices", rdma.rdma),
    DoctorCheck("nixl", "NIXL", routes.nixl),
    *routes.checks(),
    DoctorCheck("peer", "another agent", peer.peer),
)


def run(
    path: str | None,
    flags: Mapping[str, str | None],
    only: Sequence[str],
    address: str,
    as_json: bool,
    prove_route: bool = False,
) -> None:
    """Run the checks, and print what each finds as soon as it is found.

    Raises OperatorError for options that no agent starts with, and (`check_failed`) if a check failed.
    """
    config, _ = resolve(path, flags)
    chosen = [_named(name) for name in only] or list(CHECKS)
    subject = Subject(config, _status(config.socket), of_libraries(), address, prove_route)
    found = list(looked(chosen, subject)) if as_json else _shown(chosen, subject)
    if as_json:
        write([_plain(check, finding) for check, finding in found])
    if bad := [check.name for check, finding in found if finding.outcome is CheckOutcome.FAILED]:
        raise OperatorError("check_failed", f"{len(bad)} of {len(found)} checks: {', '.join(bad)}")


def looked(checks: Iterable[DoctorCheck], subject: Subject) -> Iterator[tuple[DoctorCheck, Finding]]:
    """What each check finds. A check that raises has failed."""
    for check in checks:
        try:
            yield check, check.look(subject)
        except KVBridgeError as error:
            yield check, failed(f"{error.code}: {error}", of_code(error.code))
        except OSError as error:
            yield check, failed(str(error), "see whether this user may do that")


def _named(name: str) -> DoctorCheck:
    names = {check.name: check for check in CHECKS}
    if name not in names:
        raise OperatorError("bad_option", f"only: {name}: no such check; {did_you_mean(name, names)}")
    return names[name]


def _status(path: str) -> Status | None:
    try:
        return ask(path)
    except OperatorError:
        return None


def _shown(checks: Sequence[DoctorCheck], subject: Subject) -> list[tuple[DoctorCheck, Finding]]:
    """What each check finds, as soon as it is found. A terminal shows meanwhile which one is at work."""
    console = stdout()
    kept = []
    for number, each in enumerate(checks, 1):
        with console.status(f"{number} of {len(checks)}: {each.title}"):  # nothing where there is no terminal
            ((check, finding),) = looked([each], subject)
        kept.append((check, finding))
        told = f"{check.title}: {plain(finding.text)}"
        if finding.remedy:
            told += f"\n{plain(finding.remedy)}"
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_column(width=max(map(len, CheckOutcome)), no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(Text(finding.outcome, style=STYLES[finding.outcome]), Text(told))
        if finding.remedy:
            row.add_row("", Text(of_check(check.name), style="dim"))
        console.print(row)
    return kept


def _plain(check: DoctorCheck, finding: Finding) -> dict[str, str]:
    return {
        "check": check.name,
        "outcome": finding.outcome.value,
        "text": finding.text,
        "remedy": finding.remedy,
        "entry": of_check(check.name) if finding.remedy else "",
    }
