"""Facts: what a machine says about itself that decides how fast a training step is."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from rowmesh._support.control_groups import processor_limit
from rowmesh.mesh.threads import processors
from rowmesh.observe.allocator import VARIABLES as MALLOC
from rowmesh.observe.allocator import allocator
from rowmesh.observe.environment import environment_report

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *WAITING, "GLOO_SOCKET_IFNAME", "GLIBC_TUNABLES")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The hardware and software here; None where the system does not say.

    Attributes:
        system: as Python calls it: "linux", "darwin", "win32".
        versions: of packages, by name.
        processors: that this process may run on.
        all_processors: of the machine.
        threads_per_core: processors of a core.
        processor_limit: the time of how many processors the control groups of this process may use.
        load: programs that wanted to run in the last minute.
        allocator: what `malloc` is: "glibc", "jemalloc", …, or "system".
        variables: of the environment, those that matter here.
        huge_pages: when memory is put on huge pages: "always", "madvise" or "never".
        kernel_folder: where compiled kernels are kept, if anywhere.
        shares_memory: whether ranks can read each other's memory.
        shm_bytes: the size of /dev/shm.
        open_files: how many a process may have open.
        gpus: names.
        has_nccl: whether torch was built with it.
        address: of this host by its own name.
        interfaces: of the network that are up, without the loopback.
    """

    system: str
    versions: dict[str, str | None]
    processors: int
    all_processors: int
    threads_per_core: int
    processor_limit: float | None
    load: float | None
    allocator: str
    variables: dict[str, str]
    huge_pages: str | None
    kernel_folder: str | None
    shares_memory: bool
    shm_bytes: int | None
    open_files: int | None
    gpus: tuple[str, ...]
    has_nccl: bool
    address: str | None
    interfaces: tuple[str, ...]


def read_facts(*, network: bool = True) -> Facts:
    """Reads the facts of this machine.

    Args:
        network: whether to ask for the address of this host's name, for which a broken resolver takes seconds.

    Example:
        >>> read_facts().processors >= 1
        True
    """
    report = environment_report()
    hardware, libraries = report["hardware"], report["torch"]
    logical, physical = psutil.cpu_count() or 1, psutil.cpu_count(logical=False)
    return Facts(
        system=sys.platform,
        versions=report["software"],
        processors=len(processors()),
        all_processors=logical,
        threads_per_core=max(logical // (physical or logical), 1),
        processor_limit=processor_limit(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        allocator=allocator(),
        variables={name: os.environ[name] for name in (*VARIABLES, *MALLOC) if name in os.environ},
        huge_pages=hardware["transparent huge pages"],
        kernel_folder=hardware["kernel cache"],
        shares_memory=hardware["shared memory between ranks"] != "none",
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=_open_files(),
        gpus=tuple(libraries["cuda devices"]),
        has_nccl=libraries["nccl"],
        address=_address() if network else None,
        interfaces=_interfaces(),
    )


def _open_files() -> int | None:
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _interfaces() -> tuple[str, ...]:
    try:
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        addresses = psutil.net_if_addrs()
    except OSError:  # sealed off
        return ()
    inside = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        name
        for name in sorted(up & set(addresses))
        if any(each.family in inside and not each.address.startswith(("127.", "::1")) for each in addresses[name])
    )
