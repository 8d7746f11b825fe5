"""Linear layers by oneDNN against torch's own, in double precision."""

import copy
import itertools
import json
import logging
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rowmesh.ops import linear as package
from rowmesh.ops.linear import ALL, NONE, Choices, Measured, Passes, cpu, linear, linear_shapes, reference, using
from rowmesh.ops.linear import measured as measuring

pytestmark = pytest.mark.skipif(cpu.obstacle() is not None, reason=str(cpu.obstacle()))


@pytest.fixture
def used(monkeypatch):
    """Counts the products that oneDNN computes."""
    calls, product = [], cpu.product

    def counted(*tensors):
        calls.append(tuple(tensors[0].shape))
        return product(*tensors)

    monkeypatch.setattr(cpu, "product", counted)
    return calls


def draw(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).requires_grad_() for size in sizes]


def assert_near(actual, expected):
    """Within 2e-6 of the largest number, as products of float32 are among themselves."""
    assert actual.dtype == torch.float32
    expected = expected.double()
    assert (actual.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("passes", [Passes(*each) for each in itertools.product([False, True], repeat=3)])
@pytest.mark.parametrize("relu", [False, True])
def test_equals_the_reference(passes, relu):
    for samples, inputs, outputs in ((1, 1, 1), (5, 3, 2), (64, 33, 7), (300, 13, 50), (128, 367, 64)):
        x, weight, bias = draw((samples, inputs), (outputs, inputs), (outputs,), seed=samples)
        (grad,) = draw((samples, outputs), seed=7)
        y = linear(x, weight, bias, relu=relu, passes=passes)
        found = torch.autograd.grad(y, (x, weight, bias), grad)
        double = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
        plain = reference.linear(*double)
        assert_near(y, plain.relu() if relu else plain)
        is_on = (y > 0) if relu else torch.ones_like(y)  # a number near zero may be on either side of it
        for actual, expected in zip(found, torch.autograd.grad(plain, double, grad.double() * is_on), strict=True):
            assert_near(actual, expected)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_gradients_of_some_inputs(used, asked):
    tensors = [each.detach() for each in draw((40, 30), (20, 30), (20,))]
    for number in asked:
        tensors[number].requires_grad_()
    linear(*tensors).sum().backward()
    for number, tensor in enumerate(tensors):
        assert (tensor.grad is not None) == (number in asked)
    assert len(used) == 1 + (0 in asked) + (1 in asked)


def test_inputs_of_other_layouts_and_shapes():
    x, weight, bias = draw((6, 4, 10), (5, 10), (5,))
    views = [x, x.transpose(0, 1), x[::2], x[0], x[0, 0], x[:, :1].expand(6, 3, 10)]
    for view in views:
        y = linear(view, weight, bias)
        assert y.shape == F.linear(view, weight, bias).shape
        assert_near(y, F.linear(view, weight, bias))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert_near(grad, torch.autograd.grad(F.linear(view, weight, bias).sum(), x)[0])
    assert_near(linear(x, weight.detach()[:, :]), F.linear(x, weight))
    assert_near(linear(x, bias=None, weight=weight.t().contiguous().t()), F.linear(x, weight))


def test_no_samples():
    x, weight, bias = draw((0, 4), (3, 4), (3,))
    (grad,) = torch.autograd.grad(linear(x, weight, bias).sum(), weight)
    assert grad.equal(torch.zeros(3, 4))


def test_what_onednn_is_not_for_is_torchs_own(used):
    x, weight, bias = draw((8, 4), (3, 4), (3,))
    assert linear(x.double(), weight.double(), bias.double()).dtype == torch.float64
    assert linear(x, weight, bias, passes=NONE).equal(F.linear(x, weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.sum(), weight)[0].dtype == torch.float32
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x, weight[:, :2])
    assert not used


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torch_func_and_forward_gradients_are_torchs_own(used):
    x, weight = (each.detach() for each in draw((8, 4), (3, 4)))
    torch.func.grad(lambda w: linear(x, w).sum())(weight)
    torch.func.vmap(lambda row: linear(row, weight))(x)
    torch.func.jvp(lambda w: linear(x, w), (weight,), (weight,))
    assert not used


def test_gradients_of_gradients_are_torchs_own():
    x, weight = draw((6, 4), (3, 4))

    def penalty(function):
        (grad,) = torch.autograd.grad(function(x, weight).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), weight)[0]

    assert_near(penalty(linear), penalty(F.linear))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1, bias=False))


def test_a_block_changes_linear_layers_of_the_chosen_shapes(used):
    layers, x = network(), torch.randn(32, 10)
    expected = layers(x)
    with using(Choices({(8, 10): ALL, (6, 8): Passes(False, True, False)})):
        assert_near(layers(x), expected)
        assert used == [(32, 10)]
        y = layers(x)
    y.sum().backward()  # after the block
    assert len(used) == 4, "forward of the first, its weight, and what the second passes on"
    assert layers(x).equal(expected)
    assert len(used) == 4


