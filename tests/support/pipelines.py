"""What ranks do in the tests of pipelines: races, broken schedules, failures. Functions that run on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.data import Batch
from rowmesh.errors import DataError, RowmeshError
from rowmesh.exchange.window import Window
from rowmesh.mesh import Mesh
from rowmesh.mesh import mesh as mesh_module
from rowmesh.ops.memory import Buffer, Memory, Scratch, array_at
from rowmesh.ops.window import FINAL
from rowmesh.pipeline import Pipeline
from rowmesh.pipeline import pipeline as pipeline_module
from rowmesh.pipeline.schedule import After, Schedule, Task, make_schedule
from rowmesh.tables import TableSpec
from tests.support.scenario import Scenario
from tests.support.training import Item, Trained, train

_POISON = 0xFF  # of floats, a NaN


@dataclass(frozen=True)
class Delays:
    """Sleeps before some tasks, the same ones for every seed.

    Attributes:
        seed: of which rank sleeps for how long.
        most_s: seconds at most.
    """

    seed: int
    most_s: float = 0.002

    def __call__(self, rank: int, task: Task) -> None:
        """Before a task of a rank."""
        chance = zlib.crc32(repr((self.seed, rank, task)).encode())
        if chance % 3 == 0:
            time.sleep(self.most_s * (chance // 3 % 1000) / 1000)


def late_updates(rank: int, task: Task) -> None:
    """Has every update wait until rows that do not wait for it are read."""
    if task.stage == "update":
        time.sleep(0.05)


def late_on_odd_ranks(rank: int, task: Task) -> None:
    """Has the updates of every other rank wait until the others have begun something else."""
    if task.stage == "update" and rank % 2:
        time.sleep(0.1)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory that a window releases with NaN, so that later reads of it are found."""
    release = Window.__del__

    def poison(window: Window) -> None:
        for group in window.groups:
            for owner in (group.memory, group.memory.merger, group.group.workspace):
                _fill(owner)
            outbox = group.group.workspace.outbox
            memories: tuple[Memory, ...] = (outbox.lists, outbox.gradients)
            for memory in memories:
                memory.bytes[:] = _POISON
        release(window)

    with mock.patch.object(Window, "__del__", poison):
        yield


def _fill(owner: object) -> None:
    for value in vars(owner).values():
        buffer = value.buffer if isinstance(value, Scratch) else value
        if isinstance(buffer, Buffer):
            buffer.bytes[:] = _POISON


def same(mine: Trained, theirs: Trained) -> bool:
    """Whether two runs of a rank are equal to the bit."""
    return mine.losses == theirs.losses and all(
        torch.equal(a, b) for a, b in zip(_tensors(mine), _tensors(theirs), strict=True)
    )


def _tensors(trained: Trained) -> list[torch.Tensor]:
    states = [values for state in trained.state.values() for values in state.values()]
    return [*trained.outputs, *trained.head, *trained.rows.values(), *states]


def hunt(mesh: Mesh, scenario: Scenario, transport: str, seeds: range) -> list[int]:
    """The seeds under which a job does not train what it trains in turn."""
    assert scenario.pipeline is not None
    in_turn = {"depth": 0, "overlap": False, "verify": False}
    expected = train(mesh, replace(scenario, pipeline=scenario.pipeline | in_turn), transport)
    wrong = []
    with poisoned_memory():
        for seed in seeds:
            options = scenario.pipeline | {"disturb": Delays(seed), "verify": True, "depth": 1 + seed % 3}
            if not same(train(mesh, replace(scenario, pipeline=options), transport), expected):
                wrong.append(seed)
    return wrong


# Schedules and exchanges that are broken on purpose


def all_are_final(before: int, heads: int, nexts: int, num_merged: int, number: int, fetches: int) -> None:
    """In place of `mark_final`: takes rows that the window before changes as final too."""
    for head in array_at(heads, np.uint32, num_merged):
        entry = int(head)
        while entry != 0xFFFFFFFF:
            array_at(fetches + 4 * entry, np.uint32, 1)[0] = 1 << FINAL
            entry = int(array_at(nexts + 4 * entry, np.uint32, 1)[0])


def without_waiting(*args: Any, **options: Any) -> Schedule:
    """In place of `make_schedule`: rows do not wait for the update of the batch before."""
    schedule = make_schedule(*args, **options)
    stages = tuple(
        replace(stage, after=tuple(after for after in stage.after if after != After("update", 1)))
        if stage.name == "rows"
        else stage
        for stage in schedule.stages
    )
    return replace(schedule, stages=stages)


_BROKEN = {
    "forwarding": lambda: mock.patch("rowmesh.ops.window.cpu.mark_final", all_are_final),
    "waiting": lambda: mock.patch.object(pipeline_module, "make_schedule", without_waiting),
}


def train_broken(mesh: Mesh, scenario: Scenario, transport: str, how: str) -> bool:
    """Whether a job in which something is broken trained what it trains in turn."""
    assert scenario.pipeline is not None
    in_turn = scenario.pipeline | {"depth": 0, "overlap": False, "disturb": None}
    expected = train(mesh, replace(scenario, pipeline=in_turn), transport)
    with _BROKEN[how]():
        return same(train(mesh, scenario, transport), expected)


# Failures


def copied(item: Item) -> Item:
    """A copy of an item."""
    return replace(item)


