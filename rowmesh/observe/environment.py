"""Environment of a run, on which it depends beside its configuration: versions, processor, memory, communication."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rowmesh._support.control_groups import control_groups
from rowmesh._support.memory import available_bytes

PACKAGES = ("rowmesh", "torch", "numpy", "numba", "triton", "pyarrow", "pydantic")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def environment_report() -> dict[str, dict[str, Any]]:
    """Sections of names and values, all of them JSON.

    >>> sorted(environment_report())
    ['hardware', 'software', 'torch', 'variables']
    """
    return {
        "software": _software(),
        "hardware": _hardware(),
        "torch": _torch(),
        "variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def environment_text(report: dict[str, dict[str, Any]]) -> str:
    """The report, one `name  value` a line under the name of its section."""
    width = max(len(name) for section in report.values() for name in section)
    lines = []
    for title, section in report.items():
        lines += [title, *(f"  {name:<{width}}  {_plain(value)}" for name, value in section.items())]
    return "\n".join(lines)


def _software() -> dict[str, Any]:
    versions = {name: _version(name) for name in PACKAGES}
    return {"system": platform.platform(), "python": sys.version.split()[0], **versions}


def _hardware() -> dict[str, Any]:
    import llvmlite.binding as llvm

    from rowmesh.ops.compiled import cache_folder

    memory = psutil.virtual_memory()
    return {
        "processor": _processor_name(),
        "llvm target": llvm.get_host_cpu_name(),  # what Numba compiles its kernels for
        "kernel cache": cache_folder(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": memory.total,
        "memory_available_bytes": available_bytes(),
        "memory_limit_bytes": min((group.limit_bytes for group in control_groups()), default=None),
        "transparent huge pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "shared memory huge pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "shared memory between ranks": _shared_memory(),
    }


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    return {
        "build": torch.__config__.show().splitlines()[1].strip(" -"),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
        "cuda devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _chosen(path: Path) -> str | None:
    """The word in brackets of a kernel setting such as `always [madvise] never`."""
    try:
        text = path.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _shared_memory() -> str:
    """How ranks of a host can share tables: in anonymous files, bound by memory, not by the size of /dev/shm."""
    return "memfd" if sys.platform == "linux" and hasattr(os, "memfd_create") else "none"


def _plain(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
