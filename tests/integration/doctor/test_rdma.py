"""Doctor's check of RDMA devices, over a /sys such as hosts with eight GPUs and their NICs have."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from msgspec import structs

from kvbridge.config import load
from kvbridge.doctor.finding import CheckOutcome, Finding, Subject
from kvbridge.doctor.rdma import near, ports, rdma
from testing.nursery import kvbridge

PAGE = (Path(__file__).parents[3] / "docs/rdma.md").read_text()

# PCI devices below /sys/devices, and their NUMA nodes: a GPU and a NIC under one switch, and two other NICs.
SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
PLACES = {
    "0000:18:00.0": (f"{SWITCH}/0000:17:00.0/0000:18:00.0", 0),  # the GPU
    "0000:1a:00.0": (f"{SWITCH}/0000:17:02.0/0000:1a:00.0", 0),
    "0000:2a:00.0": ("pci0000:27/0000:27:01.0/0000:2a:00.0", 0),
    "0000:9a:00.0": ("pci0000:97/0000:97:01.0/0000:9a:00.0", 1),
}
NICS = {"mlx5_0": "0000:1a:00.0", "mlx5_1": "0000:2a:00.0", "mlx5_2": "0000:9a:00.0"}
GPU = "0000:18:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for address, (place, node) in PLACES.items():
        device = root / "sys/devices" / place
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    for name, address in NICS.items():
        port = root / "sys/devices" / PLACES[address][0] / "infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port.parents[1] / "device").symlink_to(root / "sys/devices" / PLACES[address][0])
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")
        link = root / "sys/class/infiniband" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(port.parents[1])
    (root / "dev/infiniband").mkdir(parents=True)
    (root / "dev/infiniband/uverbs0").touch()
    (root / "proc/self").mkdir(parents=True)
    allows(root, 1 << 14)
    return root


def allows(root: Path, capabilities: int) -> None:
    (root / "proc/self/status").write_text(f"Name:\tkvbridge\nCapEff:\t{capabilities:016x}\n")


def found(root: Path, net_devices: str) -> Finding:
    config = load(flags={"device": "cpu"}, environment={})
    return rdma(Subject(structs.replace(config, net_devices=net_devices), None, {}), root)


def of(finding: Finding) -> tuple[CheckOutcome, str]:
    return finding.outcome, f"{finding.text} {finding.remedy}"


def test_says_what_there_is_and_whether_it_is_used(root: Path, tmp_path: Path) -> None:
    assert rdma(Subject(load(environment={}), None, {}), tmp_path / "none").outcome is CheckOutcome.NOT_HERE
    outcome, text = of(found(root, ""))
    assert outcome is CheckOutcome.OK and "mlx5_2:1 (InfiniBand, 400 Gb/sec (4X NDR), ACTIVE)" in text
    outcome, text = of(found(root, "eth0"))
    assert outcome is CheckOutcome.WARNING and "eth0 goes by TCP; here are mlx5_0:1" in text
    for named, shown in (("mlx5_1:1", "mlx5_1:1"), ("mlx5_1", "mlx5_1:1"), ("eth0,mlx5_1", "mlx5_1:1"), ("all", "mlx")):
        assert found(root, named).outcome is CheckOutcome.OK and found(root, named).text.startswith(shown)


def test_a_port_that_is_down_fails_if_it_is_named(root: Path) -> None:
    (root / "sys/class/infiniband/mlx5_1/ports/1/state").write_text("1: DOWN\n")
    outcome, text = of(found(root, "mlx5_0:1,mlx5_1:1"))
    assert outcome is CheckOutcome.FAILED and "mlx5_1:1 is not ACTIVE" in text
    assert found(root, "mlx5_0:1").outcome is CheckOutcome.OK
    assert found(root, "all").outcome is CheckOutcome.OK, "nobody named the one that is down"
    for name in NICS:
        (root / f"sys/class/infiniband/{name}/ports/1/state").write_bytes(b"1: DOWN\xff\n")
    assert found(root, "all").outcome is CheckOutcome.FAILED


def test_what_a_container_was_not_given_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    assert found(root, "mlx5_0").outcome is CheckOutcome.OK, "it has IPC_LOCK"
    allows(root, 0)
    outcome, text = of(found(root, "mlx5_0"))
    assert outcome is CheckOutcome.WARNING and "may lock 64 KiB only" in text and "IPC_LOCK" in text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
    assert "may lock 0 KiB only" in found(root, "mlx5_0").text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert found(root, "mlx5_0").outcome is CheckOutcome.OK
    (root / "dev/infiniband/uverbs0").unlink()
    outcome, text = of(found(root, "mlx5_0"))
    assert outcome is CheckOutcome.FAILED and "no uverbs device" in text


@pytest.mark.parametrize(
    ("named", "outcome", "text"),
    [
        ("mlx5_0:1", CheckOutcome.OK, "under the GPU's PCIe switch"),
        ("mlx5_1:1", CheckOutcome.WARNING, "on the GPU's NUMA node name mlx5_0:1 for this GPU: under the GPU's"),
        ("mlx5_2:1", CheckOutcome.WARNING, "on another NUMA node than the GPU name mlx5_0:1,mlx5_1:1 for this GPU"),
        ("mlx5_0:1,mlx5_2:1", CheckOutcome.WARNING, "on another NUMA node than the GPU name mlx5_0:1"),
    ],
)
def test_the_nearest_device_is_named_for_a_gpu(root: Path, named: str, outcome: CheckOutcome, text: str) -> None:
    there = ports(root)
    taken = [port for port in there if port.name in named.split(",")]
    said = near(root, GPU, "seen", taken, there)
    assert said.outcome is outcome and text in f"{said.text} {said.remedy}"


def test_a_nearer_port_that_is_down_is_not_advised(root: Path) -> None:
    (root / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    there = ports(root)
    assert near(root, GPU, "seen", [there[1]], there).outcome is CheckOutcome.OK
    assert "the kernel does not show" in near(root, "0000:77:00.0", "seen", [there[1]], there).text


def test_how_gpu_memory_is_reached_is_said(root: Path) -> None:
    there = ports(root)
    assert "DMA-BUF" in near(root, GPU, "seen", there[:1], there).text
    (root / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert "DMA-BUF" not in near(root, GPU, "seen", there[:1], there).text


def test_the_page_asks_doctor() -> None:
    said = kvbridge(*PAGE.partition("```bash\nkvbridge ")[2].partition("\n```")[0].split(), timeout_s=60)
    assert said.returncode == 0 and "RDMA devices" in said.stdout, said
