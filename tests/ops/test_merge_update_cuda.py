"""Merge and update in Triton against their reference: order of sums, hot slots, nodes, far rows, every rule."""

from dataclasses import replace
from itertools import accumulate, pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.errors import ConfigurationError
from rowmesh.ops.merge_update import reference
from rowmesh.tables.update_rules import RULES, Adam
from tests.support.memory import Vast
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda, merging = map(kernels_of, ("merge_update", "merge"))

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TOLERANCE = {F32: 2e-6, F64: 1e-13, BF16: 2.0**-6}  # two updates; the interpreter cuts bfloat16 off
CASES = [
    (1, F32, "adam"),
    (12, BF16, "row_wise_adagrad"),
    (17, F64, "row_wise_adagrad"),
    (17, F64, "adam"),
    (64, F32, "sgd"),
    (64, F32, "adagrad"),
    (130, F32, "row_wise_adagrad"),
    (130, BF16, "adagrad"),
]


def sums_in_order(slots, gradients):
    """Of each distinct slot, ascending: its gradients added one by one."""
    distinct = sorted(set(slots))
    total = torch.zeros(len(distinct), gradients.shape[1], dtype=gradients.dtype)
    for slot, gradient in zip(slots, gradients.cpu(), strict=True):
        total[distinct.index(slot)] += gradient
    return total


def sums_by_chunk(slots, gradients, size):
    """The same, chunks of some entries first."""
    distinct = sorted(set(slots))
    total = torch.zeros(len(distinct), gradients.shape[1])
    for m, slot in enumerate(distinct):
        entries = [entry for entry, other in enumerate(slots) if other == slot]
        for begin in range(0, len(entries), size):
            chunk = torch.zeros(gradients.shape[1])
            for entry in entries[begin : begin + size]:
                chunk += gradients[entry].cpu()
            total[m] += chunk
    return total


def summed(merged, gradients):
    out = cuda.sum_merged(merged, gradients, torch.full_like(gradients, torch.nan))
    num = int(merged.num)
    assert out[num:].isnan().all()
    return out[:num].cpu()


@settings(max_examples=20)
@given(slots=st.lists(st.sampled_from([0, 1, 7, 2**31 - 2, 2**31 - 1]), max_size=40))
def test_numbers_are_merged_like_slots(device, slots):
    """But for 2³¹ − 1, which is left out."""
    merged = merging.merge_numbers(torch.tensor(slots, dtype=torch.int32, device=device))
    kept = [entry for entry in sorted(range(len(slots)), key=slots.__getitem__) if slots[entry] < 2**31 - 1]
    distinct = sorted({slots[entry] for entry in kept})
    num = len(distinct)
    assert int(merged.num) == num
    assert merged.order[: len(kept)].tolist() == kept
    assert merged.slots[:num].tolist() == distinct
    starts = merged.starts[: num + 1].tolist()
    assert [slots[kept[first]] for first in starts[:-1]] == distinct
    assert starts[-1] == len(kept)


@settings(max_examples=20)
@given(
    slots=st.lists(st.sampled_from([3, 4, 9]), min_size=1, max_size=30),
    dim=st.sampled_from([3, 8]),
    has_factors=st.booleans(),
    data=st.data(),
)
def test_gradients_may_be_cells_of_a_tensor(device, slots, dim, has_factors, data):
    """Where each begins is said in elements; they are summed as if they stood one after the other."""
    count, generator = len(slots), torch.Generator().manual_seed(dim)
    cells = torch.tensor([data.draw(st.integers(0, 20)) * 8 for _ in slots], device="cpu")
    grad = torch.randn(40, 8, generator=generator, device="cpu")
    factors = torch.rand(count, generator=generator, device="cpu") if has_factors else None
    entries = torch.stack([grad.flatten()[cell : cell + dim] for cell in cells.tolist()])
    weighed = entries if factors is None else entries * factors[:, None]
    merged = merging.merge(torch.tensor(slots, device=device))
    order = merged.order.cpu()
    filed = replace(
        merged,
        order=cells[order].to(device),
        cells_alignment=8,
        factors=None if factors is None else factors[order].to(device),
    )
    out = torch.full((count, dim), torch.nan, device=device)
    sums = cuda.sum_merged(filed, grad.to(device), out)[: int(merged.num)]
    assert torch.equal(sums.cpu(), sums_in_order(slots, weighed))
    rows = [torch.zeros(10, dim, device=device) for _ in range(2)]
    cuda.update(rows[0], (), filed, grad.to(device), "sgd", (0.5, 1.0, 0.0, 0.0, 0.0, 1.0))
    cuda.update(rows[1], (), merged, weighed.to(device), "sgd", (0.5, 1.0, 0.0, 0.0, 0.0, 1.0))
    assert torch.equal(*rows)


