"""MLflow, an extra: `pip install '.[mlflow]'`.

Server and experiment are those of its own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module

from rowmesh.observe.trackers import TrackedRun, Tracker

_MAX_VALUE = 500  # what every store of MLflow takes
_TAG = "rowmesh.run"
_MAX_PARAMETERS = 100  # of one request


class MLflow:
    """A run of MLflow; numbers are named KIND/NAME, keys of the configuration are its parameters."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = import_module("mlflow")
        if (before := self._before(run)) is not None:
            self._mlflow.start_run(run_id=before)  # which has its parameters: they cannot be changed
            return
        self._mlflow.start_run(run_name=run.name, tags={_TAG: run.id} if run.id else None)
        parameters = list(_parameters(run.config))
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._mlflow.log_params(dict(parameters[first : first + _MAX_PARAMETERS]))

    def _before(self, run: TrackedRun) -> str | None:
        """MLflow's own name of a run that is resumed; None where there is none."""
        if not (run.resumed_after and run.id):
            return None
        found = self._mlflow.search_runs(filter_string=f"tags.`{_TAG}` = '{run.id}'", output_format="list")
        return found[0].info.run_id if found else None

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Logs a record."""
        named = {re.sub(r"[^\w./ -]", "_", f"{kind}/{name}"): value for name, value in numbers.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


def start(run: TrackedRun) -> Tracker:
    """Begins to track a run."""
    return MLflow(run)


def _parameters(values: Mapping[str, object], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _parameters(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)[:_MAX_VALUE]
