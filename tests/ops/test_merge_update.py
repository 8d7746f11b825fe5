"""Merge and update against their references: every rule, every dim, every storage, and the order of sums."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.merge_update import Merger, Singles, reference, sum_kernels, sum_merged, update
from rowmesh.ops.merge_update.cpu import update_kernels
from rowmesh.ops.simd import BFLOAT16, COMPUTE_DTYPE, FLOAT32, STORAGE
from rowmesh.tables.update_rules import RULES, Adam
from tests.support.memory import Vast

DIMS = [1, 3, 10, 16, 17, 64, 100, 130, 300]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# Each is a kernel to compile: every dim under a rule that works element by element, or under one that sums a row.
CASES = {
    *((dim, torch.float32, "sgd") for dim in (1, 3, 16, 100, 130)),
    *((dim, torch.float32, "row_wise_adagrad") for dim in (3, 10, 16, 64, 300)),
    *((17, dtype, rule) for dtype in DTYPES for rule in RULES),
}
MORE_CASES = {
    *((dim, torch.float32, rule) for dim in DIMS for rule in ("sgd", "row_wise_adagrad")),
    *((dim, dtype, rule) for dim in (1, 130) for dtype in DTYPES for rule in RULES),
} - CASES


class Requests:
    """What an owner received: from each rank a list of slots by segment, and a gradient for each."""

    def __init__(self, lists, dim, dtype, seed=0):
        """`lists[rank][segment]` are distinct slots; slots of different segments differ."""
        generator = torch.Generator().manual_seed(seed)
        # Each list begins in the middle of a larger one, as the part for one owner does.
        self.ahead = 3
        flat = [[slot for segment in segments for slot in segment] for segments in lists]
        self.slots = [torch.tensor([9] * self.ahead + slots).to(torch.int64) for slots in flat]
        self.grads = [torch.randn(len(slots), dim, generator=generator, dtype=dtype) for slots in self.slots]
        self.small = [slots.to(torch.int32) for slots in self.slots]  # wraps: the bits of uint32
        self.offsets = [self.ahead + torch.tensor([0, *map(len, segments)]).cumsum(0) for segments in lists]
        self.num_entries = sum(len(slots) - self.ahead for slots in self.slots)

    def merge(self, merger, node_sizes=()):
        """`node_sizes` are the numbers of ranks of each node."""
        parts = zip(self.small, self.offsets, self.grads, strict=True)
        sources = [(slots.data_ptr(), offsets.data_ptr(), grads.data_ptr()) for slots, offsets, grads in parts]
        merger(sources, self.grads[0].shape[1] * self.grads[0].itemsize, self.num_entries, self.ends(node_sizes))

    def ends(self, node_sizes):
        sizes = [len(slots) - self.ahead for slots in self.slots]
        return [sum(sizes[:rank]) for rank in torch.tensor(node_sizes).cumsum(0).tolist()]

    def reference(self):
        return reference.merge([s[self.ahead :] for s in self.slots], [g[self.ahead :] for g in self.grads])


def apply(requests, merger, weights, state, rule, lr, scaling, step):
    eps, beta1, beta2 = rule.hyperparameters
    correction = rule.root_factor
    if isinstance(rule, Adam):
        lr, correction = lr / (1 - beta1**step), correction * (1 - beta2**step) ** -0.5
    numbers = (lr, scaling, eps, beta1, beta2, correction)
    update(weights, tuple(state.values()), merger, rule.name, numbers)


LISTS = [[[4, 0, 7], [], [12, 15]], [[], [8], []], [[7, 4], [9, 8], [12]], [[], [], []]]


@pytest.mark.compiles
@pytest.mark.parametrize(
    "dim, dtype, rule_name",
    [*sorted(CASES, key=str), *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(MORE_CASES, key=str))],
)
def test_every_rule_dim_and_storage(dim, dtype, rule_name):
    rule = RULES[rule_name](lr=0.1)
    compute = COMPUTE_DTYPE[STORAGE[dtype]]
    mine = torch.randn(20, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    merger = Merger(3, mine.data_ptr(), dim * dtype.itemsize)
    theirs = mine.clone()
    shapes = {"row": (20,), "element": (20, dim)}
    my_state = {name: torch.full(shapes[kind], 0.1, dtype=compute) for name, kind in rule.state.items()}
    their_state = {name: tensor.clone() for name, tensor in my_state.items()}
    for step in (1, 2, 3):
        requests = Requests(LISTS, dim, compute, seed=step)
        requests.merge(merger)
        apply(requests, merger, mine, my_state, rule, 0.1, 0.5, step)
        slots, grads = requests.reference()
        eps, beta1, beta2 = rule.hyperparameters
        reference.update(rule_name, theirs, their_state, slots, grads * 0.5, 0.1, eps, beta1, beta2, step)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    state_tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for name in my_state:
        torch.testing.assert_close(
            my_state[name], their_state[name], rtol=state_tolerance, atol=1e-7 * state_tolerance / 2e-6
        )
    untouched = [i for i in range(20) if i not in slots.tolist()]
    assert torch.equal(
        mine[untouched], torch.randn(20, dim, generator=torch.Generator().manual_seed(1)).to(dtype)[untouched]
    )


@st.composite
def lists(draw):
    """Slots of a segment are 100·segment … + 99, so that segments do not share any."""
    num_ranks, num_segments = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    slot = st.integers(0, 99)
    return [
        [[100 * s + slot for slot in draw(st.lists(slot, unique=True, max_size=25))] for s in range(num_segments)]
        for _ in range(num_ranks)
    ]


@settings(max_examples=80)
@given(batches=st.lists(lists(), min_size=1, max_size=3))
def test_sums_are_in_the_order_of_the_ranks(batches):
    """To the bit: w − 1 · Σ g from w = 0 is the sum itself."""
    for requests_of_ranks in batches:
        merger = Merger(len(requests_of_ranks[0]), 0, 12)
        requests = Requests(requests_of_ranks, 3, torch.float32)
        for _ in range(2):
            requests.merge(merger)
        slots, total = requests.reference()
        assert merger.num_merged == len(slots)
        weights = torch.zeros(500, 3)
        apply(requests, merger, weights, {}, RULES["sgd"](), 1.0, 1.0, 1)
        assert torch.equal(-weights[slots], total)
        distinct = [len({i for rank in requests_of_ranks for i in rank[s]}) for s in range(len(requests_of_ranks[0]))]
        assert np.diff(merger.merged_offsets).tolist() == distinct


@settings(max_examples=30)
@given(requests_of_ranks=lists())
def test_one_source_gives_what_it_gives_beside_an_empty_one(requests_of_ranks):
    """One source alone is not searched for equal slots; row bytes on both sides of what is prefetched."""
    first, num_segments = requests_of_ranks[0], len(requests_of_ranks[0])
    rows = torch.zeros(500, 3)
    for row_bytes in (12, 1 << 20):
        found = []
        for ranks in ([first], [first, [[]] * num_segments]):
            requests, merger = Requests(ranks, 3, torch.float32), Merger(num_segments, rows.data_ptr(), row_bytes)
            requests.merge(merger)
            sums = torch.zeros(merger.num_merged, 3)
            sum_merged(merger, sums)
            found.append((merger.slots.tolist(), merger.merged_offsets.tolist(), sums.tolist()))
        assert found[0] == found[1]
        assert found[0][0] == [slot for segment in first for slot in segment]


def test_one_merger_serves_batches_of_all_sizes():
    merger = Merger(1, 0, 4)
    for size in (0, 5, 3000, 1, 0, 40_000, 7):
        requests = Requests([[list(range(size))], [list(range(size // 2, size))]], 1, torch.float32, seed=size)
        requests.merge(merger)
        weights = torch.zeros(40_000, 1)
        apply(requests, merger, weights, {}, RULES["sgd"](), 1.0, 1.0, 1)
        slots, total = requests.reference()
        assert torch.equal(-weights[slots], total)


@pytest.mark.parametrize("rule_name", ["sgd", "row_wise_adagrad"])
def test_far_rows(rule_name):
    """Slots past 2³¹, rows past byte 2³⁴, of an arena that is not there but for the pages touched."""
    num_rows, dim = 3 * 2**30, 3
    arena = Vast(num_rows * 2 * dim).tensor(torch.bfloat16, num_rows, dim)
    state = {"sum": Vast(num_rows * 4).tensor(torch.float32, num_rows)} if rule_name != "sgd" else {}
    far = [5, 2**31 - 1, 2**31 + 1, num_rows - 1]
    requests = Requests([[far], [far[1:]]], dim, torch.float32)
    merger = Merger(1, arena.data_ptr(), 2 * dim)
    requests.merge(merger)
    rule = RULES[rule_name](lr=1.0)
    apply(requests, merger, arena, state, rule, 1.0, 1.0, 1)
    slots, grads = requests.reference()
    small = torch.zeros(len(far), dim, dtype=torch.bfloat16)
    small_state = {name: torch.zeros(len(far)) for name in state}
    reference.update(rule_name, small, small_state, torch.arange(len(far)), grads, 1.0, rule.hyperparameters[0])
    torch.testing.assert_close(arena[slots], small, rtol=2.0**-7, atol=0)
    for name in state:
        torch.testing.assert_close(state[name][slots], small_state[name])


def test_adam_weighs_a_first_step_as_torch_does():
    """1 − β₂ must not come from a rounded β₂: at 0.999 it would be off by 1e-5, and with it the first steps."""
    weights, start = torch.zeros(1, 16), torch.zeros(1, 16, requires_grad=True)
    requests = Requests([[[0]]], 16, torch.float32)
    merger, rule = Merger(1, weights.data_ptr(), 64), Adam(lr=0.1)
    requests.merge(merger)
    state = {"m": torch.zeros(1, 16), "v": torch.zeros(1, 16)}
    apply(requests, merger, weights, state, rule, 0.1, 1.0, 1)
    start.grad = requests.grads[0][requests.ahead :]
    optimizer = torch.optim.Adam([start], lr=0.1)
    optimizer.step()
    torch.testing.assert_close(state["v"], optimizer.state[start]["exp_avg_sq"], rtol=3e-7, atol=0)
    torch.testing.assert_close(weights, start.detach(), rtol=1e-6, atol=0)


SCALED = sorted(set(RULES) - {"sgd"})


def scaled_steps(rule, lr, dtype, seed):
    """Rows and states, from zero states, after three steps on the same gradients."""
    compute = COMPUTE_DTYPE[STORAGE[dtype]]
    weights = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    extents = {"row": (20,), "element": (20, 3)}
    state = {name: torch.zeros(extents[kind], dtype=compute) for name, kind in rule.state.items()}
    merger = Merger(3, weights.data_ptr(), 3 * dtype.itemsize)
    for step in (1, 2, 3):
        requests = Requests(LISTS, 3, compute, seed=seed + step)
        requests.merge(merger)
        apply(requests, merger, weights, state, rule, lr, 0.5, step)
    return {"rows": weights, **state}


@settings(max_examples=30)
@given(
    rule_name=st.sampled_from(SCALED),
    dtype=st.sampled_from(DTYPES),
    moment_scale=st.floats(0.01, 100.0),
    eps=st.sampled_from([0.0, 1e-8, 0.1]),
    seed=st.integers(0, 9),
)
def test_moments_are_scaled_in_the_denominator_only(rule_name, dtype, moment_scale, eps, seed):
    rule = RULES[rule_name](eps=eps, moment_scale=moment_scale)
    mine = scaled_steps(rule, 0.1, dtype, seed)
    plain = scaled_steps(RULES[rule_name](eps=eps), 0.1, dtype, seed)
    compute = COMPUTE_DTYPE[STORAGE[dtype]]
    weights = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    state = {name: torch.zeros_like(plain[name]) for name in rule.state}
    for step in (1, 2, 3):
        slots, grads = Requests(LISTS, 3, compute, seed=seed + step).reference()
        _, beta1, beta2 = rule.hyperparameters
        reference.update(rule_name, weights, state, slots, grads * 0.5, 0.1, eps, beta1, beta2, step, moment_scale)
    tolerance = {torch.float32: 4e-6, torch.float64: 1e-13, torch.bfloat16: 2.0**-6}[dtype]
    torch.testing.assert_close(mine["rows"], weights, rtol=tolerance, atol=tolerance)
    for name in rule.state:
        assert torch.equal(mine[name], plain[name])


@settings(max_examples=30)
@given(
    rule_name=st.sampled_from(SCALED),
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-3, 3),
    eps=st.sampled_from([1e-8, 0.1]),
    seed=st.integers(0, 9),
)
def test_scaling_by_a_power_of_four_is_another_rate_and_eps(rule_name, dtype, power, eps, seed):
    """To the bit: lr · g / (2⁻ᵏ · √v + eps) = 2ᵏ · lr · g / (√v + 2ᵏ · eps); at k = 0 the plain optimizer."""
    factor = 2.0**power
    mine = scaled_steps(RULES[rule_name](eps=eps, moment_scale=4.0**power), 0.1, dtype, seed)
    theirs = scaled_steps(RULES[rule_name](eps=eps * factor), 0.1 * factor, dtype, seed)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name])


def test_storages_are_told_apart():
    assert update_kernels(3, FLOAT32, "sgd") is not update_kernels(3, BFLOAT16, "sgd")


@settings(max_examples=80)
@given(requests_of_ranks=lists(), data=st.data())
def test_sums_of_a_node_come_first(requests_of_ranks, data):
    """To the bit: what summing each node's requests and then the nodes' sums gives; sums alone are the same."""
    num_ranks = len(requests_of_ranks)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(num_ranks - 1, 1)), max_size=3)) | {0, num_ranks})
    requests = Requests(requests_of_ranks, 3, torch.float32)
    merger = Merger(len(requests_of_ranks[0]), 0, 12)
    requests.merge(merger, [b - a for a, b in pairwise(cuts)])
    parts = [
        reference.merge([s[3:] for s in requests.slots[a:b]], [g[3:] for g in requests.grads[a:b]])
        for a, b in pairwise(cuts)
    ]
    slots, total = reference.merge([s for s, _ in parts], [g for _, g in parts])
    weights = torch.zeros(500, 3)
    apply(requests, merger, weights, {}, RULES["sgd"](), 1.0, 1.0, 1)
    assert torch.equal(-weights[slots], total)
    sums = torch.full((merger.num_merged, 3), torch.nan)
    sum_kernels(3, FLOAT32).sum_merged(
        merger.heads,
        merger.nexts,
        merger.addresses,
        0,
        merger.num_merged,
        merger.node_ends,
        merger.num_nodes,
        sums.data_ptr(),
    )
    assert torch.equal(sums[np.argsort(merger.slots)], total)
    again = Singles()
    again(merger.merged_slots, sums.data_ptr(), 12, merger.num_merged)
    repeated = torch.zeros(500, 3)
    apply(requests, again, repeated, {}, RULES["sgd"](), 1.0, 1.0, 1)
    assert torch.equal(repeated, weights)


def test_the_same_gradients_at_other_slots_in_parts():
    """What a cache does: rows are where it has them; and a part of the slots is updated alone."""
    requests = Requests(LISTS, 3, torch.float32)
    merger = Merger(3, 0, 12)
    requests.merge(merger)
    slots, total = requests.reference()
    places = np.arange(merger.num_merged, dtype=np.uint32)[::-1].copy()
    weights = torch.zeros(len(places), 3)
    for part in ((0, 2), (2, merger.num_merged)):
        update(weights, (), merger.at(places), "sgd", (1.0, 1.0, 0.0, 0.0, 0.0, 1.0), part)
    order = np.searchsorted(slots.numpy(), merger.slots)
    assert torch.equal(-weights.flip(0), total[order])


def test_refuses_rows_that_kernels_would_not_find():
    for rows in (torch.zeros(4, 6)[:, ::2], torch.zeros(4)):
        with pytest.raises(ValueError, match=r"rows must be contiguous \[R, D\] in the host's memory"):
            update(rows, (), Singles(), "sgd", (1.0, 1.0, 0.0, 0.0, 0.0, 1.0))
