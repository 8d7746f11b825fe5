"""Updates of touched slices in Triton against plain torch; what is not touched does not change."""

import pytest
import torch

from rowmesh.ops.update_slices import reference
from rowmesh.tables.update_rules import RULES
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("update_slices")


@pytest.mark.parametrize("rule_name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3, 2, 5), (1, 1, 1)])
def test_equals_the_reference(device, rule_name, dtype, shape, monkeypatch):
    monkeypatch.setattr(cuda, "_MOST_COLUMNS", 16)  # a slice is more than one program
    generator = torch.Generator().manual_seed(0)
    core, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    touched = torch.tensor([1, 0, 1, 0, 3], dtype=dtype)[: shape[0]]  # of three ranks
    rule = RULES[rule_name](lr=0.1, **({} if rule_name == "sgd" else {"moment_scale": 1.7}))
    state = {name: torch.full_like(core, 0.1) for name in rule.state}
    mine = [tensor.clone().to(device) for tensor in (core, *state.values())]
    scale = getattr(rule, "moment_scale", 1.0)
    reference.update_slices(rule_name, core, state, 0.5 * gradient, touched, 0.2, *rule.hyperparameters, 3, scale)
    cuda.update_slices(mine[0], mine[1:], gradient.to(device), touched.to(device), rule_name, rule.numbers(0.2, 0.5, 3))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for found, expected in zip(mine, (core, *state.values()), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_slices_that_nobody_read_stay(device):
    core = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(device)
    states = [torch.full_like(core, 0.5), torch.full_like(core, 0.5)]
    before = [tensor.clone() for tensor in (core, *states)]
    touched = torch.tensor([0.0, 1.0, 0.0], device=device)
    rule = RULES["adam"](lr=0.1)
    cuda.update_slices(core, states, torch.ones_like(core), touched, "adam", rule.numbers(0.1, 1.0, 1))
    for now, then in zip((core, *states), before, strict=True):
        assert (now != then).any(1).tolist() == [False, True, False]


def test_refuses_tensors_that_do_not_fit(device):
    core, marks = torch.zeros(3, 4, device=device), torch.zeros(3, device=device)
    with pytest.raises(TypeError, match="gradient must be float32, got float64"):
        cuda.update_slices(core, (), core.double(), marks, "sgd", (0.1, 1.0, 0.0, 0.0, 0.0, 1.0))
