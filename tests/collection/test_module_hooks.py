"""What torch's tools for modules do to tables: each works, or says what to do."""

import copy
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import rowmesh
from rowmesh import (
    SGD,
    AdaGrad,
    Adam,
    AveragedRows,
    EmbeddingCollection,
    EmbeddingOptimizer,
    Mesh,
    Pipeline,
    RowmeshError,
    SparseBatch,
    Synchronization,
    TableSpec,
)
from rowmesh.checkpoint.sharded_state import ShardedState
from rowmesh.errors import CheckpointError, ConfigurationError
from rowmesh.models import DLRM
from rowmesh.tables import Dynamic, TensorTrain, Uniform
from tests.support.ranks import RankPool

TABLES = (
    TableSpec(name="item", num_rows=11, dim=4, optimizer=Adam(lr=0.1)),
    TableSpec(name="day", num_rows=5, dim=4, optimizer=SGD(lr=0.1)),
    TableSpec(
        name="cores",
        num_rows=30,
        dim=4,
        storage="tensor_train",
        tensor_train=TensorTrain(rank=2),
        optimizer=AdaGrad(lr=0.1),
    ),
)


def make(mesh=None, tables: Sequence[TableSpec] = TABLES, **options: Any):
    return EmbeddingCollection(tables, mesh=mesh, **options)


def batch(step=0, rank=0, world_size=1, tables=TABLES):
    generator = torch.Generator().manual_seed(step)
    ids = torch.stack([torch.randint(table.num_rows, (4,), generator=generator) for table in tables])
    return SparseBatch.from_dense([table.name for table in tables], ids[:, rank::world_size])


# Casts and moves


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.half(),
        lambda each: each.double(),
        lambda each: each.to(torch.bfloat16),
        lambda each: each.type(torch.float64),
    ],
)
def test_tables_are_not_cast(change):
    model = torch.nn.ModuleList([make()])
    with pytest.raises(ConfigurationError, match=r"table 'item' has rows of torch.float32, which cannot.*dtype="):
        change(model)


def test_tables_are_not_moved():
    with pytest.raises(ConfigurationError, match=r"made on, cpu, and cannot move to meta: give .*device="):
        torch.nn.ModuleList([make()]).to("meta")


def test_what_changes_nothing_is_allowed():
    model = torch.nn.ModuleList([make(), torch.nn.Linear(2, 2)])
    assert model.to("cpu").float().cpu().to(torch.float32) is model
    assert model[0].to("cpu") is model[0]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda each: each.share_memory(), r"share_memory\(\) does not share the rows of table 'item'.*one_sided"),
        (lambda each: each.to_empty(device="cpu"), r"to_empty\(\).* would leave the rows of table 'item' as they are"),
    ],
)
def test_what_would_pass_over_rows_is_refused(change, said):
    with pytest.raises(ConfigurationError, match=said):
        change(torch.nn.ModuleList([torch.nn.Linear(2, 2), make()]))


def test_zero_grad_of_a_collection_forgets_gradients_of_rows():
    embeddings = make()
    before = embeddings.state_dict()
    embeddings(batch()).values.sum().backward()
    embeddings.zero_grad()
    EmbeddingOptimizer(embeddings).step()
    assert all(rows.equal(before[name]) for name, rows in embeddings.state_dict().items())


# Subclasses


class Shifted(EmbeddingCollection):
    """Tables with a parameter, buffers, a child and extra state."""

    def __init__(self, value: float, tables: Sequence[TableSpec] = TABLES):
        super().__init__(tables)
        self.scale = torch.nn.Parameter(torch.full((2,), value))
        self.register_buffer("seen", torch.full((3,), value))
        self.register_buffer("passing", torch.full((3,), value), persistent=False)
        self.over = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.over.weight, value)
        self.value = value

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]

    @property
    def all_values(self):
        seen: Any = self.seen
        return {self.value, *self.scale.tolist(), *seen.tolist(), *self.over.weight.flatten().tolist()}


