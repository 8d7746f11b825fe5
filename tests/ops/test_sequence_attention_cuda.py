"""Packed attention on a GPU, or as Triton interprets it, against its reference."""

from dataclasses import replace

import pytest
import torch

from rowmesh.ops import sequence_attention
from rowmesh.ops.sequence_attention import Bias, bucket_starts, reference
from tests.ops.test_sequence_attention import CASES, draw
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("sequence_attention")
LENGTHS = [1, 0, 18, 3]  # two tiles, and part of one
QUICK = ("hstu", "softmax with biases", "fuxi alpha", "fuxi beta, exponential")


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_equals_the_reference(device, case, dtype):
    options = {"lengths": LENGTHS, **CASES[case]}
    activation, divisor = options.pop("activation", "silu"), options.pop("divisor", None)
    call, leaves = draw(dtype=dtype, **options)
    inputs = (call["offsets"], call["queries"], call["keys"], activation, divisor, call["bias"])
    expected = reference.attend(call["values"], *inputs)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(expected, leaves, grad)

    def there(tensor):
        return None if tensor is None else tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    names = ("positions", "time", "times", "query_times")
    bias = replace(call["bias"], **{name: there(getattr(call["bias"], name)) for name in names})
    tensors = [*(there(call[name]) for name in ("values", "queries", "keys")), bias.positions, bias.time]
    found = sequence_attention._Packed.apply(*tensors, call["offsets"].to(device), activation, divisor, bias)
    moved = [each for each in tensors if each is not None]
    close(found, expected, dtype)
    for ours, theirs in zip(torch.autograd.grad(found, moved, grad.to(device)), gradients, strict=True):
        assert ours.dtype == dtype
        close(ours, theirs, dtype)


def close(ours, theirs, dtype):
    assert ours.shape == theirs.shape
    assert (ours.cpu() - theirs).abs().max() <= (1e-12 if dtype == torch.float64 else 2e-5) * theirs.abs().max()


def test_buckets_are_those_of_the_cpu(device):
    """Around the start of every seventh bucket, where a logarithm may round to either side."""
    starts = bucket_starts()[::7]
    durations = torch.cat([starts, starts - 1, starts + 1]).clamp(0, 2**61)
    offsets, weights = torch.arange(durations.numel() + 1), torch.arange(128.0, dtype=torch.float64)
    values = torch.ones(durations.numel(), 1, 1, dtype=torch.float64)
    times = torch.zeros_like(durations)
    bias = Bias(time=weights, times=times, query_times=durations, separate=True)
    expected = reference.attend(values, offsets, None, None, "silu", None, bias)
    moved = replace(bias, time=weights.to(device), times=times.to(device), query_times=durations.to(device))
    out, _ = cuda.forward(values.to(device), offsets.to(device), None, None, "silu", None, moved)
    assert torch.equal(out.cpu(), expected)


def test_few_programs_add_up_what_many_would(device, monkeypatch):
    """Each then has several tiles, and adds to its own sums."""
    monkeypatch.setattr(cuda, "_MOST_LINES", 2)
    test_equals_the_reference(device, "hstu", torch.float64)


def test_refuses_what_does_not_fit(device):
    values, offsets = torch.zeros(3, 1, 300, device=device), torch.tensor([0, 3], device=device)
    with pytest.raises(ValueError, match="a head has 300 columns, more than the 256"):
        cuda.forward(values, offsets, values, values, "silu", None, Bias())
    with pytest.raises(TypeError, match="values must be float32 or float64, got bfloat16"):
        cuda.forward(values.bfloat16(), offsets, None, None, "silu", None, Bias())
