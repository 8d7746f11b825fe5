"""Packed attention against its reference, and its reference's parts against their formulas."""

import math
from dataclasses import replace

import pytest
import torch

from rowmesh.ops.sequence_attention import Bias, Layout, attend, bucket_starts, buckets, cpu, reference

LENGTHS = [5, 0, 1, 9, 9, 8, 33, 2]
LONGEST = 40


def draw(lengths=LENGTHS, heads=2, dtype=torch.float64, products=True, sorted_times=True, **bias):
    """Arguments of `attend` and the tensors that have gradients."""
    generator = torch.Generator().manual_seed(len(lengths))

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    total = sum(lengths)
    times = torch.randint(0, 10**7, (total,), generator=generator)
    if sorted_times:
        times = times.sort().values
    asked = times + torch.randint(0, 1000, (total,), generator=generator)
    form = bias.pop("form", "buckets")
    time = randn(128) if form == "buckets" else torch.tensor([0.8, 0.3], dtype=dtype, requires_grad=True)
    full = {
        "positions": randn(2 * LONGEST - 1),
        "time": time,
        "form": form,
        "unit": 86400.0 if form == "exponential" else 1.0,
        "times": times,
        "query_times": asked,
    }
    bias = Bias(**(full | bias))
    values = randn(total, heads, 3)
    queries, keys = (randn(total, heads, 4), randn(total, heads, 4)) if products else (None, None)
    leaves = [each for each in (values, queries, keys, bias.positions, bias.time) if each is not None]
    return {
        "values": values,
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "queries": queries,
        "keys": keys,
        "bias": bias,
    }, leaves


def by_reference(values, offsets, queries, keys, bias, activation="silu", divisor=None):
    return reference.attend(values, offsets, queries, keys, activation, divisor, bias)


CASES = {
    "hstu": {},
    "hstu of unsorted times": {"sorted_times": False},
    "softmax with biases": {"activation": "softmax"},
    "sasrec": {"activation": "softmax", "positions": None, "time": None},
    "silu alone": {"positions": None, "time": None, "divisor": 7.0},
    "positions": {"time": None},
    "time at the event": {"positions": None, "query_times": None},
    "power": {"form": "power"},
    "fuxi alpha": {"separate": True, "divisor": 50.0},
    "separate power": {"separate": True, "form": "power"},
    "fuxi beta": {"separate": True, "products": False, "form": "power"},
    "fuxi beta, exponential": {"separate": True, "products": False, "form": "exponential"},
    "time alone": {"separate": True, "products": False, "positions": None},
    "positions alone": {"separate": True, "products": False, "time": None},
    "one head": {"heads": 1},
    "one head of softmax": {"heads": 1, "activation": "softmax", "positions": None, "time": None},
    "a sequence": {"lengths": [33]},
    "an event": {"lengths": [1]},
}


@pytest.mark.parametrize("most_elements", [1 << 16, 100])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, most_elements, monkeypatch):
    monkeypatch.setattr(cpu, "MOST_ELEMENTS", most_elements)  # of which 100 is less than a sequence has
    monkeypatch.setattr(cpu, "_LEAST_ROWS", 4)
    options = dict(CASES[case])
    how = {name: options.pop(name) for name in ("activation", "divisor") if name in options}
    arguments, leaves = draw(**options)
    ours, theirs = attend(**arguments, **how), by_reference(**arguments, **how)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["hstu", "sasrec", "fuxi alpha", "fuxi beta"])
def test_float32_is_as_near_as_rounding_lets_it(case):
    options = dict(CASES[case])
    how = {name: options.pop(name) for name in ("activation", "divisor") if name in options}
    arguments, leaves = draw(lengths=[40, 3, 17, 17], dtype=torch.float32, **options)
    exact, exact_leaves = draw(lengths=[40, 3, 17, 17], **options)
    ours, theirs = attend(**arguments, **how), by_reference(**exact, **how)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    found = [ours, *torch.autograd.grad(ours, leaves, grad)]
    expected = [theirs, *torch.autograd.grad(theirs, exact_leaves, grad.double())]
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - other).abs().max() <= 5e-6 * other.abs().max()


def test_the_reference_is_the_formula():
    arguments, _ = draw(lengths=[4], heads=1)
    bias, out = arguments["bias"], by_reference(**arguments, divisor=6.0)
    for i in range(4):
        total = torch.zeros(3, dtype=torch.float64)
        for j in range(i + 1):
            duration = abs(int(bias.query_times[i] - bias.times[j]))
            bucket = math.floor(math.log(max(duration, 1)) / 0.301)
            score = torch.dot(arguments["queries"][i, 0], arguments["keys"][j, 0])
            score = score + bias.positions[j - i + LONGEST - 1] + bias.time[bucket]
            total = total + score / (1 + torch.exp(-score)) / 6 * arguments["values"][j, 0]
        torch.testing.assert_close(out[i, 0, 0], total)


