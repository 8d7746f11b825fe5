"""Findings: what facts and times mean, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rowmesh.doctor.facts import WAITING, Facts
from rowmesh.doctor.step import Failed, StepTimes
from rowmesh.mesh.threads import fair_threads
from rowmesh.observe.allocator import VARIABLES as MALLOC

Level = Literal["ok", "note", "slow", "failed"]
KEEP_MEMORY = "export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456"
LEAST_SHM = 1 << 30
FILES_OF_A_RANK, FILES_OF_A_PROCESS = 32, 256
BUSY = 0.5  # programs that want to run, for each core
MANY_FAULTS = 500  # of a step; each costs about half a microsecond
MUCH_SLOWER = 1.5  # than with one thread: small layers lose a little to many
LEAST_SCALING = 1.0  # of the speed of one rank


@dataclass(frozen=True)
class Finding:
    """A subject that was looked at, and the result.

    Attributes:
        name: what.
        level: "ok", "note" (good to know), "slow" (costs time) or "failed".
        text: what was found.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    level: Level
    text: str
    advice: str = ""


def findings(facts: Facts, steps: Sequence[StepTimes | Failed]) -> list[Finding]:
    """All of them, in the order in which they are printed."""
    times = [step for step in steps if isinstance(step, StepTimes)]
    ranks = max((step.ranks for step in steps), default=1)
    failures = [_failure(step) for step in steps if isinstance(step, Failed)]
    return [
        *failures,
        *(_threads(facts, step, alone=len(steps) == 1) for step in times),
        *_waiting(facts, times),
        *_scaling(times),
        *_cores(facts),
        _load(facts),
        _malloc(facts, times),
        _huge_pages(facts),
        *_kernels(facts, times),
        _shared_memory(facts, ranks),
        _shm(facts),
        _open_files(facts, ranks),
        _gpus(facts),
        _network(facts),
    ]


def standing(facts: Facts, ranks: int = 1, threads: int = 1) -> list[Finding]:
    """Findings that hold whatever is trained, and need no step.

    Args:
        facts: of this machine.
        ranks: of this host.
        threads: of torch on each.
    """
    shared = [_sharing(facts, ranks, threads)]
    found = [*shared, *_cores(facts), _huge_pages(facts), *_kernels(facts, []), _open_files(facts, ranks)]
    return [finding for finding in found if finding is not None and finding.level == "slow"]


def _failure(step: Failed) -> Finding:
    return Finding("1 rank" if step.ranks == 1 else f"{step.ranks} ranks", "failed", step.reason)


def share(facts: Facts, ranks: int) -> int:
    """Threads that each of so many ranks of this machine can use."""
    mine = range(facts.processors)
    return fair_threads(mine, [mine] * ranks, threads_per_core=facts.threads_per_core, limit=facts.processor_limit)


def _threads(facts: Facts, step: StepTimes, *, alone: bool) -> Finding:
    name, fair = "threads", share(facts, step.ranks)
    text = _sharing_text(facts, step.ranks, step.threads)
    ratio = step.step_s / step.one_thread_s
    if step.threads > 1 and ratio > MUCH_SLOWER and step.ranks <= facts.processors:
        text = f"{text}; a step takes {ratio:.1f} times as long as with one"
    if shared := _sharing(facts, step.ranks, step.threads):
        return replace(shared, text=text)
    if step.threads > 1 and ratio > MUCH_SLOWER:
        return Finding(name, "slow", text, "other programs use the cores too: export OMP_NUM_THREADS=1")
    if alone and step.ranks == 1 and step.threads > 1:  # also where a step of this size gains from threads
        advice = f"ranks with a thread each come first: torchrun --standalone --nproc-per-node {fair} -m rowmesh.cli …"
        return Finding(name, "note", text, advice)
    if step.threads < fair:
        more = "torchrun sets 1 where nothing is set" if "OMP_NUM_THREADS" not in facts.variables else "as it is set"
        advice = f"more ranks first; large networks may gain from export OMP_NUM_THREADS={fair}"
        return Finding(name, "note", f"{text}; {more}", advice)
    return Finding(name, "ok", text)