@pytest.mark.parametrize("how", ["state_dict", "save", "async_save", "sharded"])
@pytest.mark.parametrize("place", ["alone", "within"])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_a_subclass_has_is_saved_and_loaded(tmp_path, how, place):
    (before, after), models = (Shifted(7.0), Shifted(1.0)), []
    with torch.no_grad():
        before.held_rows("item")[0].values.fill_(3.0)
    for each in (before, after):
        models.append(each if place == "alone" else torch.nn.Sequential(torch.nn.Linear(1, 1), each))
    if how == "state_dict":
        assert not any(models[1].load_state_dict(models[0].state_dict()))
    elif how == "sharded":
        from torch.distributed import checkpoint as dcp

        dcp.save({"all": ShardedState({"model": models[0]})}, checkpoint_id=tmp_path / "model")
        dcp.load({"all": ShardedState({"model": models[1]})}, checkpoint_id=tmp_path / "model")
    else:
        saving: Any = getattr(rowmesh, how)(tmp_path / "model", {"model": models[0]})
        if saving is not None:
            saving.wait()
        rowmesh.load(tmp_path / "model", {"model": models[1]})
    assert after.all_values == {7.0}
    assert after.held_rows("item")[0].values.eq(3.0).all()


def test_what_does_not_fit_a_subclass_is_named():
    embeddings = Shifted(7.0)
    state = embeddings.state_dict()
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\) in state_dict: "scale", "item.weight"'):
        embeddings.load_state_dict({name: each for name, each in state.items() if name not in ("scale", "item.weight")})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "shop.weight", "over.other"'):
        embeddings.load_state_dict({**state, "shop.weight": torch.zeros(1), "over.other": torch.zeros(1)})
    clash = Shifted(1.0, [TableSpec(name="over", num_rows=4, dim=2)])
    with pytest.raises(ConfigurationError, match=r"\['over'\] are tables and children of Shifted"):
        clash.state_dict()


def test_a_subclass_that_only_looks_up_has_no_part_of_its_own(tmp_path):
    class Plain(EmbeddingCollection):
        """Nothing more."""

    rowmesh.save(tmp_path / "model", {"model": make()})
    rowmesh.load(tmp_path / "model", {"model": Plain(TABLES)})


# Copies


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, copy.copy, pickle.dumps, AveragedModel, lambda model: torch.save(model, io.BytesIO())]
)
def test_copies_are_refused(make_copy):
    with pytest.raises(RowmeshError, match=r"cannot be copied or pickled.*load_state_dict.*rowmesh.AveragedRows"):
        make_copy(torch.nn.Sequential(make()) if make_copy is not copy.copy else make())


DYNAMIC = TableSpec(
    name="item", dim=4, storage="dynamic", dynamic=Dynamic(capacity=10), initializer=Uniform(bound=0.1), optimizer=SGD()
)
NUMBERLESS = r"dynamic tables \['item'\] cannot be in a state dictionary.*rowmesh.save.*rowmesh.load"


def test_what_is_advised_works_with_dynamic_tables_too():
    embeddings = make(tables=[DYNAMIC])
    optimizer = EmbeddingOptimizer(embeddings)
    for refused in (
        embeddings.state_dict,
        torch.nn.Sequential(embeddings).state_dict,
        optimizer.state_dict,
        ShardedState({"tables": embeddings}).state_dict,
        lambda: optimizer.load_state_dict({"step_count": 1, "param_groups": optimizer.param_groups, "rows": {}}),
    ):
        with pytest.raises(CheckpointError, match=NUMBERLESS):
            refused()
    with pytest.raises(RuntimeError, match=NUMBERLESS):
        embeddings.load_state_dict({"item.weight": torch.zeros(10, 4)})
    with pytest.raises(RowmeshError) as copied:
        copy.deepcopy(embeddings)
    assert "rowmesh.save and rowmesh.load" in str(copied.value)
    assert "load_state_dict" not in str(copied.value)
    assert "AveragedRows" in str(copied.value)
    AveragedRows(embeddings).update()


def advise(mesh):
    """What several ranks say of dynamic tables, and of copies."""
    embeddings = make(mesh, [DYNAMIC])
    with pytest.raises(CheckpointError, match=NUMBERLESS) as refused:
        embeddings.state_dict()
    assert "ShardedState" not in str(refused.value)
    embeddings.close()
    embeddings = make(mesh)
    with pytest.raises(RowmeshError, match=r"the rows by rowmesh\.save and rowmesh.load; for a moving average"):
        copy.deepcopy(embeddings)
    embeddings.close()


def test_what_is_advised_works_on_several_ranks_too(ranks: RankPool):
    ranks.run(advise)


# Freezing


