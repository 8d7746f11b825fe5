"""Prometheus: the latest numbers of a run as a text file, for the textfile collector of its node exporter."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from rowmesh._support.files.atomic import write_text
from rowmesh.errors import ConfigurationError
from rowmesh.observe.trackers import TrackedRun

_BEGIN = b"# TYPE rowmesh_"


class PrometheusFile:
    """Writes a file anew with every record, whole or not at all.

    Numbers are gauges: `rowmesh_train_loss{run="criteo"}`; those of splits have their name as a label:
    `rowmesh_evaluation_auc{run="criteo",split="test"}`. So has what follows a slash in the name of a number:
    `rowmesh_train_step_ms{run="criteo",of="network"}`.

    Args:
        path: of the file; `node_exporter` reads names that end with `.prom`.
        run: what is tracked.
    """

    def __init__(self, path: Path, run: TrackedRun) -> None:
        self._path, self._name = path, run.name
        self._values: dict[str, dict[str, float]] = {}  # metric → labels → value
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of a record in place of those of its kind before, and writes the file."""
        group, labels = ("train", {}) if kind == "train" else ("evaluation", {"split": kind})
        now = {"step": float(step), "timestamp_seconds": time.time()}
        for name, value in (dict(numbers) | now).items():
            base, _, of = name.partition("/")
            metric = re.sub(r"\W", "_", f"rowmesh_{group}_{base}")
            text = _labels({"run": self._name} | labels | ({"of": of} if of else {}))
            self._values.setdefault(metric, {})[text] = value
        write_text(self._path, self._text())

    def close(self) -> None:
        """The file stays as it is: its timestamp says how old it is."""

    def _text(self) -> str:
        lines = []
        for metric, values in sorted(self._values.items()):
            lines.append(f"# TYPE {metric} gauge")
            lines += [f"{metric}{{{labels}}} {value!r}" for labels, value in sorted(values.items())]
        return "\n".join(lines) + "\n"


def check_free(path: Path) -> None:
    """Refuses a file that no run has written.

    Raises:
        ConfigurationError: something else is there; names it.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(len(_BEGIN))
    if begin and begin != _BEGIN:
        raise ConfigurationError(
            f"run.prometheus_file={str(path)!r} is there, and no run of rowmesh wrote it; name another file, or move "
            "it elsewhere"
        )


def _labels(labels: Mapping[str, str]) -> str:
    """As in `run="criteo",split="test"`, escaped as the format asks.

    >>> _labels({"run": 'a"b'})
    'run="a\\\\"b"'
    """
    escaped = {
        key: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, value in labels.items()
    }
    return ",".join(f'{key}="{value}"' for key, value in escaped.items())
