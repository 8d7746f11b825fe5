"""The sanitizer of interpreted kernels finds what it is there for, and nothing where there is nothing."""

import pytest
import torch

from tests.support.triton import find_device, kernels_of

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(find_device().type == "cuda", reason="the sanitizer watches the interpreter"),
]
kernels_of("gather")  # or all are skipped

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + position, tl.load(source + position, mask=position < size), mask=position < size)


@triton.jit
def _shift(values, BLOCK: tl.constexpr):
    """Reads what its neighbour writes."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + position, tl.load(values + position + 1))


@triton.jit
def _last(values, BLOCK: tl.constexpr):
    """All programs write one element."""
    tl.store(values, tl.program_id(0))


@triton.jit
def _count(counts, seen, BLOCK: tl.constexpr):
    """Counts by atomics, and looks at what others may have counted."""
    tl.atomic_add(counts, 1)
    tl.store(seen + tl.program_id(0), tl.load(counts))


@triton.jit
def _pile(values, BLOCK: tl.constexpr):
    """One store, one element, as many values as lanes."""
    lane = tl.arange(0, BLOCK)
    tl.store(values + lane * 0, lane)


@triton.jit
def _claim(values, BLOCK: tl.constexpr):
    """Says that addresses are multiples of more than they are."""
    position = tl.multiple_of(tl.arange(0, BLOCK), 4)
    tl.store(values + position, position)


def numbers(size):
    return torch.zeros(size, dtype=torch.int32)


def test_what_is_right_passes():
    target = numbers(7)
    _copy[(2,)](numbers(7) + 3, target, 7, BLOCK=4)
    assert target.tolist() == [3] * 7


def test_reads_past_the_end():
    memory = numbers(8)
    with pytest.raises(Exception, match="_copy: program 1 is outside of its tensors"):
        _copy[(2,)](memory[:7], numbers(8), 8, BLOCK=4)
    with pytest.raises(Exception, match="_copy: program 0 is outside of its tensors"):
        _copy[(1,)](memory, numbers(9)[:7], 8, BLOCK=8)


@pytest.mark.parametrize(("kernel", "arguments"), [(_shift, [9]), (_last, [1]), (_count, [1, 2])])
def test_races(kernel, arguments):
    with pytest.raises(AssertionError, match=f"{kernel.__name__}: .* written by a program and used by another"):
        kernel[(2,)](*map(numbers, arguments), BLOCK=4)
    kernel[(1,)](*map(numbers, arguments), BLOCK=4)  # alone, without a race


def test_values_that_one_store_writes_over_each_other():
    with pytest.raises(Exception, match="_pile: a store writes different values into one element"):
        _pile[(1,)](numbers(4), BLOCK=4)


def test_claims_that_are_wrong():
    with pytest.raises(Exception, match="_claim: not all are multiples of 4"):
        _claim[(1,)](numbers(4), BLOCK=4)


def fresh_memory(mesh):
    return torch.empty(3), torch.empty(3, dtype=torch.int32)


def test_fresh_memory_is_filled_on_all_ranks(ranks):
    for floats, integers in [fresh_memory(None), *ranks.run(fresh_memory)]:
        assert floats.isnan().all()
        assert (integers == torch.iinfo(torch.int32).max).all()