def _waiting(facts: Facts, times: Sequence[StepTimes]) -> Iterator[Finding]:
    if all(step.threads == 1 for step in times):
        return
    given = ", ".join(f"{name}={facts.variables[name]}" for name in WAITING if name in facts.variables)
    if facts.variables.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        text = f"threads sleep while they wait, {given}, as rowmesh commands have it"
        yield Finding("waiting", "ok", f"{text}; programs of your own: export OMP_WAIT_POLICY=PASSIVE")
    else:
        text = f"threads may spin while they wait ({given or 'nothing is set'})"
        yield Finding("waiting", "note", text, "where other programs use the cores: export OMP_WAIT_POLICY=PASSIVE")


def _sharing(facts: Facts, ranks: int, threads: int) -> Finding | None:
    text = _sharing_text(facts, ranks, threads)
    if ranks > facts.processors:
        return Finding("threads", "slow", text, f"ranks outnumber processors: use {facts.processors} ranks or fewer")
    if threads > (fair := share(facts, ranks)):
        return Finding("threads", "slow", text, f"ranks slow each other down: export OMP_NUM_THREADS={fair}")
    return None


def _sharing_text(facts: Facts, ranks: int, threads: int) -> str:
    on = "1 rank" if ranks == 1 else f"each of {ranks} ranks"
    return f"{threads} of torch on {on}, for {_cores_text(facts)}"


def _cores_text(facts: Facts) -> str:
    processors = f"{facts.processors} processor{'s'[: facts.processors > 1]}"
    return f"{processors} of which a core has {facts.threads_per_core}" if facts.threads_per_core > 1 else processors


def _scaling(times: Sequence[StepTimes]) -> Iterator[Finding]:
    if len(times) > 1:
        one, many = times[0], times[-1]
        ratio = many.samples_per_s / one.samples_per_s
        text = f"{many.ranks} ranks train {ratio:.2f} times the samples of 1 rank with {one.threads} thread(s)"
        if ratio < LEAST_SCALING:
            advice = "a step as small as this one gains little; see the other lines, then try your own model"
            yield Finding("ranks", "note", text, advice)
        else:
            yield Finding("ranks", "ok", text)


def _cores(facts: Facts) -> Iterator[Finding]:
    limit = facts.processor_limit
    if limit is not None and limit < facts.processors:
        advice = "processes are stopped once it is used up: raise the limit (docker --cpus, a pod's cpu limit), or use "
        text = f"the time of {limit:g} of {facts.processors} processors, by a control group"
        yield Finding("limit", "slow", text, f"{advice}{max(int(limit), 1)} ranks or threads at most")
    if facts.processors < facts.all_processors:
        text = f"this process may run on {facts.processors} of {facts.all_processors} processors"
        yield Finding("affinity", "note", text, "taskset, numactl, srun or a container has bound it")


def _load(facts: Facts) -> Finding:
    if facts.load is None:
        return Finding("load", "ok", "not known on this system")
    text = f"{facts.load:.1f} programs wanted to run in the last minute, before this one did"
    if facts.load > BUSY * facts.all_processors:
        return Finding("load", "slow", text, "other programs use the cores: times here are worse than those alone")
    return Finding("load", "ok", text)


def _malloc(facts: Facts, times: Sequence[StepTimes]) -> Finding:
    counts = [step.faults for step in times if step.faults is not None]
    text = f"{facts.allocator}, {max(counts):,.0f} page faults a step" if counts else facts.allocator
    is_set = set(MALLOC[:2]) <= set(facts.variables) or "glibc.malloc" in facts.variables.get("GLIBC_TUNABLES", "")
    if facts.allocator != "glibc" or is_set:
        return Finding("malloc", "ok", text)
    level: Level = "slow" if max(counts, default=0) > MANY_FAULTS else "note"
    text = f"{text}; it gives large buffers back after each step, but for rowmesh's own commands, which say not to"
    return Finding("malloc", level, text, f"for programs of your own: {KEEP_MEMORY}")