def test_frozen_tables_do_not_change():
    embeddings = make()
    optimizer = EmbeddingOptimizer(embeddings)
    network = torch.nn.Linear(12, 1)

    def step(number):
        network(embeddings(batch(number)).values).square().mean().backward()
        optimizer.step()

    step(0)
    assert embeddings.requires_grad_(False) is embeddings
    before = (embeddings.state_dict(), optimizer.state_dict()["rows"])
    assert not embeddings(batch()).values.requires_grad
    assert not embeddings.pool(embeddings.fetch(embeddings.route(batch()))).values.requires_grad
    step(1)
    after = (embeddings.state_dict(), optimizer.state_dict()["rows"])
    assert all(value.equal(b[name]) for a, b in zip(before, after, strict=True) for name, value in a.items())
    assert network.weight.grad is not None
    with pytest.raises(RowmeshError, match="all tables are frozen, and a pipeline waits for their gradients"):
        next(iter(Pipeline(embeddings).windows([Item(batch())])))
    embeddings.requires_grad_()
    step(2)
    assert not embeddings.state_dict()["item.weight"].equal(after[0]["item.weight"])


@dataclass
class Item:
    """What a pipeline reads."""

    sparse: SparseBatch


# Moving averages


def train_averaged(mesh, transport="auto"):
    """Rows, averages as look-ups find them, and rows after that."""
    embeddings = make(mesh, transport=transport)
    optimizer, averages = EmbeddingOptimizer(embeddings), AveragedRows(embeddings, decay=0.9)
    for step in range(4):
        embeddings(batch(step, mesh.rank, mesh.world_size)).values.square().mean().backward()
        optimizer.step()
        averages.update()
    everything = SparseBatch.from_dense(
        ["item", "day", "cores"], torch.arange(11).repeat(3, 1) % torch.tensor([[11], [5], [30]])
    )
    found = []
    with torch.no_grad():
        found.append(embeddings(everything).values.clone())
        with averages.applied():
            found.append(embeddings(everything).values.clone())
        found.append(embeddings(everything).values.clone())
    embeddings.close()
    return found