@settings(max_examples=20)
@given(
    slots=st.lists(st.sampled_from([0, 1, 2, 5, 2**31 - 1, 2**31, 2**32 - 2]), max_size=40),
    missing=st.integers(0, 3),
    narrow=st.booleans(),
)
def test_merge_is_a_stable_sort(device, slots, missing, narrow):
    given_slots = torch.tensor(slots, dtype=torch.int64)
    if narrow:
        given_slots = given_slots.to(torch.int32)  # wraps: the bits of uint32
    valid = max(len(slots) - missing, 0)
    count = None if missing == 0 else torch.tensor([valid], device=device)
    merged = merging.merge(given_slots.to(device), count)
    distinct = sorted(set(slots[:valid]))
    assert merged.num.tolist() == [len(distinct)]
    assert merged.slots[: len(distinct)].tolist() == distinct
    sizes = [slots[:valid].count(slot) for slot in distinct]
    assert merged.starts[: len(distinct) + 1].tolist() == [0, *accumulate(sizes)]
    assert merged.order[:valid].tolist() == sorted(range(valid), key=lambda entry: slots[entry])


@settings(max_examples=10)
@given(
    slots=st.lists(st.sampled_from([0, 1, 2, 5, 6, 2**31, 2**32 - 3]), max_size=30),
    starts=st.lists(st.sampled_from([0, 1, 2, 4, 6, 2**31, 2**32 - 4]), min_size=1, max_size=6, unique=True),
    missing=st.integers(0, 3),
)
def test_distinct_slots_are_counted_by_range(device, slots, starts, missing):
    valid = max(len(slots) - missing, 0)
    bounds = [*sorted(starts), 2**32 - 2]
    kinds = [number % 3 - 1 for number in range(len(starts))]  # -1: not counted
    merged = merging.merge(torch.tensor(slots, dtype=torch.int64, device=device), torch.tensor([valid], device=device))
    totals = torch.tensor([100, 200], device=device)
    merging.count_by_range(merged, torch.tensor(bounds, device=device), torch.tensor(kinds, device=device), totals)
    expected = [100, 200]
    for kind, (start, end) in zip(kinds, pairwise(bounds), strict=True):
        if kind >= 0:
            expected[kind] += sum(start <= slot < end for slot in set(slots[:valid]))
    assert totals.tolist() == expected


def test_more_ranges_than_a_program_counts(device):
    merged = merging.merge(torch.arange(400, device=device).repeat(2))
    starts, totals = torch.arange(0, 401, 2, device=device), torch.zeros(200, dtype=torch.int64, device=device)
    merging.count_by_range(merged, starts, torch.arange(200, device=device), totals)
    assert totals.tolist() == [2] * 200


