"""What ranks do in the tests of ranks that come late. Functions that run on every rank."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from rowmesh._support.faults import arm
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.pipeline import Pipeline
from tests.support.pipelines import pipeline_threads, same
from tests.support.scenario import Scenario
from tests.support.training import Item, train

LATE = 1
"""The rank that is held."""


def begin_again(mesh: Mesh, scenario: Scenario, folder: Path, timeout_s: float) -> tuple[str, str, list[str], bool]:
    """One rank is held within an update until all others have stopped waiting; then all begin anew, on the same mesh.

    Before it is held nobody gives up, however slow the machine; from then on the others wait for `timeout_s`.

    Returns:
        What was raised, what the same tables say to the next pipeline, which threads of the pipeline are left, and
        whether new tables then train what the plain loop does.
    """
    expected = train(mesh, replace(scenario, pipeline=None), "one_sided")
    train(mesh, scenario, "one_sided")
    plan, synchronization = scenario.plan, scenario.synchronization
    collection = EmbeddingCollection(
        scenario.tables,
        mesh=mesh,
        transport="one_sided",
        plan=plan,
        synchronization=synchronization,
    )
    held = folder / "held"  # once it is there, all ranks are between the two barriers of an update
    patience = property(lambda each: timeout_s if held.exists() else 1000.0, lambda each, given: None)
    armed = arm(f"one_sided.update@2=hold:{held}") if mesh.rank == LATE else contextlib.nullcontext()
    with armed, mock.patch.object(Mesh, "timeout_s", patience):
        first, _loop = _train_until_it_fails(mesh, scenario, collection)  # which nobody closes
    (folder / f"rank {mesh.rank}").touch()
    others = [folder / f"rank {rank}" for rank in range(mesh.world_size) if rank != LATE]
    if mesh.rank == 0:
        _await(others)
        (folder / "held.go").touch()
    threads = pipeline_threads()
    second, _ = _train_until_it_fails(mesh, scenario, collection)
    return str(first), str(second), threads, same(train(mesh, scenario, "one_sided"), expected)


def _train_until_it_fails(
    mesh: Mesh, scenario: Scenario, collection: EmbeddingCollection
) -> tuple[RowmeshError | None, object]:
    """What was raised, and the loop in which it was, as a program may keep both."""
    optimizer = EmbeddingOptimizer(collection)
    batches = (scenario.local_batch(step, 0, mesh.rank) for step in range(scenario.num_steps))
    items = (Item(batch.sparse, batch.labels) for batch in batches)
    loop = Pipeline(collection, **scenario.pipeline or {}).windows(items)
    try:
        for window in loop:
            for part in window:
                part.embeddings.values.square().sum().backward()
            optimizer.step()
    except RowmeshError as error:
        return error, loop
    return None, loop


def _await(paths: list[Path]) -> None:
    deadline = time.monotonic() + 60.0
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"not all of {paths} came"
        time.sleep(0.005)
