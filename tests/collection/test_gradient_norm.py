"""Clipping by the norm of all gradients, those of rows too, equals that of a dense model in plain PyTorch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rowmesh import (
    SGD,
    EmbeddingCollection,
    EmbeddingOptimizer,
    JointOptimizer,
    Mesh,
    RowmeshError,
    SparseBatch,
    Synchronization,
    TableSpec,
)
from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.tables import Dynamic, TensorTrain, Uniform
from tests.support.ranks import RankPool
from tests.support.triton import kernels_of

LR = 0.1
TABLES = (
    TableSpec(name="a", num_rows=30, dim=3, optimizer=SGD(lr=LR), dtype=torch.float64),
    TableSpec(name="b", num_rows=9, dim=3, optimizer=SGD(lr=LR), dtype=torch.float64),
    TableSpec(name="c", num_rows=17, dim=16, optimizer=SGD(lr=LR), dtype=torch.float64),
)
NAMES = [table.name for table in TABLES]
RULES = ("cyclic", "replicated", "node", "fixed")


def ids_of(step, part):
    """`[F, 8]`, with many duplicates; 8 samples of all ranks together."""
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.stack([torch.randint(table.num_rows // 2, (8,), generator=generator) for table in TABLES])


def head():
    torch.manual_seed(0)
    return torch.nn.Linear(sum(table.dim for table in TABLES), 1, dtype=torch.float64)


def plan_of(layout, world_size):
    if layout == "plain" or world_size == 1:
        return None
    tables = []
    for table in TABLES:
        n = table.num_rows
        edges = [n * number // 8 for number in range(5)] + [n]
        bounds = zip(edges, edges[1:], (*RULES, "cyclic"), strict=False)
        parts = [
            RowRange(start, stop, rule, two_hop=layout == "hops" and rule != "fixed") for start, stop, rule in bounds
        ]
        tables.append(TablePlan(TableShape.of(table), tuple(part for part in parts if len(part))))
    return Plan(tuple(tables), world_size=world_size, ranks_per_node=2)


def train(mesh, layout, max_norm, transport: Any = "auto", replicas=1, device="cpu"):
    """Three steps of two backward passes; norms, this rank's rows by table and number, and the network."""
    if layout != "plain" and mesh.world_size > 1:
        mesh = replace(mesh, hosts=tuple(rank // 2 for rank in range(mesh.world_size)))
    options: dict[str, Any] = {"replicas": replicas} if replicas > 1 else {"plan": plan_of(layout, mesh.world_size)}
    embeddings = EmbeddingCollection(TABLES, mesh=mesh, transport=transport, device=device, **options)
    dense = head()
    model = dense if mesh.group is None else DistributedDataParallel(dense, process_group=mesh.group)
    dense_optimizer, optimizer = torch.optim.SGD(dense.parameters(), lr=LR), EmbeddingOptimizer(embeddings)
    norms = []
    for step in range(3):
        dense_optimizer.zero_grad()
        for part in range(2):
            ids = ids_of(step, part)[:, mesh.rank :: mesh.world_size]
            model(torch.tanh(embeddings(SparseBatch.from_dense(NAMES, ids)).values)).square().mean().backward()
        norms.append(float(optimizer.clip_grad_norm_(max_norm, dense.parameters())))
        dense_optimizer.step()
        optimizer.step()
    rows = {}
    for name in NAMES:
        for piece in embeddings.held_rows(name):
            rows.update({(name, row): value.clone() for row, value in zip(piece.rows, piece.values, strict=True)})
    embeddings.close()
    return norms, rows, dense.weight.detach().clone()


def reference(max_norm):
    """The same with dense parameters and torch's own clipping."""
    collection = EmbeddingCollection(TABLES)
    tables = torch.nn.ParameterDict({name: collection.local_rows(name)[0].values.clone() for name in NAMES})
    dense, norms = head(), []
    parameters = [*dense.parameters(), *tables.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            ids = ids_of(step, part)
            vectors = torch.cat([tables[name][each] for name, each in zip(NAMES, ids, strict=True)], dim=1)
            dense(torch.tanh(vectors)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
    rows = {(name, row): value.detach() for name in NAMES for row, value in enumerate(tables[name])}
    return norms, rows, dense.weight.detach()


def compare(found, expected):
    norms, rows, weight = found
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected[0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(weight, expected[2], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(rows, {key: expected[1][key] for key in rows}, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_one_rank_clips_as_plain_torch(max_norm):
    compare(train(Mesh(), "plain", max_norm), reference(max_norm))


@pytest.mark.parametrize(
    "world_size, layout, transport, replicas",
    [
        (2, "plain", "one_sided", 1),
        (2, "plain", "collective", 1),
        (4, "nodes", "collective", 1),
        (4, "hops", "collective", 1),
        (2, "nodes", "one_sided", 1),
        (4, "plain", "auto", 2),
    ],
)
def test_several_ranks_clip_as_plain_torch(ranks: RankPool, world_size, layout, transport, replicas):
    expected = reference(0.05)
    assert max(expected[0]) > 0.05
    parts = ranks.run(train, layout, 0.05, transport, replicas, world_size=world_size)
    for found in parts:
        assert found[0] == parts[0][0], "ranks have different norms"
        compare(found, expected)


def backward(embeddings, weight=1.0):
    (embeddings(SparseBatch.from_bags({"item": [[1], [1, 2]]})).values.sum() * weight).backward()


def make(mesh=None, **options: Any):
    options.setdefault("optimizer", SGD(lr=1.0))
    table = TableSpec(name="item", num_rows=5, dim=4, **options)
    embeddings = EmbeddingCollection([table], mesh=mesh)
    return embeddings, EmbeddingOptimizer(embeddings)


def test_clipping_comes_last():
    embeddings, optimizer = make()
    backward(embeddings)
    optimizer.clip_grad_norm_(1.0)
    backward(embeddings)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RowmeshError, match="backward ran after the gradients of rows were unscaled or clipped"):
            call()


def test_a_norm_that_is_not_finite_is_refused():
    embeddings, optimizer = make()
    before = embeddings.state_dict()["item.weight"]
    backward(embeddings, torch.inf)
    with pytest.raises(RowmeshError, match=r"norm of all gradients is (nan|inf)"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    optimizer.step()
    assert embeddings.state_dict()["item.weight"].equal(before)


@pytest.mark.parametrize("overflows", [False, True])
def test_clipping_under_a_scaler(overflows):
    embeddings, optimizer = make()
    before = embeddings.state_dict()["item.weight"]
    dense = torch.nn.Linear(2, 1)
    both = JointOptimizer(torch.optim.SGD(dense.parameters(), lr=1.0), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    values = embeddings(SparseBatch.from_bags({"item": [[1], [1, 2]]})).values
    scaler.scale(values.sum() * (torch.inf if overflows else 1.0)).backward()
    scaler.unscale_(both)
    norm = optimizer.clip_grad_norm_(1.0, dense.parameters())
    scaler.step(both)
    change = before - embeddings.state_dict()["item.weight"]
    if overflows:
        assert not norm.isfinite()
        assert not change.any()
    else:
        torch.testing.assert_close(norm, torch.tensor(20.0).sqrt())
        torch.testing.assert_close(change.norm(), torch.tensor(1.0), rtol=1e-5, atol=0)
    scaler.update()
    optimizer.zero_grad()
    backward(embeddings)
    optimizer.step()  # nothing of the clipping is left
    again = before - change - embeddings.state_dict()["item.weight"]
    torch.testing.assert_close(again.norm(), torch.tensor(20.0).sqrt(), rtol=1e-5, atol=0)


def clip_what_was_not_averaged(mesh):
    embeddings, optimizer = make(mesh)
    backward(embeddings)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), 1.0 + mesh.rank)
    with pytest.raises(RowmeshError, match=r"dense gradients differ between ranks, whose norms are \[1.0, 2.0\]"):
        optimizer.clip_grad_norm_(1.0, [parameter])
    embeddings.close()


def clip_averaged_replicas(mesh):
    table = TableSpec(name="item", num_rows=5, dim=4)
    mode = Synchronization(mode="average", every=2)
    embeddings = EmbeddingCollection([table], mesh=mesh, replicas=2, synchronization=mode)
    backward(embeddings)
    with pytest.raises(ConfigurationError, match="replicas that are averaged step on gradients of their own"):
        EmbeddingOptimizer(embeddings).clip_grad_norm_(1.0)
    embeddings.close()


@pytest.mark.parametrize("refused", [clip_what_was_not_averaged, clip_averaged_replicas])
def test_what_several_ranks_refuse(ranks: RankPool, refused):
    ranks.run(refused)


@pytest.mark.triton
def test_a_device_clips_as_plain_torch():
    kernels_of("merge_update")
    compare(train(Mesh(), "plain", 0.05, device="cuda"), reference(0.05))


@pytest.mark.triton
@pytest.mark.parametrize(
    "transport, layout", [("collective", "plain"), ("collective", "nodes"), ("one_sided", "nodes")]
)
def test_devices_clip_as_plain_torch(ranks: RankPool, transport, layout):
    kernels_of("merge_update")
    for found in ranks.run(train, layout, 0.05, transport, 1, "cuda"):
        compare(found, reference(0.05))


CORED = (
    TableSpec(
        name="a",
        num_rows=60,
        dim=4,
        optimizer=SGD(lr=LR),
        dtype=torch.float64,
        storage="tensor_train",
        tensor_train=TensorTrain(rank=2),
    ),
    TableSpec(name="b", num_rows=9, dim=16, optimizer=SGD(lr=LR), dtype=torch.float64),
)


def cored_batch(step, rank=0, size=1):
    generator = torch.Generator().manual_seed(step)
    return torch.stack([torch.randint(table.num_rows, (8,), generator=generator) for table in CORED])[:, rank::size]


def train_cores(mesh, max_norm, device="cpu"):
    """Norms, cores and rows after two steps of two backward passes; without a norm nothing is clipped."""
    if device != "cpu":
        kernels_of("merge_update")
    embeddings = EmbeddingCollection(CORED, mesh=mesh, device=device)
    optimizer, norms = EmbeddingOptimizer(embeddings), []
    for step in range(2):
        for part in range(2):
            ids = cored_batch(2 * step + part, mesh.rank, mesh.world_size)
            values = embeddings(SparseBatch.from_dense(["a", "b"], ids)).values
            torch.tanh(values).square().mean().backward()
        norms.append(0.0 if max_norm is None else float(optimizer.clip_grad_norm_(max_norm)))
        optimizer.step()
    rows = {
        row: value.clone()
        for piece in embeddings.held_rows("b")
        for row, value in zip(piece.rows, piece.values, strict=True)
    }
    cores = [core.clone() for core in embeddings.cores("a").cores]
    embeddings.close()
    return norms, cores, rows


def reference_cores(max_norm):
    """The same with the cores as parameters and torch's own clipping."""
    collection = EmbeddingCollection(CORED)
    cores = [torch.nn.Parameter(core.clone()) for core in collection.cores("a").cores]
    rows = torch.nn.Parameter(collection.local_rows("b")[0].values.clone())
    optimizer, norms = torch.optim.SGD([*cores, rows], lr=LR), []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            first, second = cored_batch(2 * step + part)
            table = torch.einsum("aur,brvs,cws->abcuvw", *cores).flatten(3).flatten(0, 2)
            torch.tanh(torch.cat([table[first], rows[second]], dim=1)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([*cores, rows], max_norm)))
        optimizer.step()
    return norms, [core.detach() for core in cores], dict(enumerate(rows.detach()))


def compare_cores(found, max_norm):
    expected = reference_cores(max_norm)
    assert max(expected[0]) > max_norm
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found[2], {row: expected[2][row] for row in found[2]}, rtol=1e-7, atol=1e-9)


def test_cores_are_clipped_as_plain_torch(ranks: RankPool):
    compare_cores(train_cores(Mesh(), 0.002), 0.002)
    for found in ranks.run(train_cores, 0.002):
        compare_cores(found, 0.002)


def test_asking_for_the_norm_changes_nothing():
    plain, asked = train_cores(Mesh(), None), train_cores(Mesh(), 1e9)
    assert all(map(torch.equal, plain[1], asked[1]))
    assert all(value.equal(asked[2][row]) for row, value in plain[2].items())


@pytest.mark.triton
def test_cores_on_a_device():
    kernels_of("merge_update")
    compare_cores(train_cores(Mesh(), 0.002, "cuda"), 0.002)


# Ids without a row of their own, whose gradients are dropped

KNOWN, GUEST = 7_000_000_005, -6


def made_dynamic(mesh, **options: Any):
    """Two fused dynamic tables and a dense one; "b" knows an id by now, and is about to meet another."""
    rules = Dynamic(capacity=8, admit_after=2 * mesh.world_size)  # in their second batch
    how: dict[str, Any] = {"storage": "dynamic", "dynamic": rules, "initializer": Uniform(bound=0.1)}
    tables = [TableSpec(name=name, dim=1, optimizer=SGD(lr=1.0), **how) for name in "ab"]
    tables.append(TableSpec(name="c", num_rows=4, dim=1, optimizer=SGD(lr=1.0)))
    embeddings = EmbeddingCollection(tables, mesh=mesh, **options)
    optimizer = EmbeddingOptimizer(embeddings)
    for _ in range(2):
        embeddings(SparseBatch.from_bags({"a": [[1]], "b": [[KNOWN]], "c": [[1]]})).values.sum().mul(0.0).backward()
        optimizer.step()
    return embeddings, optimizer


def known_row(embeddings):
    """The row of the known id, where this rank has it."""
    known = embeddings.known_rows("b")
    return known.values[known.ids == KNOWN].flatten().tolist()


def backward_to_a_guest(embeddings, of_known, of_guest, scale=lambda loss: loss):
    """Gradients of the known id and of the guest."""
    found = embeddings(SparseBatch.from_bags({"a": [[]], "b": [[KNOWN, GUEST]], "c": [[]]}))["b"].sum()
    rows = embeddings(SparseBatch.from_bags({"a": [[]], "b": [[KNOWN]], "c": [[]]}))["b"].sum()
    scale(found * of_guest + rows * (of_known - of_guest)).backward()


def clip_beside_a_guest(mesh, transport: Any = "auto", replicas=1, device="cpu"):
    embeddings, optimizer = made_dynamic(mesh, transport=transport, replicas=replicas, device=device)
    before = known_row(embeddings)
    backward_to_a_guest(embeddings, 3.0, 4.0)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert float(norm) == pytest.approx(3.0)
    assert known_row(embeddings) == pytest.approx([row - 1.0 for row in before], abs=1e-5)
    embeddings.close()
    return len(before)


def scale_beside_a_guest(mesh, transport: Any = "auto", replicas=1, device="cpu"):
    embeddings, optimizer = made_dynamic(mesh, transport=transport, replicas=replicas, device=device)
    for of_known, is_taken in ((1.0, True), (float("nan"), False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        before, steps = known_row(embeddings), embeddings.step_count
        is_here = mesh.rank == mesh.world_size - 1
        out = embeddings(SparseBatch.from_bags({"a": [[], []], "b": [[KNOWN], [GUEST - steps]], "c": [[], []]}))["b"]
        factors = torch.tensor([[of_known if is_here else 1.0], [float("inf") if is_here else 1.0]], device=out.device)
        scaler.scale((out * factors).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert embeddings.step_count - steps == is_taken
        assert scaler.get_scale() == (2.0 if is_taken else 1.0)
        assert known_row(embeddings) == pytest.approx([row - 1.0 * is_taken for row in before], abs=1e-5)
        optimizer.zero_grad()
    embeddings.close()


def test_gradients_of_guests_do_not_count():
    assert clip_beside_a_guest(Mesh()) == 1
    scale_beside_a_guest(Mesh())


@pytest.mark.parametrize(("transport", "replicas"), [("collective", 1), ("one_sided", 1), ("auto", 2)])
def test_nor_do_they_on_two_ranks(ranks: RankPool, transport, replicas):
    assert sum(ranks.run(clip_beside_a_guest, transport, replicas)) == replicas
    ranks.run(scale_beside_a_guest, transport, replicas)


@pytest.mark.triton
def test_nor_do_they_on_a_device():
    kernels_of("merge_update")
    assert clip_beside_a_guest(Mesh(), device="cuda") == 1
    scale_beside_a_guest(Mesh(), device="cuda")


# The norm's numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [None, torch.float32, torch.float64])
def test_the_norm_is_of_the_widest_dtype(dtype, dense):
    embeddings, optimizer = make(dtype=dtype)
    before = embeddings.state_dict()["item.weight"]
    parameters = [] if dense is None else [torch.nn.Parameter(torch.zeros(2, dtype=dense))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1 / 3)
    factor = 1 / 3 + 1e-12
    (embeddings(SparseBatch.from_bags({"item": [[1]]})).values.sum() * factor).backward()
    norm = optimizer.clip_grad_norm_(0.1, parameters)
    optimizer.step()
    assert norm.dtype == (torch.float64 if torch.float64 in (dtype, dense) else torch.float32)
    expected = (4 * factor**2 + (2 / 9 if parameters else 0.0)) ** 0.5
    is_exact = dtype == torch.float64 and dense != torch.float32
    torch.testing.assert_close(float(norm), expected, rtol=1e-14 if is_exact else 1e-6, atol=0)
    moved = (before - embeddings.state_dict()["item.weight"])[1]
    clipped = factor * 0.1 / (expected + 1e-6)
    torch.testing.assert_close(moved, torch.full_like(moved, clipped), rtol=1e-13 if is_exact else 1e-5, atol=1e-15)
    for parameter in parameters:
        grad = torch.full_like(parameter, (1 / 3) * 0.1 / (expected + 1e-6))
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=0)
