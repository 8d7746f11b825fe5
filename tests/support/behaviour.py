"""What ranks do in the tests of a collection and of failures; functions that run on every rank."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import ConfigurationError, IdRangeError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec
from rowmesh.tables.update_rules import SGD, RowWiseAdaGrad
from tests.support.training import joined

TABLES = (
    TableSpec(name="a", num_rows=300, dim=3, optimizer=SGD(lr=0.1)),
    TableSpec(name="b", num_rows=500, dim=16, optimizer=RowWiseAdaGrad(lr=0.1)),
)


def batch_of(rank: int, step: int, batch_size: int = 20, num_rows: int = 300) -> SparseBatch:
    """One id a bag for each of the two tables."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return SparseBatch.from_dense(("a", "b"), torch.randint(num_rows, (2, batch_size), generator=generator))


def one_step(collection: EmbeddingCollection, optimizer: EmbeddingOptimizer, batch: SparseBatch) -> torch.Tensor:
    """Forward, backward of a loss that is not linear, update; returns the vectors."""
    optimizer.zero_grad()
    vectors = collection(batch).values
    vectors.square().sum().backward()
    optimizer.step()
    return vectors.detach()


def rows_of(collection: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """A copy of this rank's rows and state."""
    copies = {}
    for table in collection.tables:
        pieces = collection.local_rows(table.name)
        copies[table.name] = joined(pieces, "values", table)
        copies |= {f"{table.name}.{name}": joined(pieces, name, table) for name in table.optimizer.state}
    return copies


def footprint() -> dict[str, int]:
    """Resident bytes, open files and mapped regions of this process.

    Pages of libraries do not count: they come when code runs for the first time, whenever that is.
    """
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = 1024 * sum(int(kilobytes) for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))
    mapped = Path("/proc/self/maps").read_text().count("memfd:rowmesh")
    return {"resident": resident, "files": len(list(Path("/proc/self/fd").iterdir())), "mapped": mapped}


def footprints(mesh: Mesh, transport: Any, warm_up: int, num_steps: int) -> tuple[dict[str, int], dict[str, int]]:
    """Before and after many steps; batches differ in size, and every tenth is only looked up."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    before = {}
    for step in range(warm_up + num_steps):
        if step == warm_up:
            before = footprint()
        one_step(collection, optimizer, batch_of(mesh.rank, step, batch_size=400 - step % 7 if step else 500))
        if step % 10 == 0:
            with torch.no_grad():
                collection(batch_of(mesh.rank, step, batch_size=100))
    after = footprint()
    collection.close()
    return before, after


def make_and_drop(mesh: Mesh, transport: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Footprints before and after three collections that trained and were closed."""
    results = []
    for _ in range(4):
        collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
        one_step(collection, EmbeddingOptimizer(collection), batch_of(mesh.rank, 0))
        collection.close()
        del collection
        results.append(footprint())
    return results[0], results[-1]


def keep_outputs(mesh: Mesh, transport: Any) -> bool:
    """Whether vectors that a user keeps are still what they were after later steps."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    kept, copies = [], []
    for step in range(8):
        kept.append(one_step(collection, optimizer, batch_of(mesh.rank, step)))
        copies.append(kept[-1].clone())
    collection.close()
    return all(torch.equal(mine, copy) for mine, copy in zip(kept, copies, strict=True))


def refuse_in_the_second_group(mesh: Mesh, transport: Any, catches: bool) -> dict[str, torch.Tensor]:
    """Trains; where it catches, a batch precedes each step whose error is found after the first group was routed."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    for step in range(6):
        if catches:
            bad = SparseBatch.from_bags({"a": [[1], [2]], "b": [[500], [3]]})
            try:
                collection.route(bad)
            except IdRangeError:
                gc.collect()
            else:
                raise AssertionError("an id past the table went through")
        one_step(collection, optimizer, batch_of(mesh.rank, step, batch_size=20 + step))
    rows = rows_of(collection)
    collection.close()
    return rows


