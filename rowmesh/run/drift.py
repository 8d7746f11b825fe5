"""Drift while training: measures recent traffic, has a new plan made where the old one fails it, and migrates to it.

A new plan is made where two intervals in a row fall short, of the second, and taken over at the end of a later one if
it serves that better. From then on the limits are shares of what the first interval under it measures.

Ranks talk every `check_every` steps: they add up what they measured, and learn from rank 0 what came of planning. Rank
0 watches its own batches alone, which are like those of the others where samples go to ranks at random.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import ConfigurationError
from rowmesh.mesh.together import on_rank_0
from rowmesh.mesh.waiting import gather_objects
from rowmesh.placement import Plan
from rowmesh.placement.drift import Fit, Planner, Proposal, Traffic, has_copies, predict
from rowmesh.placement.strategies import STRATEGIES
from rowmesh.run.checks import SETTING_UP
from rowmesh.run.config import DriftConfig
from rowmesh.run.job import Job
from rowmesh.run.placement import problem_of, run_topology
from rowmesh.run.task import Task
from rowmesh.sparse import SparseBatch
from rowmesh.tables.spec import stored_tables

logger = logging.getLogger("rowmesh")


class Drift:
    """Keeps a collection's plan up to date. Every rank makes one and calls `after_step` after every step.

    Args:
        collection: whose traffic is measured.
        planner: on rank 0, for whose plans all ranks wait; others have none.
        rules: when traffic is looked at, and which plan it does not fit.
        predicted: what the plan was made for; None: what the first interval measures.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        planner: Planner | None,
        rules: DriftConfig,
        predicted: Fit | None = None,
    ) -> None:
        self.predicted, self.measured = predicted, predicted
        self._collection, self._planner = collection, planner
        self._rules = rules
        self._traffic = collection.engine.traffic = Traffic(collection.mesh.world_size)
        self._tables = {feature: table.name for table in stored_tables(collection.tables) for feature in table.features}
        self._reason = ""
        self._step = 0

    def after_step(self, batch: SparseBatch) -> str:
        """To be called between two steps; returns a message, mostly empty. Collective: every rank calls it."""
        self._step += 1
        if self._planner is not None and self._step % self._rules.sample_every == 0:
            self._planner.watch(self._ids_by_table(batch), batch.batch_size)
        return "" if self._step % self._rules.check_every else self._check()

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, in plain values; a plan that is being made is left out, and made anew then."""
        predicted = None if self.predicted is None else self.predicted.to_plain()
        return {"step": self._step, "reason": self._reason, "predicted": predicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave, under the plan of that time."""
        predicted = state["predicted"]
        self.predicted = None if predicted is None else Fit.from_plain(predicted)
        self._step, self._reason = int(state["step"]), str(state["reason"])

    def close(self) -> None:
        """Stops measuring; waits for a plan that is being made."""
        self._collection.engine.traffic = None
        if self._planner is not None:
            self._planner.close()

    def _ids_by_table(self, batch: SparseBatch) -> dict[str, Any]:
        ids = batch.ids.numpy()
        parts: dict[str, list[np.ndarray]] = {}
        for number, feature in enumerate(batch.features):
            if feature not in self._tables:
                continue
            begin, end = batch.feature_range(number)
            parts.setdefault(self._tables[feature], []).append(ids[begin:end])
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def _check(self) -> str:
        planner = self._planner
        is_planning = planner is not None and planner.is_planning
        made = planner.take() if planner is not None else None
        mine = (self._traffic.take(), made and made.to_plain(), is_planning)
        everyone = gather_objects(self._collection.mesh, mine, "measuring the traffic of all ranks")
        _, made, is_planning = everyone[0]
        proposal = None if made is None else Proposal.from_plain(made)
        fit = Traffic.fit(taken for taken, _, _ in everyone)
        if proposal is not None:
            return self._follow(proposal)
        if fit is None or is_planning:
            return ""
        self.measured = fit
        self.predicted = self.predicted or fit
        least = self._rules.min_coverage, self._rules.min_balance
        was_short, self._reason = bool(self._reason), fit.shortfall(self.predicted, *least)
        if planner is not None:
            if self._reason and was_short:
                planner.begin()
            else:
                planner.forget()  # what comes next is more recent, and not half of what came before
        return ""

    def _follow(self, proposal: Proposal) -> str:
        reason, self._reason = self._reason, ""
        self.predicted = None  # a plan fits the few batches that it was made of better than any others
        if self._planner is not None:
            self._planner.forget()
        if proposal.plan is None:
            text = f"{reason}; {proposal.text}"
        else:
            text = f"{reason}; {proposal.text}: {self._migrate(proposal.plan)}"
        if self._collection.mesh.rank == 0:
            logger.info("drift: %s", text)
        return text

    def _migrate(self, plan: Plan) -> str:
        """Goes over to a plan; says what that took, or why the old one goes on."""
        try:
            moved = self._collection.migrate(plan)
        # On all ranks alike: the planner does not know the limits of tables and devices, nor that both plans' rows need
        # room.
        except (ConfigurationError, MemoryError) as error:
            return f"not taken over, {error}"
        if self._planner is not None:
            self._planner.plan = plan
        return f"{moved.rows:,} rows ({moved.num_bytes / 2**20:,.1f} MiB) moved in {moved.elapsed_s:.2f} s"


@contextmanager
def configured_drift(task: Task, job: Job) -> Iterator[Drift | None]:
    """Keeps the plan of a run up to date, if the configuration says so; closed at the end, also where training fails.

    Collective: every rank enters it.
    """
    drift = _configured(task, job)
    try:
        yield drift
    finally:
        if drift is not None:
            drift.close()


def _configured(task: Task, job: Job) -> Drift | None:
    config, plan, mesh = job.config.placement.drift, job.embeddings.plan, job.mesh
    if config.enabled == "off" or mesh.world_size == 1 or not plan.tables:
        return None
    if config.enabled == "auto" and not has_copies(plan):
        return None
    if plan.is_replicated:
        if config.enabled == "auto":
            return None
        raise ConfigurationError(
            'placement.drift.enabled="on" cannot follow tables that have replicas; leave it at auto, or train without '
            "replicas"
        )
    if dynamic := [table.name for table in job.embeddings.tables if table.takes_any_id]:
        if config.enabled == "auto":
            return None
        raise ConfigurationError(
            f'placement.drift.enabled="on" cannot follow tables {dynamic}, which are dynamic: hashes of ids say where '
            "their rows are, and none of the collection's tables can migrate; leave it at auto"
        )
    problem = None

    def fit() -> Fit:
        nonlocal problem
        problem = problem_of(task, run_topology(job.config, mesh))
        return predict(plan, problem)

    predicted, planner = on_rank_0(mesh, SETTING_UP, fit, Fit), None
    if problem is not None:
        wanted = job.config.placement.strategy or plan.strategy
        strategy = wanted if wanted in STRATEGIES else "auto"
        planner = Planner(plan, strategy, problem.topology, problem.request, made_of=problem.profile)
    return Drift(job.embeddings, planner, config, predicted)
