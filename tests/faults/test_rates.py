"""Ranks that would update by different numbers."""

import pytest
import torch

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, RowWiseAdaGrad, SparseBatch, TableSpec
from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape

BATCH = SparseBatch.from_bags({"item": [[1], [2, 3]], "user": [[4], [5]]})


def tables(**options):
    return [TableSpec(name=name, num_rows=20, dim=4, optimizer=AdaGrad(lr=0.5), **options) for name in ("item", "user")]


def step(embeddings, optimizer):
    embeddings(BATCH).values.sum().backward()
    optimizer.step()


def caught(work):
    """The message of the ConfigurationError that is raised, and on which call of how many."""
    for number in range(1, 5):
        try:
            work(number)
        except ConfigurationError as error:
            return str(error), number
    return "nothing", 0


def learn_at_different_rates(mesh, transport, options, more):
    """In the second step of two on rank 1; the rows it has must be those after the first."""
    torch.set_num_threads(1)
    if more.pop("mixed", False):
        made = [tables()[0], tables(storage="tensor_train")[1]]
    else:
        made = tables(**options)
    if more.pop("copied", False):
        planned = [TablePlan(TableShape.of(table), (RowRange(0, 20, "replicated"),)) for table in made]
        more["plan"] = Plan(tuple(planned), mesh.world_size, mesh.ranks_per_node)
    embeddings = EmbeddingCollection(made, mesh=mesh, transport=transport, **more)
    optimizer = EmbeddingOptimizer(embeddings)
    step(embeddings, optimizer)

    def rows():
        stored = [table.name for table in made if table.storage != "tensor_train"]
        return [part.values.clone() for name in stored for part in embeddings.held_rows(name)]

    before = rows() if "replicas" not in more else []

    def one(number):
        optimizer.param_groups[-1]["lr"] = 0.5 if number == 1 else 0.5 + 0.25 * mesh.rank
        step(embeddings, optimizer)
        if number == 1 and before:
            before[:] = rows()

    message, number = caught(one)
    if before:
        torch.testing.assert_close(rows(), before, rtol=0, atol=0)
    return message, number, embeddings.step_count


CASES = {
    "one-sided": ("one_sided", {}, {}, 2),
    "collective": ("collective", {}, {}, 2),
    "copies": ("one_sided", {}, {"copied": True}, 2),
    "tensor-train": ("one_sided", {"storage": "tensor_train"}, {}, 2),
    "tensor-train, collective": ("collective", {"storage": "tensor_train"}, {}, 2),
    "both": ("collective", {}, {"mixed": True}, 2),
    "replicas": ("collective", {}, {"replicas": 2}, 2),
    "three": ("one_sided", {}, {}, 3),
    "replicas, averaged": ("auto", {}, {"replicas": 2, "synchronization": Synchronization(mode="average", every=1)}, 2),
}


@pytest.mark.parametrize(
    "case", [name if name == "collective" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_ranks_with_different_learning_rates_are_named_before_anything_changes(ranks, case):
    transport, options, more, world_size = CASES[case]
    found = ranks.run(learn_at_different_rates, transport, options, more, world_size=world_size)
    for message, number, step_count in found:
        assert "ranks disagree about how fast group dim4_adagrad" in message
        assert "learns in step 3: rank 0 has lr 0.5, rank 1 has lr 0.75" in message
        assert number == 2
        assert step_count == 2


def learn_apart_between_averages(mesh):
    """Rates that differ only in steps between two synchronizations."""
    torch.set_num_threads(1)
    average = Synchronization(mode="average", every=4)
    embeddings = EmbeddingCollection(tables(), mesh=mesh, replicas=2, synchronization=average)
    optimizer = EmbeddingOptimizer(embeddings)

    def one(number):
        optimizer.param_groups[-1]["lr"] = 0.5 + (0.25 * mesh.rank if number == 2 else 0.0)
        step(embeddings, optimizer)

    return caught(one)


def test_rates_that_differed_between_two_averages_are_noticed(ranks):
    for message, number in ranks.run(learn_apart_between_averages, world_size=2):
        assert "ranks had different learning rates in a step since they compared them last" in message
        assert number >= 2


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("case", ["collective", "tensor-train", "both", "replicas"])
def test_and_so_on_devices(ranks, case):
    transport, options, more, world_size = CASES[case]
    found = ranks.run(learn_at_different_rates, transport, options, {**more, "device": "cuda"}, world_size=world_size)
    for message, _, _ in found:
        assert "learns in step 3: rank 0 has lr 0.5, rank 1 has lr 0.75" in message


class Item:
    def __init__(self, sparse):
        self.sparse = sparse


def run_a_pipeline(mesh, transport, depth):
    torch.set_num_threads(1)
    embeddings = EmbeddingCollection(tables(), mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(embeddings)
    number = 0
    try:
        with Pipeline(embeddings, depth=depth) as pipeline:
            for number, window in enumerate(pipeline.windows([Item(BATCH)] * 12)):
                for part in window:
                    part.embeddings.values.sum().backward()
                optimizer.param_groups[0]["lr"] = 0.5 + 0.25 * mesh.rank * (number == 3)
                optimizer.step()
    except Exception as error:
        return str(error), number, embeddings.step_count
    return "nothing", number, embeddings.step_count


@pytest.mark.parametrize("transport, depth", [("collective", 0), ("collective", 2), ("one_sided", 1)])
def test_a_pipeline_names_them_before_the_step(ranks, transport, depth):
    for message, number, step_count in ranks.run(run_a_pipeline, transport, depth):
        assert "learns in step 4: rank 0 has lr 0.5, rank 1 has lr 0.75" in message
        assert (number, step_count) == (3, 3)


def make_unlike_tables(mesh, name):
    value = {"lr": 0.1, "eps": 0.1, "initial_accumulator": 0.5, "moment_scale": 2.0}[name] if mesh.rank else None
    rule = RowWiseAdaGrad(**({name: value} if mesh.rank else {}))
    return caught(
        lambda _: EmbeddingCollection([TableSpec(name="item", num_rows=20, dim=4, optimizer=rule)], mesh=mesh)
    )


@pytest.mark.parametrize("name", ["eps", "moment_scale"])
def test_other_hyperparameters_are_compared_when_tables_are_made(ranks, name):
    for message, _ in ranks.run(make_unlike_tables, name):
        assert "ranks disagree about an EmbeddingCollection: rank 0 has" in message
        assert f"{name}=" in message


def test_learning_rates_that_are_equal_are_compared_and_no_more(ranks):
    assert ranks.run(learn_equally, "collective") == [15, 15]  # of three steps, as many as without comparing


def learn_equally(mesh, transport):
    torch.set_num_threads(1)
    embeddings = EmbeddingCollection(tables(), mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(embeddings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        step(embeddings, optimizer)
        schedule.step()
    rounds = embeddings.common_counters.all_to_all_rounds
    return rounds + sum(counters.all_to_all_rounds for counters in embeddings.counters)
