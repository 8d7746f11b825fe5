"""TensorTrainEmbeddingBag by the kernels of a device, on the GPU or interpreted; what holds on the CPU too, on both."""

import copy
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from rowmesh.errors import ConfigurationError, IdRangeError
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer, module
from tests.support.triton import find_device, kernels_of, refusing_waits
from tests.tensor_train.test_module import jagged

NUM_ROWS, DIM = 30, 4


DEVICE = pytest.param("device", marks=pytest.mark.triton)


@pytest.fixture(params=["host", DEVICE])
def where(request, monkeypatch):
    """Where the tensors of a test belong, on which the kernels of that place run."""
    return torch.device("cpu") if request.param == "host" else use_device(monkeypatch)


@pytest.fixture(params=[DEVICE])
def device(monkeypatch):
    """The device alone."""
    return use_device(monkeypatch)


def use_device(monkeypatch):
    """Where there is no GPU, its kernels run on CPU tensors."""
    kernels_of("tensor_train")  # or the test is skipped
    monkeypatch.setattr("rowmesh.tensor_train.module.is_on_device", lambda core: True)
    return find_device()


def make(where, mode="sum", dtype=torch.float64, **options):
    return TensorTrainEmbeddingBag(NUM_ROWS, DIM, mode=mode, dtype=dtype, rank=(2, 3), seed=1, device=where, **options)


def on_cpu(bag):
    """Its cores, as leaves on the CPU, and the table that they make."""
    twin = TensorTrainEmbeddingBag(NUM_ROWS, DIM, rank=(2, 3), dtype=bag.cores[0].dtype)
    twin.load_state_dict(bag.state_dict())
    return list(twin.cores), twin.dense()


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_equals_the_dense_reconstruction(device, data):
    mode, padding = data.draw(st.sampled_from(["sum", "mean"])), data.draw(st.sampled_from([None, 3, -1]))
    ids, offsets = data.draw(jagged(NUM_ROWS))
    weights = data.draw(st.booleans()) if mode == "sum" else False
    trains_weights, includes_last = data.draw(st.booleans()), data.draw(st.booleans())
    check(device, ids, offsets, mode, padding, weights, trains_weights, includes_last)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("trains_weights", [False, True])
def test_ids_of_no_bag(where, mode, trains_weights):
    """Padding in bags, ids past the last one, an empty bag, equal ids."""
    ids, offsets = torch.tensor([3, 7, 3, 7, 29, 0, 7, 3, 12]), torch.tensor([0, 2, 2, 6])
    check(where, ids, offsets, mode, 3, mode == "sum", trains_weights and mode == "sum", True)


def check(where, ids, offsets, mode, padding, is_weighted, trains_weights, includes_last):
    if includes_last and not offsets.numel():
        return
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ids.numel(), generator=generator, dtype=torch.float64) if is_weighted else None
    bag = make(where, mode, padding_idx=padding, include_last_offset=includes_last)
    used = int(offsets[-1]) if includes_last else ids.numel()
    mine = theirs = weights
    if weights is not None and trains_weights:
        mine, theirs = (weights.clone().to(place).requires_grad_() for place in (where, "cpu"))
    elif weights is not None:
        mine = weights.to(where)
    out = bag(ids.to(where), offsets.to(where), mine)
    cores, dense = on_cpu(bag)
    bounds = offsets[:-1] if includes_last else offsets
    expected = (
        nn.functional.embedding_bag(
            ids[:used],
            dense,
            bounds,
            mode=mode,
            padding_idx=padding,
            per_sample_weights=None if theirs is None else theirs[:used],
        )
        if bounds.numel()
        else dense.new_zeros(0, DIM)
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-12)
    if not (bounds.numel() and used):
        return
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(grad.to(where))
    wanted = [*cores, *([theirs] if theirs is not None and theirs.requires_grad else [])]
    found = [core.grad for core in bag.cores] + ([mine.grad] if len(wanted) > 3 else [])
    for own, other in zip(found, torch.autograd.grad(expected, wanted, grad), strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=0, atol=1e-10)