def _huge_pages(facts: Facts) -> Finding:
    name = "huge pages"
    if facts.huge_pages is None:
        return Finding(name, "ok", "not known on this system")
    if facts.huge_pages == "never":
        advice = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding(name, "slow", "never: look-ups in large tables miss the TLB", advice)
    return Finding(name, "ok", facts.huge_pages)


def _kernels(facts: Facts, times: Sequence[StepTimes]) -> Iterator[Finding]:
    name, compiled = "kernels", max((step.compiled for step in times), default=0)
    first_s = max((step.first_s for step in times), default=0.0)
    if facts.kernel_folder is None:
        text = f"no folder can be written, so every process compiles them: {first_s:.1f} s for the first step"
        yield Finding(name, "slow", text, "export NUMBA_CACHE_DIR=… to a folder that can be written")
    elif compiled:
        text = f"{compiled} were compiled for the first step, which took {first_s:.1f} s"
        yield Finding(name, "note", text, f"kept in {facts.kernel_folder}: run this again for the time without")
    else:
        yield Finding(name, "ok", f"kept in {facts.kernel_folder}")


def _shared_memory(facts: Facts, ranks: int) -> Finding:
    if facts.shares_memory:
        return Finding("memory", "ok", "ranks of this host read each other's rows in place (memfd)")
    level: Level = "slow" if ranks > 1 else "note"
    return Finding(
        "memory", level, "ranks of a host exchange rows by messages", "Linux alone has memory that they could share"
    )


def _shm(facts: Facts) -> Finding:
    if facts.shm_bytes is None:
        return Finding("/dev/shm", "ok", "none; rowmesh needs none")
    text = f"{facts.shm_bytes / 2**20:,.0f} MiB; rowmesh needs none"
    if facts.shm_bytes < LEAST_SHM:
        advice = "NCCL and workers of torch's DataLoader do: docker run --shm-size=8g"
        return Finding("/dev/shm", "slow" if facts.gpus else "note", text, advice)
    return Finding("/dev/shm", "ok", text)


def _open_files(facts: Facts, ranks: int) -> Finding:
    if facts.open_files is None:
        return Finding("open files", "ok", "no limit")
    needed = FILES_OF_A_PROCESS + FILES_OF_A_RANK * ranks
    text = f"{facts.open_files:,} for a process"
    if facts.open_files < needed:
        return Finding("open files", "slow", text, f"{ranks} rank(s) may need {needed:,}: ulimit -n {needed}")
    return Finding("open files", "ok", text)


def _gpus(facts: Facts) -> Finding:
    if not facts.gpus:
        return Finding("gpu", "ok", "none; rows and networks are on the CPU")
    text = f"{len(facts.gpus)}: {', '.join(dict.fromkeys(facts.gpus))}"
    if facts.versions.get("triton") is None:
        return Finding(
            "gpu",
            "slow",
            f"{text}; no triton, so tables cannot be there",
            "in a checkout of rowmesh: pip install '.[gpu]'",
        )
    if not facts.has_nccl:
        return Finding("gpu", "slow", f"{text}; torch without NCCL", "install a CUDA build of torch for Linux")
    return Finding("gpu", "ok", f"{text}; NCCL and triton are there; train.device=cuda uses them")


def _network(facts: Facts) -> Finding:
    chosen, names = facts.variables.get("GLOO_SOCKET_IFNAME"), ", ".join(facts.interfaces) or "none"
    if chosen is not None:
        text = f"GLOO_SOCKET_IFNAME={chosen}"
        if chosen not in (*facts.interfaces, "lo"):
            return Finding("network", "slow", f"{text}, which is not up", f"choose one of: {names}")
        return Finding("network", "ok", text)
    if facts.address is None or facts.address.startswith("127."):
        found = "not found" if facts.address is None else f"{facts.address}, this host alone"
        advice = f"ranks on several hosts: export GLOO_SOCKET_IFNAME=… (up are: {names})"
        return Finding("network", "note", f"the address of this host's name is {found}", advice)
    return Finding("network", "ok", f"{facts.address}; up are: {names}")