def look_up_before_the_step(mesh: Mesh, transport: Any, looks_up: bool) -> dict[str, torch.Tensor]:
    """Trains; where it looks up, another batch is evaluated between backward and step."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    for step in range(3):
        collection(batch_of(mesh.rank, step)).values.square().sum().backward()
        if looks_up:
            with torch.no_grad():
                assert not collection(batch_of(mesh.rank, 99, batch_size=50)).values.requires_grad
        optimizer.step()
    rows = rows_of(collection)
    collection.close()
    return rows


def drive_by_verbs(mesh: Mesh, transport: Any, uses_verbs: bool) -> dict[str, torch.Tensor]:
    """Trains through forward and step, or through the four verbs with the next batch routed early."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    batches = [batch_of(mesh.rank, step) for step in range(4)]
    if not uses_verbs:
        for batch in batches:
            one_step(collection, optimizer, batch)
    else:
        routes = [collection.route(batch) for batch in batches]
        for route in routes:
            collection.pool(collection.fetch(route)).values.square().sum().backward()
            collection.push_pending([0.1, 0.1])
    rows = rows_of(collection)
    collection.close()
    return rows


def use_some_look_ups(
    mesh: Mesh, transport: Any, unused: tuple[tuple[int, ...], ...], drops: bool
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Trains with two look-ups a step; `unused[step]` names the ranks whose loss leaves the second one out.

    It is left out by not running its backward (or either of them, on rank 1), or else by a factor of 0 in the loss.
    Returns the rows, and the updates that were counted.
    """
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    for step, ranks in enumerate(unused):
        optimizer.zero_grad()
        for part in range(2):
            vectors = collection(batch_of(mesh.rank, 2 * step + part, batch_size=20 + mesh.rank)).values
            is_unused = mesh.rank in ranks and (part == 1 or mesh.rank == 1)
            if not (is_unused and drops):
                (vectors.square().sum() * (0.0 if is_unused else 1.0)).backward()
            del vectors
        optimizer.step()
    rows, pushes = rows_of(collection), [counters.pushes for counters in collection.counters]
    collection.close()
    return rows, pushes


def mix_transports(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Trains two collections side by side in one loop, each over a transport of its own."""
    collections = [EmbeddingCollection(TABLES, mesh=mesh, transport=name) for name in ("one_sided", "collective")]
    optimizers = [EmbeddingOptimizer(collection) for collection in collections]
    for step in range(3):
        batch = batch_of(mesh.rank, step)
        torch.stack([collection(batch).values.square().sum() for collection in collections]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    rows = [rows_of(collection) for collection in collections]
    for collection in collections:
        collection.close()
    return rows


def fall_out_of_step(mesh: Mesh, transport: Any, verb: str) -> str:
    """The error where rank 1 looks up once more than the others, or steps once more."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    one_step(collection, optimizer, batch_of(mesh.rank, 0))
    try:
        if mesh.rank == 1 and verb == "forward":
            collection(batch_of(mesh.rank, 1))
        if mesh.rank == 1 and verb == "step":
            optimizer.step()
        one_step(collection, optimizer, batch_of(mesh.rank, 2))
    except RowmeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_under_default_device(mesh: Mesh, transport: Any, device: str) -> dict[str, torch.Tensor]:
    """Trains where torch makes tensors on another device unless it is asked otherwise."""
    tables = (*TABLES, TableSpec(name="c", num_rows=30, dim=4, pooling="none"))
    lists = {name: [[1 + mesh.rank, 7], [], [3]] for name in "abc"}
    torch.set_default_device(device)
    try:
        collection = EmbeddingCollection(tables, mesh=mesh, transport=transport)
        optimizer = EmbeddingOptimizer(collection)
        for _ in range(2):
            out = collection(SparseBatch.from_bags(lists).select("cab"))
            (out.values.square().sum() + out["c"].values.square().sum()).backward()
            optimizer.step()
        with torch.no_grad():
            collection(SparseBatch.from_bags({name: [[]] for name in "abc"}))
    finally:
        torch.set_default_device("cpu")
    rows = rows_of(collection)
    collection.close()
    return rows


class Model(torch.nn.Module):
    """A collection inside a model that is wrapped as a whole."""

    def __init__(self, mesh: Mesh, transport: Any) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
        self.dense = torch.nn.Linear(19, 1)
        with torch.no_grad():
            self.dense.weight.copy_(torch.linspace(-1, 1, 19))
            self.dense.bias.zero_()

    def forward(self, batch: SparseBatch) -> torch.Tensor:
        """One number a sample."""
        return self.dense(torch.tanh(self.embeddings(batch).values))


def train_wrapped(mesh: Mesh, transport: Any, parts: int) -> tuple[dict[str, dict[int, torch.Tensor]], torch.Tensor]:
    """Trains a model under DistributedDataParallel (alone: on the samples of `parts` ranks together)."""
    model = Model(mesh, transport)
    wrapped = model
    if mesh.group is not None:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse_optimizer = EmbeddingOptimizer(model.embeddings)
    for step in range(4):
        batches = [batch_of(rank, step) for rank in ([mesh.rank] if mesh.group else range(parts))]
        ids = torch.cat([batch.ids.view(2, -1) for batch in batches], 1)
        optimizer.zero_grad()
        wrapped(SparseBatch.from_dense(("a", "b"), ids)).square().mean().backward()
        optimizer.step()
        sparse_optimizer.step()
    rows = {table.name: rows_by_number(model.embeddings, table.name) for table in TABLES}
    model.embeddings.close()
    return rows, model.dense.weight.detach()


def rows_by_number(collection: EmbeddingCollection, table: str) -> dict[int, torch.Tensor]:
    """Row number → row, of the rows of this rank."""
    pieces = collection.local_rows(table)
    return {row: value for piece in pieces for row, value in zip(piece.rows, piece.values.clone(), strict=True)}


def process(mesh: Mesh) -> int:
    """The process of this rank."""
    return os.getpid()


def outlive_a_peer(mesh: Mesh, transport: Any, victim: int, where: str) -> tuple[str, str, float]:
    """Trains until the victim kills itself in the middle of a step; the others return how their own run ended."""
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    began = time.monotonic()
    try:
        for step in range(4):
            is_last = step == 2 and mesh.rank == victim
            if is_last and where == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            collection(batch_of(mesh.rank, step)).values.square().sum().backward()
            if is_last and where == "update":
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            optimizer.step()
    except RowmeshError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "trained to the end", 0.0


def leave_the_others(mesh: Mesh, transport: Any, timeout_s: float, where: str) -> tuple[str, str, float]:
    """Rank 1 stays alive but takes one step less (or does not even make the collection)."""
    warm = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)  # to compile takes longer than the timeout
    one_step(warm, EmbeddingOptimizer(warm), batch_of(mesh.rank, 0))
    warm.close()
    began = time.monotonic()
    mesh = replace(mesh, timeout_s=timeout_s)
    try:
        if mesh.rank != 1 or where == "step":
            collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport)
            optimizer = EmbeddingOptimizer(collection)
            began = time.monotonic()
            for step in range(2 - (mesh.rank == 1)):
                one_step(collection, optimizer, batch_of(mesh.rank, step))
    except RowmeshError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    time.sleep(timeout_s + 2.5)  # alive all the while
    return "nothing", "", 0.0


def with_tables_of_its_own(mesh: Mesh, transport: Any) -> str:
    """The error of a rank whose table has another size than those of the others."""
    try:
        EmbeddingCollection([TableSpec(name="item", num_rows=10 + mesh.rank, dim=4)], mesh=mesh, transport=transport)
    except ConfigurationError as error:
        return str(error)
    return ""
