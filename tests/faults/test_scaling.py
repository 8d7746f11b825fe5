"""Losses that a GradScaler scales, and gradients that somebody would clip."""

import gc
import weakref

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from rowmesh import (
    AdaGrad,
    Adam,
    EmbeddingCollection,
    EmbeddingOptimizer,
    JointOptimizer,
    Mesh,
    RowmeshError,
    SparseBatch,
    TableSpec,
)
from rowmesh.tables import TensorTrain, Uniform
from rowmesh.tables.update_rules import SGD

SCALE = 1024.0
KINDS = {
    "dense": {},
    "tiered": {"storage": "tiered"},
    "tensor-train": {"storage": "tensor_train", "tensor_train": TensorTrain(rank=2)},
}


def tables(**options):
    rules = {"item": Adam(lr=0.1), "user": AdaGrad(lr=0.1)}
    return [
        TableSpec(name=name, num_rows=30, dim=4, optimizer=rule, initializer=Uniform(), **options)
        for name, rule in rules.items()
    ]


def batch_of(number):
    ids = torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(number))
    return SparseBatch.from_dense(["item", "user"], ids)


class Training:
    """A dense network over embeddings, on one rank or several, stepped by a scaler or plainly."""

    def __init__(self, mesh, transport="auto", **options):
        torch.set_num_threads(1)
        device = options.pop("device", "cpu")
        self.mesh = mesh
        self.embeddings = EmbeddingCollection(tables(**options), mesh=mesh, transport=transport, device=device)
        self.dense = torch.nn.Linear(8, 1)
        with torch.no_grad():
            self.dense.weight.fill_(0.5)
            self.dense.bias.fill_(0.1)
        self.sparse_optimizer = EmbeddingOptimizer(self.embeddings)
        self.dense_optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)

    def backward(self, number, factor=1.0, scaled=True):
        self.dense_optimizer.zero_grad()
        values = self.embeddings(batch_of(10 * number + self.mesh.rank)).values
        if factor != 1.0:  # in the backward of the rows alone
            values = Times.apply(values, factor)
        loss = self.dense(values).square().mean()
        (self.scaler.scale(loss) if scaled else loss).backward()

    def step(self, number, **options):
        self.backward(number, **options)
        self.scaler.step(self.dense_optimizer)
        self.scaler.step(self.sparse_optimizer)
        self.scaler.update()

    def plain_step(self, number):
        self.backward(number, scaled=False)
        self.dense_optimizer.step()
        self.sparse_optimizer.step()

    @property
    def rows(self):
        if self.embeddings.tables[0].storage == "tensor_train":
            found = [self.embeddings.cores(name).tensors for name in ("item", "user")]
            return [tensor.clone() for each in found for tensor in each.values()]
        parts = [part for name in ("item", "user") for part in self.embeddings.local_rows(name)]
        return [tensor.clone() for part in parts for tensor in (part.values, *part.state.values())]


class Times(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, values, factor):
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


def train(mesh, transport, options, how):
    training = Training(mesh, transport, **options)
    for number in range(4):
        if how == "plain":
            training.plain_step(number)
        elif how == "scaled":
            training.step(number)
        else:
            training.backward(number)
            training.scaler.unscale_(training.sparse_optimizer)
            training.scaler.unscale_(training.dense_optimizer)
            training.scaler.step(training.sparse_optimizer)
            training.scaler.step(training.dense_optimizer)
            training.scaler.update()
    return training.rows, training.embeddings.step_count