def test_averages_are_those_of_torch():
    embeddings = make()
    optimizer = EmbeddingOptimizer(embeddings)

    class Rows(torch.nn.Module):
        """The rows and cores as parameters."""

        def __init__(self):
            super().__init__()
            state = embeddings.state_dict()
            self.names = list(state)
            self.rows = torch.nn.ParameterList([torch.nn.Parameter(state[name].clone()) for name in state])

        def take(self):
            with torch.no_grad():
                for parameter, value in zip(self.rows, embeddings.state_dict().values(), strict=True):
                    parameter.copy_(value)
            return self

    rows = Rows()
    expected, averages = (
        AveragedModel(rows, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        AveragedRows(embeddings, decay=0.9),
    )
    for step in range(5):
        embeddings(batch(step)).values.square().mean().backward()
        optimizer.step()
        averages.update()
        expected.update_parameters(rows.take())
    before = embeddings.state_dict()
    with averages.applied():
        found = embeddings.state_dict()
    averaged: Any = expected.module
    for name, parameter in zip(rows.names, averaged.rows, strict=True):
        assert found[name].equal(parameter), name
        assert embeddings.state_dict()[name].equal(before[name])
    assert not found["item.weight"].equal(before["item.weight"])


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_averages_on_two_ranks_are_those_of_one(ranks: RankPool, transport):
    expected = train_averaged(Mesh())
    assert expected[0].equal(expected[2])
    assert not expected[0].equal(expected[1])
    for found in ranks.run(train_averaged, transport):
        assert found[0].equal(found[2])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_among_averages_is_an_error():
    embeddings = make()
    with pytest.raises(RowmeshError, match="averages stand in the place of rows"), AveragedRows(embeddings).applied():
        EmbeddingOptimizer(embeddings).step()


def average_replicas(mesh):
    mode = Synchronization(mode="average", every=2)
    embeddings = make(mesh, TABLES[:1], replicas=2, synchronization=mode)
    with pytest.raises(ConfigurationError, match="replicas that are averaged differ"):
        AveragedRows(embeddings)
    embeddings.close()


def test_what_has_no_average_is_refused(ranks: RankPool):
    with pytest.raises(ConfigurationError, match="decay must be 0 to 1, got 2"):
        AveragedRows(make(), decay=2)
    ranks.run(average_replicas)


# Export


def test_the_dense_part_can_be_exported():
    embeddings = make()
    network = DLRM(num_dense=3, num_features=3, dim=4, bottom=[8, 4], top=[8, 1])
    vectors, dense = embeddings(batch()).stacked().detach(), torch.rand(4, 3)
    program = torch.export.export(network, (dense, vectors), dynamic_shapes=({0: torch.export.Dim("B")},) * 2)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    vectors, dense = torch.cat([vectors, vectors]), torch.rand(8, 3)
    torch.testing.assert_close(loaded(dense, vectors), network(dense, vectors))  # exported dot products are torch's


class Scored(torch.nn.Module):
    """A model about a look-up of ids `[3, B]`."""

    def __init__(self, embeddings):
        super().__init__()
        self.embeddings, self.over = embeddings, torch.nn.Linear(12, 1)

    def forward(self, ids):
        return self.over(self.embeddings(SparseBatch.from_dense([table.name for table in TABLES], ids)).values)


class OfBatches(Scored):
    """The same of batches."""

    def forward(self, batch):
        return self.over(self.embeddings(batch).values)


IDS = torch.tensor([[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize(
    "trace, tool",
    [
        (lambda model: torch.export.export(model, (IDS,)), "torch.export"),
        (lambda model: torch.jit.trace(model, IDS), "torch.jit.trace"),
        (lambda model: make_fx(model)(IDS), "make_fx"),
        (lambda model: torch.jit.script(model), "torch.jit.script"),
        (lambda model: torch.fx.symbolic_trace(OfBatches(model.embeddings)), "torch.fx"),
    ],
    ids=["export", "trace", "make_fx", "script", "fx"],
)
@pytest.mark.filterwarnings("ignore")  # of torch, on its way to the tables
def test_what_makes_one_graph_of_a_model_is_refused(trace, tool):
    with pytest.raises(RowmeshError, match=rf"{tool} cannot .* a look-up, whose rows are in no graph.*dense part"):
        trace(Scored(make()))


def test_torch_fx_takes_a_collection_as_a_leaf():
    class Tracer(torch.fx.Tracer):
        """As the error says."""

        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, EmbeddingCollection) or super().is_leaf_module(m, module_qualified_name)

    model = OfBatches(make())
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert traced(batch()).equal(model(batch()))


def test_counting_modes_are_no_tracers():
    with FlopCounterMode(display=False) as counter:
        Scored(make())(IDS)
    assert counter.get_total_flops() > 0


def test_state_dicts_of_distributed_checkpoints_say_what_to_do():
    model = Scored(make())
    for ask in (
        lambda: get_model_state_dict(model),
        lambda: get_state_dict(model, EmbeddingOptimizer(model.embeddings)),
    ):
        with pytest.raises(AttributeError, match=r"'item' is a table of this EmbeddingCollection.*ShardedState"):
            ask()
    assert not hasattr(model.embeddings, "item")
    with pytest.raises(AttributeError, match="no attribute 'shop'"):
        _ = model.embeddings.shop


def average_in_a_pipeline(mesh):
    """Vectors of averages between the steps of the plain loop, and of a pipeline, which pauses."""
    found, later = [], batch(9, mesh.rank, mesh.world_size)
    for is_piped in (False, True):
        embeddings = make(mesh)
        optimizer, averages = EmbeddingOptimizer(embeddings), AveragedRows(embeddings, decay=0.9)
        seen: list[torch.Tensor] = []

        def look(averages=averages, embeddings=embeddings, seen=seen):
            averages.update()
            with averages.applied(), torch.no_grad():
                seen.append(embeddings(later).values.clone())

        items = [Item(batch(step, mesh.rank, mesh.world_size)) for step in range(4)]
        if is_piped:
            with Pipeline(embeddings, depth=2) as pipeline:
                for window in pipeline.windows(items):
                    for part in window:
                        part.embeddings.values.square().mean().backward()
                    optimizer.step()
                    look()
        else:
            for item in items:
                embeddings(item.sparse).values.square().mean().backward()
                optimizer.step()
                look()
        found.append(torch.stack(seen))
        embeddings.close()
    return found


def test_averages_in_a_pipeline(ranks: RankPool):
    for plain, piped in (average_in_a_pipeline(Mesh()), *ranks.run(average_in_a_pipeline)):
        assert plain.equal(piped)
