"""Models that torch.compile compiles: look-ups stay Python, between graphs, and compute what they compute alone."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from rowmesh import EmbeddingCollection, SparseBatch, TableSpec, TensorTrainEmbeddingBag
from rowmesh.ops.untraced import untraced

# What dynamo hides from users by a filter of its own, which does not withstand warnings that are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Scored(nn.Module):
    """A model about a look-up."""

    def __init__(self, embeddings, look_up):
        super().__init__()
        self.embeddings, self.look_up, self.over = embeddings, look_up, nn.Linear(12, 1)

    def forward(self, ids):
        return self.over(torch.tanh(self.look_up(self.embeddings, ids)))


def gradients(model, compiled, ids):
    model.zero_grad()
    compiled(ids).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "look_up", [lambda bag, ids: bag(ids), lambda bag, ids: bag.rows(ids[:, 0])], ids=["bags", "rows"]
)
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_a_compiled_model_of_tensor_train_bags(mode, look_up):
    model = Scored(TensorTrainEmbeddingBag(101, 12, mode=mode, rank=(5, 7), seed=1), look_up)
    compiled = torch.compile(model, backend="aot_eager")
    for size in (3, 4):
        ids = torch.arange(2 * size).view(size, 2)
        assert torch.equal(compiled(ids), model(ids))
        pairs = zip(gradients(model, compiled, ids), gradients(model, model, ids), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_compiled_model_of_a_collection():
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=12)])
    model = Scored(embeddings, lambda embeddings, batch: embeddings(batch).values)
    batch = SparseBatch.from_bags({"item": [[1, 2], [3]]})
    assert torch.equal(torch.compile(model, backend="aot_eager")(batch), model(batch))


def test_nothing_is_imported_for_those_who_do_not_compile():
    check = "import sys; from rowmesh.ops.untraced import untraced; assert untraced(abs)(-2) == 2; "
    check += "assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_arguments_are_passed_on():
    seen = []
    untraced(lambda *args, **kwargs: seen.append((args, kwargs)))(1, a=2)
    assert seen == [((1,), {"a": 2})]