def test_float32_bags_of_one_size_and_rows(where):
    bag = make(where, "mean", torch.float32)
    ids = torch.randint(NUM_ROWS, (5, 2), generator=torch.Generator().manual_seed(0))
    _, dense = on_cpu(bag)
    torch.testing.assert_close(bag(ids.to(where)).cpu(), nn.functional.embedding_bag(ids, dense, mode="mean"))
    torch.testing.assert_close(bag.rows(ids.to(where)).cpu(), dense[ids])
    assert bag(torch.zeros(0, 3, dtype=torch.int64, device=where)).shape == (0, DIM)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_scales_gradients_by_frequency(where, mode):
    """By the formula: torch 2.13 on a CPU divides by the frequency of another id where some occur more than once."""
    bag = make(where, mode, scale_grad_by_freq=True)
    ids = torch.tensor([[4, 4], [1, 4], [22, 0]])
    bag(ids.to(where)).square().sum().backward()
    _, dense = on_cpu(bag)
    (gradient,) = torch.autograd.grad(nn.functional.embedding_bag(ids, dense, mode=mode).square().sum(), dense)
    gradient[4] /= 3
    cores, dense = on_cpu(bag)
    for core, expected in zip(bag.cores, torch.autograd.grad(dense, cores, gradient), strict=True):
        torch.testing.assert_close(core.grad.cpu(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", [SGD(lr=0.1), AdaGrad(lr=0.1, eps=1e-6), Adam(lr=0.1, beta1=0.8, eps=1e-6)])
def test_the_optimizer_is_that_of_the_cpu(device, rule, monkeypatch):
    """Two backward passes a step, of which the second has equal ids; after that one."""
    bags = make(device), make("cpu")
    batches = [[torch.tensor([[3, 3], [29, 0]]), torch.tensor([[3, 1]])], [torch.tensor([[7, 29]])]]
    for bag, is_device in zip(bags, (True, False), strict=True):
        monkeypatch.setattr("rowmesh.tensor_train.module.is_on_device", lambda core, answer=is_device: answer)
        optimizer = TensorTrainOptimizer(bag, rule)
        for batch in batches:
            for ids in batch:
                bag(ids.to(bag.cores[0].device)).square().sum().mul(0.1).backward()
            assert all(core.grad is None for core in bag.cores)
            optimizer.step()
    for mine, theirs in zip(bags[0].cores, bags[1].cores, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_arguments_may_change_before_backward(where, mode):
    """A reader that reuses its memory has the next batch there by then."""
    if mode == "max" and module.is_on_device(torch.empty(0)):
        pytest.skip("is refused on a device")
    bag = make(where, mode, include_last_offset=True)
    arguments = [torch.tensor([5, 6, 6], device=where), torch.tensor([0, 1, 3], device=where)]
    if mode == "sum":
        arguments.append(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=where))
    expected = torch.autograd.grad(bag(*arguments).square().sum(), list(bag.cores))
    out = bag(*arguments)
    for argument in arguments:
        argument.fill_(3)
    found = torch.autograd.grad(out.square().sum(), list(bag.cores))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_replays_are_equal_to_the_bit(where):
    found = []
    for _ in range(2):
        bag = make(where, dtype=torch.float32)
        bag(torch.tensor([[3, 3, 28], [29, 0, 3]], device=where)).square().sum().backward()
        found.append([core.grad.clone() for core in bag.cores])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


MESSAGE = r"2 distinct ids are outside the table, whose ids are 0 to 29: \[-3, 30\]"


def test_wrong_ids_are_named_late_but_before_there_are_gradients(device):
    bag = make(device)
    wrong, right = torch.tensor([[5, 30, -3, 30]], device=device), torch.tensor([[5]], device=device)
    out = bag(wrong)
    with pytest.raises(IdRangeError, match=MESSAGE):
        out.sum().backward()
    with pytest.raises(IdRangeError, match=MESSAGE):
        out.sum().backward()
    assert all(core.grad is None for core in bag.cores)
    bag(right)  # and does not warn again
    bag(wrong)
    with pytest.raises(IdRangeError, match=MESSAGE):
        bag(right)
    with torch.no_grad(), pytest.raises(IdRangeError, match=MESSAGE):
        bag(wrong)
    with pytest.raises(IdRangeError, match=MESSAGE):
        bag.requires_grad_(False).rows(wrong)


def test_wrong_ids_are_named_before_their_weights_have_gradients(device):
    bag, weights = make(device), torch.ones(4, dtype=torch.float64, device=device, requires_grad=True)
    out = bag(torch.tensor([5, 30, -3, 30], device=device), torch.tensor([0, 3], device=device), weights)
    with pytest.raises(IdRangeError, match=MESSAGE):
        out.sum().backward()
    assert weights.grad is None
    assert all(core.grad is None for core in bag.cores)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 9], [0, 2, 1]])
def test_offsets_in_disorder_are_refused_late(device, offsets):
    out = make(device)(torch.tensor([1, 2, 3], device=device), torch.tensor(offsets, device=device))
    assert bool(out.isfinite().all())
    with pytest.raises(ValueError, match="offsets must begin with 0, and must not decrease nor pass the number of ids"):
        out.sum().backward()


def test_what_a_device_cannot_do_is_refused(device):
    ids = torch.tensor([[1]], device=device)
    with pytest.raises(ConfigurationError, match="mode = 'max' is for tables on the CPU"):
        make(device, "max")(ids)
    with pytest.raises(ConfigurationError, match=r"sparse gradients .*sparse=False.* TensorTrainOptimizer"):
        make(device, sparse=True)(ids)
    with pytest.raises(ValueError, match="1-D input needs 1-D offsets"):
        make(device)(ids[0])


def test_copies_and_moves(device):
    bag = make(device)
    bag(torch.tensor([[1]], device=device))
    twin = copy.deepcopy(bag)
    assert torch.equal(twin.dense(), bag.dense())
    bag = TensorTrainEmbeddingBag.from_pretrained(bag.dense().detach(), rank=(2, 3), freeze=False)
    assert bag.cores[0].device.type == device.type
    optimizer = TensorTrainOptimizer(bag)
    for kept in optimizer.state.values():
        kept["sum"] = kept["sum"].to("meta")
    bag(torch.tensor([[1]], device=device)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"optimizer's state is .* on meta'}; move or convert a module before"):
        optimizer.step()


def test_a_step_does_not_wait_for_the_gpu(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: only torch's sync debug mode sees waits")
    bag = make(device, dtype=torch.float32, padding_idx=3, include_last_offset=True)
    optimizer = TensorTrainOptimizer(bag)
    ids, offsets = torch.tensor([1, 3, 7, 7, 2], device=device), torch.tensor([0, 2, 4], device=device)
    for watch in (nullcontext, refusing_waits, refusing_waits):  # kernels are compiled in the first step
        with watch():
            bag(ids, offsets).sum().backward()
            optimizer.step()
