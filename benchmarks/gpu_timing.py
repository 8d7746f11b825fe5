"""Times what runs on a GPU: contestants in turns, by CUDA events, beside a copy of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure import median, summarize

COPY = "copy"
_AHEAD_CYCLES = 2_000_000  # about a millisecond


@dataclass(frozen=True)
class Case:
    """An op on given inputs, ours and others'.

    Attributes:
        name: of the case.
        ours: runs our op.
        peers: name → what runs another one.
        moved_bytes: what must be read and written at least.
        check: raises where ours gives wrong results.
        targets: peer, or COPY for the share of the copy rate → how many times as fast we want to be.
    """

    name: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    moved_bytes: int
    check: Callable[[], None]
    targets: Mapping[str, float]


def contestants(case: Case, copy_bytes: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Ours, the peers, and a copy that reads half of `copy_bytes` and writes the other half."""
    source = torch.zeros(copy_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"rowmesh": case.ours, **case.peers, COPY: lambda: target.copy_(source)}


def measure(functions: Mapping[str, Callable[[], object]], warmup: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Times contestants in turns, each once a round.

    `call_ms` is between two events on the device. The host is let ahead before the first, so that the device does not
    wait for launches, unless a contestant itself waits for the device. `wall_ms` is what the host waits for one call.
    """
    device_s: dict[str, list[float]] = {name: [] for name in functions}
    wall_s: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name, function in functions.items():
            on_device, on_host = _time_s(function)
            if number >= warmup:
                device_s[name].append(on_device)
                wall_s[name].append(on_host)
    return {
        name: {**summarize(device_s[name], "call"), "wall_ms": median([second * 1e3 for second in wall_s[name]], 4)}
        for name in functions
    }


def _time_s(function: Callable[[], object]) -> tuple[float, float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, time.perf_counter() - began


def judge(case: Case, timings: Mapping[str, Mapping[str, Any]], copy_bytes: int) -> dict[str, Any]:
    """What follows from the times of a case: the copy rate, our share of it, and the ratios to peers.

    >>> case = Case("gather", print, {"torch": print}, 600, print, {COPY: 0.6})
    >>> judge(case, {"rowmesh": {"call_ms": 1.0}, "torch": {"call_ms": 2.0}, COPY: {"call_ms": 0.5}}, 500)
    {'moved_bytes': 600, 'copy_bytes_per_s': 1000000.0, 'ratio': {'torch': 2.0, 'copy': 0.6}, 'target': {'copy': 0.6}}
    """
    ours_s, copy_s = timings["rowmesh"]["call_ms"] / 1e3, timings[COPY]["call_ms"] / 1e3
    ratios = {peer: round(timings[peer]["call_ms"] / 1e3 / ours_s, 3) for peer in case.peers}
    ratios[COPY] = round(case.moved_bytes / ours_s / (copy_bytes / copy_s), 3)
    return {
        "moved_bytes": case.moved_bytes,
        "copy_bytes_per_s": round(copy_bytes / copy_s, -3),
        "ratio": ratios,
        "target": dict(case.targets),
    }
