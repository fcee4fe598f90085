"""Check of the RDMA devices: which are there, which `net_devices` names, which is near the agent's GPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ..dataplane.resources import chosen_gpu
from ..values import Value
from .finding import Finding, Subject, failed, not_here, ok, warning

CAP_IPC_LOCK = 14  # its bit in CapEff (include/uapi/linux/capability.h)
NEAR = ("under the GPU's PCIe switch", "on the GPU's NUMA node", "on another NUMA node than the GPU")
DEVICE_FILES = "dev/infiniband"
REACHES_GPU = ("nvidia_peermem", "nv_peer_mem")


class RdmaPort(Value):
    """A port of an RDMA device, as the kernel shows it. `name` is UCX's: "mlx5_0:1"."""

    name: str
    state: str  # such as "ACTIVE"
    rate: str  # such as "400 Gb/sec (4X NDR)"
    link_layer: str  # InfiniBand, Ethernet (RoCE), or Unspecified (EFA)
    place: Path  # of its PCI device below /sys/devices
    numa_node: int  # -1 if the kernel does not know it

    @property
    def text(self) -> str:
        return f"{self.name} ({self.link_layer}, {self.rate}, {self.state})"

    def distance(self, gpu: Path, gpu_node: int) -> int:
        """Index into NEAR: 0 if a bridge below the root leads to both, 1 if they share a NUMA node, else 2."""
        shared = os.path.commonpath([self.place, gpu])
        if Path(shared).name.count(":") == 2:  # a PCI address, "0000:15:00.0": not a root, "pci0000:15"
            return 0
        return 1 if self.numa_node == gpu_node >= 0 else 2


def rdma(subject: Subject, root: Path = Path("/")) -> Finding:
    """Whether the network of `net_devices` is RDMA, ready, and near the GPU. `root` is the file system looked at."""
    named = [each for each in subject.config.net_devices.split(",") if each]
    there = ports(root)
    if not there:
        return not_here("no RDMA device here (/sys/class/infiniband)")
    listed = ", ".join(port.text for port in there)
    if not named:
        return ok(f"{listed}; net_devices is empty, so this host alone is served")
    taken = there if "all" in named else [port for port in there if {port.name, port.name.partition(":")[0]} & {*named}]
    if not taken:
        return warning(f"net_devices {','.join(named)} goes by TCP; here are {listed}", "name one of them to use RDMA")
    text = ", ".join(port.text for port in taken)
    down = [port.name for port in taken if port.state != "ACTIVE"]
    if down and ("all" not in named or len(down) == len(taken)):
        return failed(f"{text}: {', '.join(down)} is not ACTIVE", "see cable, switch and `ibstat`, or name another")
    if not list((root / DEVICE_FILES).glob("uverbs*")):
        remedy = "give the container the NIC (a resource of your network's device plugin, or --device /dev/infiniband)"
        return failed(f"{text}: /{DEVICE_FILES} has no uverbs device, so UCX cannot use it", remedy)
    if (limit := _lock_limit(root)) is not None:
        remedy = "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1, or the capability IPC_LOCK"
        return warning(f"{text}: may lock {limit >> 10} KiB only; registering slots fails beyond", remedy)
    gpu = chosen_gpu(subject.config.device)
    return ok(text) if gpu is None else near(root, gpu.pci_address, text, taken, there)


def near(root: Path, address: str, text: str, taken: list[RdmaPort], there: list[RdmaPort]) -> Finding:
    """Whether the ports taken are the nearest to the GPU at this PCI address. Pure but for what sysfs says."""
    device = root / "sys/bus/pci/devices" / address
    if not device.exists():
        return ok(f"{text}; where the GPU {address} is, the kernel does not show")
    place, node = device.resolve(), _number(device / "numa_node")
    ranks = {port.name: port.distance(place, node) for port in there if port.state == "ACTIVE"}
    far = max(ranks[port.name] for port in taken)
    text = f"{text}; {NEAR[far]}"
    if nearer := [name for name, rank in ranks.items() if rank < far]:
        return warning(text, f"name {','.join(nearer)} for this GPU: {NEAR[min(ranks.values())]}")
    if not any((root / "sys/module" / module).exists() for module in REACHES_GPU):
        text += "; no nvidia_peermem: GPU memory is reached by DMA-BUF, if driver and kernel have it"
    return ok(text)


def ports(root: Path) -> list[RdmaPort]:
    """All ports of all RDMA devices, by name."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = port.parents[1] / "device"
        found.append(
            RdmaPort(
                f"{port.parents[1].name}:{port.name}",
                _text(port / "state").partition(": ")[2],
                _text(port / "rate"),
                _text(port / "link_layer"),
                device.resolve(),
                _number(device / "numa_node"),
            )
        )
    return found


def _lock_limit(root: Path) -> int | None:
    """How many bytes this process may lock; None if there is no limit, or with the capability IPC_LOCK."""
    status = _text(root / "proc/self/status")
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or int(capabilities, 16) >> CAP_IPC_LOCK & 1 else soft


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return "unknown"


def _number(path: Path) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return -1