def test_the_network_stays_what_it_is():
    layers, choices = network(), Choices.everything(linear_shapes(network()))
    with using(choices):
        layers(torch.randn(4, 10)).sum().backward()
        twin = copy.deepcopy(layers)
    assert list(twin.state_dict()) == [
        f"{i}.{name}" for i, name in ((0, "weight"), (0, "bias"), (2, "weight"), (2, "bias"), (4, "weight"))
    ]
    assert all(type(layer) is nn.Linear for layer in list(twin)[::2])
    assert [type(parameter) for parameter in twin.parameters()] == [nn.Parameter] * 5


def test_exported_models_are_plain(used):
    layers, x = network().eval(), torch.randn(4, 10)
    with using(Choices.everything(linear_shapes(layers))):
        exported = torch.export.export(layers, (x,))
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert names == {"aten.linear.default", "aten.relu.default"}
    assert not used


def test_only_the_thread_that_asks_is_changed(used):
    layers, x = network(), torch.randn(4, 10)
    with using(Choices.everything(linear_shapes(layers))):
        thread = threading.Thread(target=layers, args=(x,))
        thread.start()
        thread.join()
    assert not used


def test_choices_are_sent_as_plain_values():
    choices = Choices({(8, 10): ALL, (1, 8): Passes(False, True, False)})
    assert Choices.from_plain(json.loads(json.dumps(choices.to_plain()))) == choices
    assert choices
    assert not Choices()
    assert not Choices({(1, 8): NONE})
    with pytest.raises((ValueError, TypeError)):
        Choices.from_plain([[1, 2]])


def test_near_ties_and_small_products_are_torchs_own():
    times = {(8, 10): ((2.0, 1.0), (1.1, 1.0), (1.0, 2.0)), (1, 8): ((1e-3, 1e-4),) * 3}
    measured = Measured(times, 64, False)
    assert measured.choices.passes == {(8, 10): Passes(True, False, False), (1, 8): NONE}
    assert measured.gain == pytest.approx((4.1 + 3e-3) / (3.1 + 3e-3))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "cache_folder", lambda: str(tmp_path))
    return tmp_path


def measure(shapes, samples=16):
    return package.measure(shapes, samples, budget_s=0.0)


def test_what_was_measured_is_read_the_next_time(folder, monkeypatch):
    first = measure([(4, 3), (2, 4)])
    assert not first.is_kept
    assert measure([(2, 4)]) == Measured({(2, 4): first.times[2, 4]}, 16, True)
    more = measure([(4, 3), (5, 5)])
    assert not more.is_kept
    assert more.times[4, 3] == first.times[4, 3]
    assert measure([(2, 4), (5, 5)]).is_kept
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not measure([(2, 4)]).is_kept, "other threads"
    assert not measure([(2, 4)], samples=64).is_kept, "other samples"
    assert len(list(folder.iterdir())) == 3


def test_where_samples_vary_every_product_is_of_another_number(folder, monkeypatch):
    """So that the time in which oneDNN makes an operator is part of what is measured."""
    rows = []
    product = measuring.product
    monkeypatch.setattr(measuring, "product", lambda x, *others: (rows.append(len(x)), product(x, *others))[1])
    found = package.measure([(2, 4)], 500, budget_s=0.01, varies=True)
    assert (found.samples, found.varies, found.is_kept) == (256, True, False)
    forward = rows[::2]  # the gradient of the input comes after it
    assert len({*forward}) == len(forward) > 2
    assert not package.measure([(2, 4)], 500, budget_s=0.0).is_kept, "that is another measurement"
    assert package.measure([(2, 4)], 500, budget_s=0.0, varies=True).is_kept
    assert package.measure([(2, 4)], 1 << 20, budget_s=0.0, varies=True).samples == 4096


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 40, b"[[2, 4]]", b"[[2, 4, [[1, 1], [1, 1], [1, -1]]]]", b"{}{", b"\xff"]
)
def test_a_damaged_file_is_measured_again(folder, caplog, damage):
    measure([(2, 4)])
    (path,) = folder.iterdir()
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert not measure([(2, 4)]).is_kept
    assert f"{path} cannot be used" in caplog.text
    assert measure([(2, 4)]).is_kept


@pytest.mark.parametrize("where", [None, "/proc/no such folder"])
def test_without_a_folder_each_process_measures(monkeypatch, where):
    monkeypatch.setattr(measuring, "cache_folder", lambda: where)
    assert not measure([(2, 4)]).is_kept
    assert not measure([(2, 4)]).is_kept


def fail(*tensors):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda patch: patch.setattr(torch.backends.mkldnn, "is_available", lambda: False), "has no oneDNN"),
        (lambda patch: patch.setattr(torch.ops, "mkldnn", object()), "has no operator for it"),
        (lambda patch: patch.setattr(cpu, "product", fail), "fails: no such kernel"),
        (
            lambda patch: patch.setattr(cpu, "product", lambda x, w, b=None: torch.zeros(len(x), len(w))),
            "something else",
        ),
    ],
)
def test_builds_without_it_are_told_why(monkeypatch, change, why):
    change(monkeypatch)
    assert why in str(cpu.obstacle.__wrapped__())