@pytest.mark.parametrize("how", ["scaled", "unscaled before"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_loss_trains_as_a_plain_one(kind, how):
    mine, theirs = (train(Mesh(), "auto", KINDS[kind], each) for each in (how, "plain"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind, transport",
    [
        ("dense", "collective"),
        pytest.param("dense", "one_sided", marks=pytest.mark.slow),
        pytest.param("tiered", "collective", marks=pytest.mark.slow),
        pytest.param("tensor-train", "one_sided", marks=pytest.mark.slow),
    ],
)
def test_and_so_on_two_ranks(ranks, kind, transport):
    mine, theirs = (ranks.run(train, transport, KINDS[kind], how) for how in ("scaled", "plain"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("kind", ["dense", "tensor-train"])
def test_and_so_on_a_device(kind, device):
    if torch.cuda.is_available():
        pytest.skip("the dense network of this test is on the CPU")
    mine, theirs = (train(Mesh(), "auto", {**KINDS[kind], "device": "cuda"}, how) for how in ("scaled", "plain"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


# Overflow


def overflow_on_one_rank(mesh, transport, joint, options):
    """Step 1 of 0 … 3 overflows in the rows of the last rank alone, and then no rank steps."""
    training = Training(mesh, transport, **options)
    rows, scales = [], []
    both = JointOptimizer(training.dense_optimizer, training.sparse_optimizer)
    weights = []
    for number in range(4):
        is_last = mesh.rank == mesh.world_size - 1
        factor = float("inf") if number == 1 and is_last else 1.0
        training.backward(number, factor=factor)
        if joint:
            training.scaler.step(both)
        else:
            training.scaler.step(training.dense_optimizer)
            training.scaler.step(training.sparse_optimizer)
        training.scaler.update()
        rows.append(training.rows)
        scales.append(training.scaler.get_scale())
        weights.append(training.dense.weight.detach().clone())
    assert all(torch.isfinite(tensor).all() for tensor in rows[-1])
    is_same = [all(map(torch.equal, rows[k], rows[k + 1])) for k in range(3)]
    return is_same, scales, [torch.equal(weights[k], weights[k + 1]) for k in range(3)], training.embeddings.step_count


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_overflows_is_left_out(kind, joint):
    is_same, scales, dense, step_count = overflow_on_one_rank(Mesh(), "auto", joint, KINDS[kind])
    assert is_same == [True, False, False]
    assert dense == [joint, False, False]  # by itself the dense network has stepped
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
    assert step_count == 3


@pytest.mark.parametrize(
    "transport, joint",
    [("collective", True), *(pytest.param("one_sided", joint, marks=pytest.mark.slow) for joint in (False, True))],
)
def test_where_one_rank_overflows_all_leave_the_step_out(ranks, transport, joint):
    for is_same, scales, dense, step_count in ranks.run(overflow_on_one_rank, transport, joint, {}):
        assert is_same == [True, False, False]
        assert dense == [joint, False, False]
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        assert step_count == 3


def skip_a_rank(mesh):
    """Rank 1 has no gradients in the step after the one that overflows."""
    training = Training(mesh, "collective")
    training.backward(0, factor=float("inf"))
    training.scaler.step(training.sparse_optimizer)
    training.scaler.update()
    if mesh.rank == 0:
        training.backward(1)
    else:
        training.embeddings(batch_of(11))
        training.scaler.scale(torch.ones(()))
    training.scaler.step(training.sparse_optimizer)
    training.scaler.update()
    return training.embeddings.step_count, bool(torch.isfinite(torch.cat([r.flatten() for r in training.rows])).all())


def test_gradients_of_a_step_that_was_left_out_come_in_no_later_one(ranks):
    assert ranks.run(skip_a_rank) == [(1, True)] * 2


def test_a_dense_network_that_overflows_holds_the_rows_back_where_both_are_asked():
    training = Training(Mesh())
    both, rows = JointOptimizer(training.dense_optimizer, training.sparse_optimizer), training.rows
    training.backward(0)
    training.dense.bias.grad.fill_(float("nan"))
    training.scaler.step(both)
    training.scaler.update()
    assert all(map(torch.equal, training.rows, rows))
    assert training.scaler.get_scale() == SCALE / 2


def test_gradients_that_are_not_finite_are_not_stepped_by_hand():
    training = Training(Mesh())
    rows = training.rows
    training.backward(0, factor=float("nan"))
    training.scaler.unscale_(training.sparse_optimizer)
    with pytest.raises(RowmeshError, match=r"not finite, on this rank or another; scaler\.step"):
        training.sparse_optimizer.step()
    assert all(map(torch.equal, training.rows, rows))
    training.sparse_optimizer.zero_grad()
    training.sparse_optimizer.step()


def test_several_backward_passes_add_up_before_they_are_unscaled():
    found = []
    for scaled in (True, False):
        training = Training(Mesh())
        for number in range(2):
            training.backward(number, scaled=scaled)
        if scaled:
            training.scaler.step(training.sparse_optimizer)
        else:
            training.sparse_optimizer.step()
        found.append(training.rows)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_gradients_that_come_after_others_were_unscaled_are_refused():
    training = Training(Mesh())
    training.backward(0)
    training.scaler.unscale_(training.sparse_optimizer)
    training.backward(1)
    with pytest.raises(RowmeshError, match="backward ran after the gradients of rows were unscaled"):
        training.scaler.step(training.sparse_optimizer)


def test_an_optimizer_is_freed_with_its_rows():
    training = Training(Mesh())
    training.step(0)
    freed = weakref.ref(training.sparse_optimizer)
    gc.disable()
    try:
        del training.sparse_optimizer, training.scaler
        assert freed() is None
    finally:
        gc.enable()


# Clipping


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_the_gradients_of_rows_is_refused(clip, foreach):
    training = Training(Mesh())
    training.backward(0, scaled=False)
    parameters = [each for group in training.sparse_optimizer.param_groups for each in group["params"]]
    with pytest.raises(RowmeshError, match="cannot be computed of the gradients of rows, which are in no parameter"):
        clip([*training.dense.parameters(), *parameters], 1.0, foreach=foreach)


def test_clipping_the_parameters_of_a_collection_alone_is_noticed():
    training = Training(Mesh())
    training.backward(0, scaled=False)
    with pytest.warns(UserWarning, match="no gradient clipping will occur"):
        clip_grad_norm_(training.embeddings.parameters(), 1.0)


def test_clipped_dense_gradients_and_unscaled_rows():
    """The recipe of the documentation."""
    training = Training(Mesh())
    both = JointOptimizer(training.dense_optimizer, training.sparse_optimizer)
    for number in range(2):
        training.backward(number)
        training.scaler.unscale_(both)
        norm = clip_grad_norm_(training.dense.parameters(), 1e-3)
        assert norm < 100.0
        training.scaler.step(both)
        training.scaler.update()
    assert training.embeddings.step_count == 2


def test_none_in_the_place_of_a_gradient_drops_those_of_the_rows():
    training = Training(Mesh())
    rows = training.rows
    training.backward(0)
    for group in training.sparse_optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    training.sparse_optimizer.step()
    assert all(map(torch.equal, training.rows, rows))


def test_sgd_takes_the_unscaled_gradient():
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=3, dim=2, optimizer=SGD(lr=1.0))])
    optimizer, scaler = EmbeddingOptimizer(embeddings), torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = embeddings.local_rows("item")[0].values.clone()
    scaler.scale(embeddings(SparseBatch.from_bags({"item": [[1]]})).values.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = before - embeddings.local_rows("item")[0].values
    torch.testing.assert_close(moved, torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))


# A step that raises, and comes again


def refuse(optimizer):
    """Has the next step raise before anything is sent, as a schedule that went wrong would; returns what mends it."""
    (group, *_), lr = optimizer.param_groups, optimizer.param_groups[0]["lr"]
    group["lr"] = "a mistake"
    with pytest.raises(ValueError, match="a mistake"):
        optimizer.step()
    group["lr"] = lr


@pytest.mark.parametrize("how", ["clipped", "unscaled", "both"])
def test_a_step_that_comes_again_takes_the_gradients_as_they_were_clipped_and_unscaled(how):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=3, dim=4, optimizer=SGD(lr=1.0))])
    optimizer, scaler = EmbeddingOptimizer(embeddings), torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = embeddings.local_rows("item")[0].values.clone()
    loss = (embeddings(SparseBatch.from_bags({"item": [[1]]})).values * 1000.0).sum()
    (loss if how == "clipped" else scaler.scale(loss)).backward()
    if how != "clipped":
        scaler.unscale_(optimizer)
    expected = 1000.0
    if how != "unscaled":
        assert optimizer.clip_grad_norm_(1.0) == 2000.0
        expected = 0.5
    refuse(optimizer)
    assert torch.equal(embeddings.local_rows("item")[0].values, before)
    if how == "clipped":
        optimizer.step()
    else:
        scaler.step(optimizer)
    moved = before - embeddings.local_rows("item")[0].values
    torch.testing.assert_close(moved, torch.tensor([[0.0], [expected], [0.0]]).expand(3, 4))


def test_a_network_does_not_step_where_the_rows_refuse():
    training = Training(Mesh())
    both = JointOptimizer(training.dense_optimizer, training.sparse_optimizer)
    training.backward(0, scaled=False)
    weights, rows = training.dense.weight.detach().clone(), training.rows
    training.sparse_optimizer.param_groups[0]["lr"] = "a mistake"
    with pytest.raises(ValueError, match="a mistake"):
        both.step()
    assert torch.equal(training.dense.weight, weights)
    training.sparse_optimizer.param_groups[0]["lr"] = 0.1
    both.step()
    assert not torch.equal(training.dense.weight, weights)
    assert not all(map(torch.equal, training.rows, rows))


def step_with_another_rate(mesh):
    """What two ranks refuse together: network and rows stay as they are, on both; and the step may come again."""
    training = Training(mesh, "collective")
    both = JointOptimizer(training.dense_optimizer, training.sparse_optimizer)
    training.backward(0, scaled=False)
    weights, rows = training.dense.weight.detach().clone(), training.rows
    group = training.sparse_optimizer.param_groups[0]
    group["lr"] = 0.1 if mesh.rank else 0.2
    with pytest.raises(RowmeshError, match="ranks disagree about how fast"):
        both.step()
    assert torch.equal(training.dense.weight, weights)
    assert all(map(torch.equal, training.rows, rows))


def test_a_network_does_not_step_where_ranks_differ(ranks):
    ranks.run(step_with_another_rate)
