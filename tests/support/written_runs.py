"""Folders of runs as training leaves them, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

STEP_MS = {"data": 1.0, "rows": 2.0, "network": 5.0, "update": 0.5, "all_reduce": 0.5, "optimizer": 0.25, "other": 0.75}
GROUP = "dim16_row_wise_adagrad"
MEMORY = {"rows": 96_000, "optimizer state": 6_000, "buffers": 50_000, "network": 266_000}
ABOUT = {
    "started": "2026-03-01T12:00:00.000Z",
    "ranks": 2,
    "hosts": 1,
    "total_steps": 40,
    "samples": {"train": 10_000, "validation": 500, "test": 500},
    "transport": "one_sided",
    "transport_reason": "all 2 ranks share a host's memory",
    "network_parameters": 66_513,
    "tables": {"C1": {"rows": 50, "dim": 16, "storage": "dense"}, "C2": {"rows": 7, "dim": 16, "storage": "tiered"}},
    "rare_share": {"C1": {"train": 0.1, "test": 0.12}, "C2": {"train": 0.0, "test": 0.0}},
    "memory_bytes": [MEMORY, MEMORY],
}
SCORE_BINS = {
    "highest": [-2.0, 0.0, 3.0],
    "samples": [200, 200, 100],
    "positives": [10, 70, 60],
    "predicted": [12.0, 66.0, 63.0],
}


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    line = {"time": f"2026-03-01T12:{step // 60 % 60:02}:{step % 60:02}.000Z", "kind": "train", "step": step}
    line |= {"loss": 0.6 - 0.001 * min(step, 30), "samples_per_s": 2000.0, "memory_bytes": 10**9}
    line |= {
        "memory_bytes_by_rank": [5 * 10**8] * 2,
        "waited_for_data_share": 0.1,
        "lr": 0.01,
        f"embedding_lr/{GROUP}": 0.05,
    }
    return line | {f"step_ms/{stage}": value for stage, value in STEP_MS.items()} | changes


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    every: int = 2,
    auc: float = 0.75,
    config: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] = ABOUT,
    by_rank: int = 2,
) -> Path:
    """Writes all files of a run but its plan and its model; returns the folder."""
    (folder / "evaluation").mkdir(parents=True)
    settings = {"data": {"batch_size": 256}, "train": {"epochs": 1}, "run": {"folder": str(folder)}}
    (folder / "config.toml").write_text(tomli_w.dumps(settings | dict(config or {})))
    (folder / "about.json").write_text(json.dumps(about))
    hardware = {"usable threads": 4}
    (folder / "environment.json").write_text(json.dumps({"torch": {"threads": 2}, "hardware": hardware}))
    lines = []
    for step in range(every, steps + 1, every):
        lines.append(train_line(step, memory_bytes_by_rank=[5 * 10**8] * by_rank))
        if step % 10 == 0:
            scores = {"samples": 500, "auc": 0.6 + step / 1000, "log_loss": 0.6 - step / 10_000, "calibration": 1.0}
            lines.append({"time": lines[-1]["time"], "kind": "validation", "step": step, **scores})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = {"ids": 1000, "unique_ids": 300, "all_to_all_rounds": 0, "bytes_sent": 0, "bytes_received": 20_000}
    tiers = {"rows_found": 90, "rows_forwarded": 20, "rows_read": 10, "bytes_read": 640, "rows_initialized": 0}
    counters = [
        {"step": step, "group": group, **values}
        for step in range(1, steps + 1)
        for group, values in ((GROUP, counts), (f"{GROUP}, fast memory", tiers))
    ]
    (folder / "counters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in counters))
    numbers = {
        "samples": 500,
        "base_rate": 0.28,
        "auc": auc,
        "log_loss": 0.5,
        "normalized_entropy": 0.9,
        "calibration": 1.01,
    }
    optimum = {"auc": 0.79, "log_loss": 0.45}
    result = {"split": "test", **numbers, "planted_optimum": optimum, "score_bins": SCORE_BINS}
    (folder / "evaluation" / "test.json").write_text(json.dumps(result))
    return folder
