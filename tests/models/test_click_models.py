"""The models of clicks against their papers' formulas, sample by sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import ConfigurationError
from rowmesh.models import (
    DLRM,
    DCNv2,
    DeepFM,
    MMoE,
    ProjectedDLRM,
    Projection,
    SharedBottom,
    TwoTower,
    WideAndDeep,
)
from rowmesh.models.named import NAMED

DIMS = {"user": 4, "item": 4, "ad": 4}
MIXED = {"user": 4, "item": 2, "ad": 3}
B, DENSE = 5, 3


def inputs(dims, num_dense=DENSE):
    torch.manual_seed(1)
    values = torch.randn(B, sum(dims.values()), dtype=torch.float64, requires_grad=True)
    return torch.randn(B, num_dense, dtype=torch.float64), Embeddings(values, tuple(dims), tuple(dims.values()), {})


def made(kind, **options):
    torch.manual_seed(0)
    model = kind(**options).double()
    for parameter in model.parameters():  # biases too, which may start from 0
        nn.init.normal_(parameter, std=0.5)
    return model


def run_mlp(layers: nn.Sequential, x):
    for layer in layers:
        x = F.linear(x, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else x.clamp(min=0)
    return x


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
@pytest.mark.parametrize("labels", [("label",), ("click", "buy")])
def test_dcn_v2(rank, structure, labels):
    model = made(
        DCNv2, dims=MIXED, num_dense=DENSE, rank=rank, structure=structure, deep=[6], num_cross=2, labels=labels
    )
    dense, vectors = inputs(MIXED)
    expected = []
    for sample in range(B):
        first = torch.cat([dense[sample], vectors.values[sample]])
        x = first
        for cross in model.crosses:
            matrix = cross.expand.weight @ cross.squeeze.weight if rank else cross.expand.weight
            assert matrix.shape == (len(first), len(first))
            x = first * (matrix @ x + cross.expand.bias) + x
        deep = run_mlp(model.deep, x if structure == "stacked" else first)
        hidden = deep if structure == "stacked" else torch.cat([x, deep])
        expected.append(model.head.weight @ hidden + model.head.bias)
    logits = torch.stack(expected)
    torch.testing.assert_close(model(dense, vectors), logits if len(labels) > 1 else logits[:, 0])


@pytest.mark.parametrize("num_dense", [0, DENSE])
@pytest.mark.parametrize("dims", [DIMS, MIXED])
def test_deep_fm(dims, num_dense):
    model = made(DeepFM, dims=dims, num_dense=num_dense, deep=[6])
    dense, vectors = inputs(dims, num_dense)
    expected = []
    for sample in range(B):
        rows = [vectors[name][sample] for name in dims]
        v = [
            row[1:] if isinstance(matrix, nn.Identity) else matrix.weight @ row[1:]
            for row, matrix in zip(rows, model.projection.matrices, strict=True)
        ]
        first = model.bias + sum(row[0] for row in rows) + model.dense @ dense[sample]
        second = sum(v[i] @ v[j] for i in range(len(v)) for j in range(i))
        expected.append(first + second + run_mlp(model.deep, torch.cat([dense[sample], *v]))[0])
    torch.testing.assert_close(model(dense, vectors), torch.stack(expected))


def test_wide_and_deep():
    model = made(WideAndDeep, dims=MIXED, num_dense=DENSE, deep=[6])
    dense, vectors = inputs(MIXED)
    expected = []
    for sample in range(B):
        rows = [vectors[name][sample] for name in MIXED]
        wide = model.bias + sum(row[0] for row in rows) + model.dense @ dense[sample]
        expected.append(wide + run_mlp(model.deep, torch.cat([dense[sample], *(row[1:] for row in rows)]))[0])
    torch.testing.assert_close(model(dense, vectors), torch.stack(expected))


def test_shared_bottom():
    model = made(SharedBottom, dims=MIXED, num_dense=DENSE, labels=("click", "buy"), bottom=[7], tower=[5])
    dense, vectors = inputs(MIXED)
    for sample in range(B):
        shared = run_mlp(model.bottom, torch.cat([dense[sample], vectors.values[sample]]))
        expected = torch.cat([run_mlp(tower, shared) for tower in model.towers])
        torch.testing.assert_close(model(dense, vectors)[sample], expected)


def test_mmoe():
    model = made(MMoE, dims=MIXED, num_dense=DENSE, labels=("click", "buy"), num_experts=3, expert=[7], tower=[5])
    dense, vectors = inputs(MIXED)
    for sample in range(B):
        x = torch.cat([dense[sample], vectors.values[sample]])
        experts = [run_mlp(expert, x) for expert in model.experts]
        expected = []
        for gate, tower in zip(model.gates, model.towers, strict=True):
            scores = gate.weight @ x
            shares = scores.exp() / scores.exp().sum()
            expected.append(run_mlp(tower, sum(share * expert for share, expert in zip(shares, experts, strict=True))))
        torch.testing.assert_close(model(dense, vectors)[sample], torch.cat(expected))


@pytest.mark.parametrize("normalize", [True, False])
def test_two_tower(normalize):
    options = {"item": ["item", "ad"], "widths": [6, 4], "normalize": normalize, "temperature": 0.5}
    model = made(TwoTower, dims=MIXED, num_dense=DENSE, **options)
    dense, vectors = inputs(MIXED)
    for sample in range(B):
        u = run_mlp(model.query_tower, torch.cat([dense[sample], vectors["user"][sample]]))
        v = run_mlp(model.item_tower, torch.cat([vectors["item"][sample], vectors["ad"][sample]]))
        lengths = u.norm() * v.norm() if normalize else 1.0
        torch.testing.assert_close(model(dense, vectors)[sample], u @ v / lengths / 0.5)


def test_projected_dlrm_is_dlrm_of_projected_vectors():
    model = made(ProjectedDLRM, dims=MIXED, num_dense=DENSE, bottom=[6], top=[6])
    dense, vectors = inputs(MIXED)
    projected = [
        vectors[name] if isinstance(matrix, nn.Identity) else vectors[name] @ matrix.weight.T
        for name, matrix in zip(MIXED, model.projection.matrices, strict=True)
    ]
    assert isinstance(model.dlrm, DLRM)
    torch.testing.assert_close(model(dense, vectors), model.dlrm(dense, torch.stack(projected, 1)))


def test_a_projection_keeps_what_has_its_width():
    projection = Projection(MIXED)
    assert [isinstance(matrix, nn.Identity) for matrix in projection.matrices] == [True, False, False]
    assert sum(parameter.numel() for parameter in projection.parameters()) == 4 * (2 + 3)
    assert Projection(MIXED, 8).width == 8


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_gradients_reach_everything(name, num_dense):
    options = {"item": ["item"]} if name == "two_tower" else {}
    model = made(NAMED[name], dims=DIMS, num_dense=num_dense, **options)
    dense, vectors = inputs(DIMS, num_dense)
    model(dense, vectors).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.numel() == 0 or (parameter.grad is not None and parameter.grad.abs().sum() > 0), key
    assert vectors.values.grad is not None
    assert (vectors.values.grad != 0).all()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ProjectedDLRM, {"width": 0}, "projection: width must be positive, got 0"),
        (ProjectedDLRM, {"dims": {}}, "projection: there are no features with embeddings"),
        (DCNv2, {"num_cross": 0}, "dcn_v2: num_cross must be positive, got 0"),
        (DCNv2, {"rank": 15}, r"dcn_v2: rank must be 0 \(full\) to 14, below the 15 inputs; got 15"),
        (DCNv2, {"structure": "deep"}, "dcn_v2: structure must be 'stacked' or 'parallel', got 'deep'"),
        (DeepFM, {"labels": ("a", "b")}, "deep_fm predicts one label, and the data have 2 .a, b.; take shared_bottom"),
        (DeepFM, {"deep": [3, 0]}, "deep_fm: deep must be positive"),
        (WideAndDeep, {"dims": {"user": 1}}, "the vector of 'user' has dim 1; it needs 2 or more"),
        (MMoE, {"num_experts": 0}, "mmoe: num_experts must be positive"),
        (SharedBottom, {"num_dense": -1}, "num_dense must be 0 or more, got -1"),
        (SharedBottom, {"dims": {}}, "there are no features with embeddings"),
        (TwoTower, {"item": ["itm"]}, "item names 'itm', which is no feature; did you mean 'item'"),
        (TwoTower, {"item": "item"}, r"item must be a list of features; write \['item'\]"),
        (TwoTower, {"item": list(DIMS), "num_dense": 0}, "the query tower has no inputs"),
        (TwoTower, {"item": []}, "the item tower has no inputs"),
        (TwoTower, {"item": ["item"], "temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_what_cannot_work_is_named(kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(**{"dims": DIMS, "num_dense": DENSE, **options})