def test_buckets_are_the_formula():
    durations = [*range(3000), *(int(s) + d for s in bucket_starts()[20:100:7] for d in (-1, 0, 1)), 10**12]
    expected = [math.floor(math.log(max(each, 1)) / 0.301) for each in durations]
    assert buckets(torch.tensor(durations)).tolist() == expected
    assert buckets(-torch.tensor(durations)).tolist() == expected
    assert buckets(torch.tensor([2**63 - 1])).item() == 127


@pytest.mark.parametrize("form", ["buckets", "power"])
def test_the_longest_differences_that_times_can_have(form):
    """From −2⁶² + 1 to 2⁶² − 1; what is longer is refused, since a difference could overflow."""
    arguments, leaves = draw(lengths=[3], form=form)
    ends = torch.tensor([1 - (1 << 62), 0, (1 << 62) - 1])
    arguments["bias"] = replace(arguments["bias"], times=ends, query_times=ends.flip(0))
    ours, theirs = attend(**arguments), by_reference(**arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), leaves) for each in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    for name in ("times", "query_times"):
        for wrong in (-(1 << 63), 1 << 62):
            broken = replace(arguments["bias"], **{name: torch.tensor([0, wrong, 0])})
            with pytest.raises(ValueError, match=rf"^{name} must be between"):
                attend(**(arguments | {"bias": broken}))


def test_gradients_have_gradients():
    arguments, leaves = draw(lengths=[3, 2], heads=1)

    def function(values, queries, keys, positions, time):
        bias = replace(arguments["bias"], positions=positions, time=time)
        return attend(values, arguments["offsets"], queries=queries, keys=keys, bias=bias)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_a_layout_is_every_event_once():
    lengths = torch.randint(0, 60, (200,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    layout = Layout.of(offsets)
    total = int(lengths.sum())
    assert layout.index[layout.places].equal(torch.arange(total))
    assert layout.index.shape[0] == total + layout.padding.shape[0] == sum(n * length for n, length in layout.groups)
    assert layout.padding.shape[0] < 0.2 * total
    assert layout.lengths.tolist() == sorted(lengths[lengths > 0].tolist(), reverse=True)
    chunks = list(layout.chunks(1000))
    assert sum(chunk.num for chunk in chunks) == int((lengths > 0).sum())
    assert all(chunk.num == 1 or chunk.num * chunk.length**2 <= 1000 for chunk in chunks)


def test_memory_does_not_grow_with_the_square(monkeypatch):
    largest = []
    fill = cpu.fill
    monkeypatch.setattr(cpu, "fill", lambda out, *rest: (largest.append(out.size), fill(out, *rest)))
    arguments, leaves = draw(lengths=[3000], heads=1, dtype=torch.float32, positions=None)
    attend(**arguments).sum().backward()
    assert max(largest) <= cpu.MOST_ELEMENTS
    assert len(largest) > 200
    assert all(each.grad is not None for each in leaves)


def test_bfloat16_is_computed_in_float32():
    arguments, _ = draw(dtype=torch.float32)
    narrow = {name: arguments[name].detach().bfloat16() for name in ("values", "queries", "keys")}
    wide = {name: each.float() for name, each in narrow.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(**(arguments | narrow))
    assert found.dtype == torch.float32
    assert found.equal(attend(**(arguments | wide)))


@pytest.mark.parametrize("products", [True, False])
def test_no_events(products):
    arguments, leaves = draw(lengths=[0, 0], products=products, separate=True)
    out = attend(**arguments)
    assert out.shape == (0, 2 + products, 2, 3)
    out.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in leaves)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"queries": None}, "give both or neither"),
        ({"queries": None, "keys": None}, "need a bias with separate=True"),
        ({"activation": "relu"}, "activation must be 'silu' or 'softmax', got 'relu'"),
        ({"offsets": torch.tensor([0, 5])}, "offsets must ascend from 0 to the 67 events"),
        ({"offsets": torch.tensor([0.0, 67.0])}, "offsets must be int64"),
        ({"offsets": torch.tensor([0, 67])}, "a sequence has 67 events, more than the 40"),
        ({"values": torch.zeros(67, 3)}, r"values must be \[N, H, D\]"),
        ({"keys": torch.zeros(67, 1, 4)}, r"keys must be \[N, H, K\]"),
        ({"bias": Bias(positions=torch.zeros(4))}, r"positions must be \[2N − 1\], got \[4\]"),
        ({"bias": Bias(time=torch.zeros(128))}, "give times"),
        ({"bias": Bias(time=torch.zeros(3), form="power")}, r"weights of time, as power, must be \[2\], got \[3\]"),
        ({"bias": Bias(time=torch.zeros(128), times=torch.zeros(67))}, r"times must be int64 \[67\]"),
    ],
)
def test_refuses_what_does_not_fit(change, says):
    arguments, _ = draw()
    with pytest.raises(ValueError, match=says):
        attend(**(arguments | change))