@dataclass(frozen=True)
class Fails:
    """Something happens before one task of one rank.

    Attributes:
        stage, batch: of the task.
        how: "raises", or "dies".
        rank: whose.
    """

    stage: str
    batch: int
    how: str
    rank: int = 1

    def __call__(self, rank: int, task: Task) -> None:
        """Before a task of a rank."""
        if (rank, task.stage, task.batch) == (self.rank, self.stage, self.batch):
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise DataError("made to fail")


def end(
    mesh: Mesh, scenario: Scenario, transport: Any, timeout_s: float, broken: str = ""
) -> tuple[str, str, float, list[str]]:
    """How a job ends: the error, how long after the last step it came, and which threads are left.

    Its program sends nothing itself, and so waits for no rank that has failed.
    """
    train(mesh, replace(scenario, num_steps=2, pipeline=(scenario.pipeline or {}) | {"disturb": None}), transport)
    collection = EmbeddingCollection(scenario.tables, mesh=_patient(mesh, scenario, timeout_s), transport=transport)
    kind, message, began = "", "", [time.monotonic()]
    try:
        with _BROKEN.get(broken, contextlib.nullcontext)():
            _train_alone(mesh.rank, scenario, collection, began)
    except RowmeshError as error:
        kind, message = type(error).__name__, str(error)
    return kind, message, time.monotonic() - began[0], pipeline_threads()


def _patient(mesh: Mesh, scenario: Scenario, timeout_s: float) -> Mesh:
    per_node = scenario.ranks_per_node or mesh.world_size
    hosts = tuple(rank // per_node for rank in range(mesh.world_size))
    return replace(mesh, timeout_s=timeout_s, hosts=hosts)


def _train_alone(rank: int, scenario: Scenario, collection: EmbeddingCollection, began: list[float]) -> None:
    optimizer, options = EmbeddingOptimizer(collection), dict(scenario.pipeline or {})
    disturb = partial(options.pop("disturb") or (lambda rank, task: None), rank)
    batches = (scenario.local_batch(step, 0, rank) for step in range(scenario.num_steps))
    items = (Item(batch.sparse, batch.labels) for batch in batches)
    with Pipeline(collection, disturb=disturb, **options) as pipeline:
        for number, window in enumerate(pipeline.windows(items)):
            for place, part in enumerate(window):
                disturb(Task("compute", number, place))
                part.embeddings.values.square().sum().backward()
            if scenario.max_norm is not None:
                optimizer.clip_grad_norm_(scenario.max_norm)
            optimizer.step()
            began[0] = time.monotonic()


def pipeline_threads() -> list[str]:
    """Threads of pipelines that are there."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rowmesh ")]


def bring_more(mesh: Mesh, scenario: Scenario, transport: str, timeout_s: float) -> tuple[str, str, list[str]]:
    """Rank 1 brings one batch more than the others."""
    scenario = replace(scenario, num_steps=scenario.num_steps + (mesh.rank == 1))
    kind, message, _, threads = end(mesh, scenario, transport, timeout_s)
    return kind, message, threads


def close_nothing(leaves: str) -> None:
    """A program that closes neither its mesh nor, where it leaves it open, the loop of its pipeline."""
    scenario = Scenario(tables=(TableSpec(name="user", num_rows=60, dim=3),), batch_sizes=(6, 5), num_steps=8)
    kept = globals()  # what a script has at its top level lives until the interpreter goes
    mesh = kept["mesh"] = Mesh.connect(timeout_s=60.0)
    collection = EmbeddingCollection(scenario.tables, mesh=mesh, transport="collective")
    optimizer = EmbeddingOptimizer(collection)
    batches = [scenario.local_batch(step, 0, mesh.rank).sparse for step in range(8)]
    items = [Batch(torch.zeros(each.batch_size, 0), each, torch.zeros(each.batch_size)) for each in batches]
    pipeline = kept["pipeline"] = Pipeline(collection, depth=2, micro_batches=2)
    windows = kept["windows"] = pipeline.windows(items)
    for number, window in enumerate(windows):
        for part in window:
            part.embeddings.values.square().sum().backward()
        optimizer.step()
        if leaves == "open" and number == 3:
            return


def main() -> None:
    """One rank of a program of its own: `python -m tests.support.pipelines STAGE TRANSPORT`, with torchrun's variables.

    Rank 1 fails before a task of batch 2, and the error is not caught. Or LEAVES "closes nothing", see above.
    """
    stage, transport = sys.argv[1:]
    if transport == "closes nothing":
        close_nothing(stage)
        return
    tables = (TableSpec(name="user", num_rows=60, dim=3), TableSpec(name="item", num_rows=200, dim=16))
    options = {"depth": 2, "micro_batches": 2, "disturb": Fails(stage, 2, "raises")}
    scenario = Scenario(tables=tables, batch_sizes=(6, 5), num_steps=5, pipeline=options)
    torch.set_num_threads(1)
    # A broken connection is seen first; on a busy machine it takes Python a while to end.
    mesh_module._BROKEN_LOOK_S = 200.0
    with Mesh.connect(timeout_s=200.0) as mesh:
        collection = EmbeddingCollection(tables, mesh=mesh, transport=transport)  # type: ignore[arg-type]
        _train_alone(mesh.rank, scenario, collection, [0.0])


if __name__ == "__main__":
    main()