@pytest.mark.parametrize("dim, dtype, rule_name", CASES)
def test_every_rule_and_storage(device, dim, dtype, rule_name):
    rule = RULES[rule_name](lr=0.1, **({} if rule_name == "sgd" else {"moment_scale": 1.7}))
    generator = torch.Generator().manual_seed(0)
    compute = F64 if dtype == F64 else F32
    mine = torch.randn(30, dim, generator=generator).to(dtype)
    theirs, first = mine.clone(), mine.clone()
    shapes = {"row": (30,), "element": (30, dim)}
    my_state = [torch.full(shapes[kind], 0.1, dtype=compute) for kind in rule.state.values()]
    their_state = {name: tensor.clone() for name, tensor in zip(rule.state, my_state, strict=True)}
    mine, my_state, touched = mine.to(device), [tensor.to(device) for tensor in my_state], set()
    for step, valid in ((1, 21), (2, 30)):
        slots = torch.randint(0, 25, (30,), generator=generator)
        gradients = torch.randn(30, dim, generator=generator, dtype=compute)
        merged = merging.merge(slots.to(device), torch.tensor([valid], device=device))
        cuda.update(mine, tuple(my_state), merged, gradients.to(device), rule_name, rule.numbers(0.1, 0.5, step))
        distinct, sums = reference.merge([slots[:valid]], [gradients[:valid]])
        reference.update(
            rule_name,
            theirs,
            their_state,
            distinct,
            sums * 0.5,
            0.1,
            *rule.hyperparameters,
            step,
            getattr(rule, "moment_scale", 1.0),
        )
        touched |= set(distinct.tolist())
    torch.testing.assert_close(mine.cpu(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for ours, name in zip(my_state, rule.state, strict=True):
        torch.testing.assert_close(ours.cpu(), their_state[name], rtol=TOLERANCE[compute], atol=TOLERANCE[compute])
    others = [slot for slot in range(30) if slot not in touched]
    assert torch.equal(mine.cpu()[others], first[others])


@settings(max_examples=8)
@given(slots=st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_sums_are_in_the_order_of_entries(device, slots):
    """To the bit, as on a CPU; and the update's are the same."""
    gradients = torch.randn(len(slots), 5, generator=torch.Generator().manual_seed(1)).to(device)
    merged = merging.merge(torch.tensor(slots, device=device))
    expected = sums_in_order(slots, gradients)
    assert torch.equal(summed(merged, gradients), expected)
    rows = torch.zeros(5, 5, device=device)
    cuda.update(rows, (), merged, gradients, "sgd", RULES["sgd"]().numbers(1.0, 1.0, 1))
    assert torch.equal(-rows.cpu()[sorted(set(slots))], expected)


@settings(max_examples=12)
@given(sizes=st.lists(st.integers(0, 13), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_hot_slots_are_summed_chunk_by_chunk(device, sizes, seed):
    """Chunks of 4 here: slots that end and begin anywhere among them, one over all of them."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([slot for slot, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64)
    slots = slots[torch.randperm(len(slots), generator=generator)]
    gradients = torch.randn(len(slots), 3, generator=generator).to(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "CHUNK", 4)
        assert torch.equal(
            summed(merging.merge(slots.to(device)), gradients), sums_by_chunk(slots.tolist(), gradients, 4)
        )


def test_the_sum_of_a_hot_slot_does_not_depend_on_other_slots(device):
    gradients = torch.randn(600, 3, generator=torch.Generator().manual_seed(0)).to(device)
    alone = summed(merging.merge(torch.full((600,), 9, device=device)), gradients)
    assert torch.equal(alone, sums_by_chunk([9] * 600, gradients, cuda.CHUNK))
    beside = torch.cat([torch.arange(7, device=device), torch.full((600,), 9, device=device)])
    padded = torch.cat([torch.zeros(7, 3, device=device), gradients])
    assert torch.equal(summed(merging.merge(beside), padded)[-1:], alone)


@settings(max_examples=10)
@given(nodes=st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=4))
def test_nodes_are_summed_first(device, nodes):
    slots = [slot for node in nodes for slot in node]
    ends = torch.tensor([*accumulate(map(len, nodes))])
    gradients = torch.randn(len(slots), 3, generator=torch.Generator().manual_seed(2)).to(device)
    merged = merging.merge(torch.tensor(slots, dtype=torch.int64, device=device), node_ends=ends.to(device))
    distinct = sorted(set(slots))
    expected = torch.zeros(len(distinct), 3)
    for node, end in zip(nodes, ends.tolist(), strict=True):
        sums = sums_in_order(node, gradients[end - len(node) : end])
        for slot, total in zip(sorted(set(node)), sums, strict=True):
            expected[distinct.index(slot)] += total
    assert torch.equal(summed(merged, gradients), expected)


@pytest.mark.parametrize("valid", [0, 5])
def test_singles(device, valid):
    slots = torch.tensor([3, 2**31 + 1, 0, 7, 5], device=device)
    gradients = torch.randn(5, 4, device=device)
    merged = merging.singles(slots, torch.tensor([valid], dtype=torch.int32, device=device))
    assert torch.equal(summed(merged, gradients), gradients[:valid].cpu())


def test_far_rows(device):
    """Slots past 2³¹, rows past byte 2³⁴, of an arena that is not there but for the pages touched."""
    if device.type != "cpu":
        pytest.skip("an arena on a device is there")
    num_rows, dim = 3 * 2**30, 3
    arena = Vast(num_rows * 2 * dim).tensor(BF16, num_rows, dim)
    state = Vast(num_rows * 4).tensor(F32, num_rows)
    far = [5, 2**31 - 1, 2**31 + 1, num_rows - 1]
    gradients = torch.ones(8, dim)
    merged = merging.merge(torch.tensor(far * 2).to(torch.int32))
    numbers = RULES["row_wise_adagrad"](eps=0.0).numbers(1.0, 1.0, 1)
    cuda.update(arena, (state,), merged, gradients, "row_wise_adagrad", numbers)
    assert arena[far].eq(-1).all()
    assert state[far].eq(4).all()


def test_replays_are_equal_to_the_bit(device):
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(0, 3, (700,), generator=generator).to(device)
    gradients = torch.randn(700, 6, generator=generator).to(device)
    results = []
    for _ in range(2):
        rows, moments = torch.ones(3, 6, device=device), [torch.zeros(3, 6, device=device) for _ in range(2)]
        cuda.update(rows, tuple(moments), merging.merge(slots), gradients, "adam", Adam().numbers(0.1, 1.0, 2))
        results.append(torch.stack([rows, *moments]))
    assert torch.equal(*results)


def test_few_programs_for_many_slots(device, monkeypatch):
    monkeypatch.setattr(cuda, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(cuda, "_TILE", 16)
    slots, gradients = torch.arange(40).repeat(2) // 2, torch.randn(80, 4).to(device)
    merged, rows = merging.merge(slots.to(device)), torch.zeros(20, 4, device=device)
    expected = sums_in_order(slots.tolist(), gradients)
    assert torch.equal(summed(merged, gradients), expected)
    cuda.update(rows, (), merged, gradients, "sgd", RULES["sgd"]().numbers(1.0, 1.0, 1))
    assert torch.equal(-rows.cpu(), expected)


def test_rows_too_long_are_refused(device):
    merged, rows = merging.merge(torch.zeros(1, dtype=torch.int64, device=device)), torch.zeros(1, 5000, device=device)
    with pytest.raises(ConfigurationError, match="5000 values"):
        cuda.sum_merged(merged, rows, rows)
