"""The matrix of what goes with what in docs/combinations.md: each cell is tried on two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rowmesh import AveragedRows, EmbeddingCollection, Mesh
from rowmesh.errors import PeerError, RowmeshError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.tables import Dynamic, TensorTrain
from tests.support.plans import make_plan
from tests.support.scenario import Scenario
from tests.support.tables import table
from tests.support.training import train

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
STORAGES = ("dense", "tiered", "tensor_train", "dynamic")
PIPELINE = {"depth": 2, "micro_batches": 2}
ITEM = table("item", 60, 4, "sgd")
BASE = Scenario(tables=(ITEM,), batch_sizes=(4, 3), num_steps=2, bag_sizes=(1, 2))
COPIED = make_plan([ITEM], 2, 2, lambda number: ("replicated", 0, 0, False))
ON_NODES = make_plan([ITEM], 2, 1, lambda number: ("node", 0, 0, False))
MOVED = ((1, Plan.cyclic([TableShape.of(replace(ITEM, num_rows=60))], 2, 2)),)
AVERAGE = Synchronization("average", every=2)
NEEDS_ROWS = "–"  # of a plan

TRIED = {
    "messages": BASE,
    "one-sided": BASE,
    "exact replicas": replace(BASE, replicas=2),
    "averaged replicas": replace(BASE, replicas=2, synchronization=AVERAGE),
    "averages of whole tables": replace(BASE, replicas=2, synchronization=replace(AVERAGE, dense=True)),
    "rows copied to all ranks": replace(BASE, plan=COPIED),
    "rows copied to each host": replace(BASE, plan=ON_NODES, ranks_per_node=1),
    "migration": replace(BASE, plan=COPIED, migrations=MOVED),
    "clipping by the norm": replace(BASE, max_norm=0.1),
    "moving averages": None,
    "pipeline": replace(BASE, pipeline=PIPELINE),
    "pipeline, one-sided": replace(BASE, pipeline=PIPELINE),
    "pipeline, exact replicas": replace(BASE, replicas=2, pipeline=PIPELINE),
    "pipeline, averaged replicas": replace(BASE, replicas=2, synchronization=AVERAGE, pipeline=PIPELINE),
    "pipeline, rows copied to all ranks": replace(BASE, plan=COPIED, pipeline=PIPELINE),
    "pipeline, clipping by the norm": replace(BASE, max_norm=0.1, pipeline=PIPELINE),
    "pipeline, gradients of two batches": replace(BASE, accumulate=2, pipeline=PIPELINE),
}


def stored(scenario: Scenario, storage: str) -> Scenario | None:
    """The job with a table that is stored so; None where it is about rows that a plan places, and there are none."""
    has_rows = storage in ("dense", "tiered")
    if scenario.plan is not None and not has_rows:
        return None
    if storage == "dynamic":
        return replace(scenario, dynamic=(("item", Dynamic(capacity=200)),))
    cores = TensorTrain(rank=2) if storage == "tensor_train" else None
    return replace(scenario, tables=(replace(ITEM, storage=storage, tensor_train=cores),))


def cell(mesh: Mesh, what: str, storage: str) -> str:
    """What comes of a combination on this rank."""
    scenario = stored(TRIED[what] or BASE, storage)
    if scenario is None:
        return NEEDS_ROWS
    try:
        if what == "moving averages":
            embeddings = EmbeddingCollection(scenario.stored, mesh=mesh)
            try:
                AveragedRows(embeddings).update()
            finally:
                embeddings.close()
            return "yes"
        trained = train(mesh, scenario, "one_sided" if "one-sided" in what else "collective")
    except PeerError:
        raise
    except RowmeshError:
        return "no"
    if "one-sided" in what and "one_sided" not in trained.transport:
        return "by messages"
    if scenario.pipeline is None:
        return "yes"
    return "by micro-batch" if all("by micro-batch" in reason for reason in trained.reasons) else "whole"


def try_all(mesh: Mesh) -> list[str]:
    """The lines of the matrix."""
    return [f"| {what} | {' | '.join(cell(mesh, what, storage) for storage in STORAGES)} |" for what in TRIED]


def test_the_matrix_is_what_comes_of_each_combination(ranks):
    mine, theirs = ranks.run(try_all, world_size=2)
    assert mine == theirs
    page = PAGE.read_text()
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == mine, "\n".join(mine)
