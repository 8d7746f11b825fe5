"""The kernels of a frozen window against plain Python and NumPy: every mask, every phase, every dim and storage."""

from itertools import accumulate, pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.merge_update.handles import END
from rowmesh.ops.pool import DESCRIPTOR
from rowmesh.ops.simd import COMPUTE_DTYPE, STORAGE
from rowmesh.ops.window import MAX_PARTS, reference
from rowmesh.ops.window import cpu as ops
from tests.support.memory import Poisoned

DIMS = [1, 3, 17, 64, 130]
CASES = [(dim, torch.float32) for dim in DIMS] + [
    (dim, dtype) for dtype in (torch.float64, torch.bfloat16) for dim in (1, 17, 130)
]
FINAL = ops.FINAL
NUM_PHASES = MAX_PARTS + 1


def u32(values):
    return np.array(values, np.uint32)


def read_u32(poisoned):
    return poisoned.result().numpy().view(np.uint32)


def at(array):
    return array.ctypes.data


@st.composite
def masks(draw, num_parts, max_size=40):
    """Uses of rows: of at least one micro-batch each, whose phase is one more than its number."""
    return u32(draw(st.lists(st.integers(1, 2**num_parts - 1).map(lambda uses: 2 * uses), max_size=max_size)))


@st.composite
def cut_masks(draw):
    """Masks of any phases, FINAL included, and the members whose they are; members may have none."""
    values = u32(draw(st.lists(st.integers(0, 2**32 - 1), max_size=40)))
    cuts = sorted(draw(st.lists(st.integers(0, len(values)), min_size=0, max_size=3)))
    bounds = np.array([0, *cuts, len(values)], np.int64)
    return values, bounds, draw(st.integers(0, len(bounds) - 2))


@given(data=st.data(), num_parts=st.integers(1, MAX_PARTS), form=st.sampled_from([*ops.FORMS]))
def test_phases_are_the_reference(data, num_parts, form):
    uses = data.draw(masks(num_parts))
    fetches, pushes = (Poisoned(torch.int32, len(uses)) for _ in range(2))
    ops.choose_phases(at(uses), len(uses), ops.FORMS[form], num_parts, fetches.address, pushes.address)
    expected = reference.choose_phases(uses.tolist(), form, num_parts)
    assert (read_u32(fetches).tolist(), read_u32(pushes).tolist()) == expected


@given(num_parts=st.integers(1, 31), data=st.data())
def test_delta_moves_each_row_once(num_parts, data):
    """Fetched before anybody uses it, pushed after everybody has."""
    uses = data.draw(masks(num_parts))
    fetches, pushes = (Poisoned(torch.int32, len(uses)) for _ in range(2))
    ops.choose_phases(at(uses), len(uses), ops.FORMS["delta"], num_parts, fetches.address, pushes.address)
    for mask, fetch, push in zip(uses.tolist(), read_u32(fetches).tolist(), read_u32(pushes).tolist(), strict=True):
        assert fetch.bit_count() == push.bit_count() == 1
        assert fetch <= push
        assert fetch & mask
        assert push & mask
        assert mask & (fetch - 1) == 0
        assert mask < 2 * push


def sort(values, bounds, own):
    """The entries of all phases, sorted, and their sizes, by phase and member."""
    where = at(values), at(bounds), len(bounds) - 1, own, NUM_PHASES
    sizes, cursors = (np.full((NUM_PHASES, len(bounds) - 1), -7, np.int64) for _ in range(2))
    ops.count_phases(*where, at(sizes))
    order = Poisoned(torch.int32, int(sizes.sum()))
    ops.sort_phases(*where, at(sizes), at(cursors), order.address)
    return read_u32(order), sizes


@given(cut=cut_masks())
def test_entries_by_phase(cut):
    values, bounds, own = cut
    expected = reference.sort_phases(values.tolist(), bounds.tolist(), own, NUM_PHASES)
    order, sizes = sort(*cut)
    assert sizes.tolist() == [[len(entries) for entries in of_members] for of_members in expected]
    assert order.tolist() == [e for of_members in expected for entries in of_members for e in entries]


@st.composite
def merged_slots(draw):
    """Entries at a stop, the distinct slots they name, and the chain of entries of each."""
    slots = draw(st.lists(st.integers(0, 15), max_size=40))
    distinct = draw(st.permutations(sorted(set(slots))))
    heads, nexts = [], [END] * len(slots)
    for slot in distinct:
        chain = [entry for entry, other in enumerate(slots) if other == slot]
        heads.append(chain[0])
        for entry, following in pairwise(chain):
            nexts[entry] = following
    return slots, u32(distinct), u32(heads), u32(nexts)


@given(
    merged=merged_slots(),
    data=st.data(),
    touched=st.lists(st.integers(0, 9), min_size=16, max_size=16),
    number=st.integers(2, 10),
)
def test_final_rows_are_those_that_the_window_before_does_not_touch(merged, data, touched, number):
    slots, distinct, heads, nexts = merged
    fetches = u32([1 << data.draw(st.integers(0, 30)) for _ in slots])
    expected = reference.mark_final(slots, fetches.tolist(), dict(enumerate(touched)), number)
    before, after = Poisoned(torch.int32, len(distinct)), u32(touched)
    ops.note_touched(at(distinct), len(distinct), at(after), number, before.address)
    assert read_u32(before).tolist() == [touched[slot] for slot in distinct]
    assert after.tolist() == [number if slot in distinct else old for slot, old in enumerate(touched)]
    ops.mark_final(before.address, at(heads), at(nexts), len(distinct), number, at(fetches))
    assert fetches.tolist() == expected
    entries = Poisoned(torch.int32, len(slots))
    ops.spread(before.address, at(heads), at(nexts), len(distinct), entries.address)
    assert read_u32(entries).tolist() == [touched[slot] for slot in slots]


@given(values=st.lists(st.integers(0, 2**32 - 1), max_size=50), data=st.data())
def test_final_bits_come_back(values, data):
    """Packed by the stop of some entries, unpacked where they were asked for, at another place."""
    begin = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(begin, len(values)))
    there = u32(values)
    packed = Poisoned(torch.int8, -(-(end - begin) // 8))
    ops.pack_bits(at(there), begin, end, packed.address)
    bits = np.unpackbits(packed.result().numpy().view(np.uint8), bitorder="little")
    is_final = [value >> FINAL & 1 for value in values[begin:end]]
    assert bits[: end - begin].tolist() == is_final
    assert not bits[end - begin :].any()
    ahead = data.draw(st.integers(0, 5))
    here = u32([7] * (ahead + end - begin + 2))
    keep = packed.result().contiguous()
    ops.unpack_bits(keep.data_ptr(), ahead, ahead + end - begin, at(here))
    assert here.tolist() == [7] * ahead + [1 << FINAL if bit else 7 for bit in is_final] + [7] * 2


@given(data=st.data(), num_features=st.integers(0, 4), phase=st.integers(0, MAX_PARTS))
def test_cells_and_uses_are_counted(data, num_features, phase):
    num_unique = data.draw(st.integers(1, 9))
    inverse = u32(data.draw(st.lists(st.integers(0, num_unique - 1), max_size=60)))
    features, counted = np.zeros((num_features, DESCRIPTOR), np.int64), []
    for feature in features:
        feature[0] = data.draw(st.integers(0, len(inverse)))
        feature[1] = data.draw(st.integers(int(feature[0]), len(inverse)))
        counted += inverse[feature[0] : feature[1]].tolist()
    counts, uses = (
        np.zeros(num_unique, np.uint32),
        u32(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_unique, max_size=num_unique))),
    )
    before = uses.tolist()
    ops.count_cells(at(features), num_features, at(inverse), phase, at(counts), at(uses))
    assert counts.tolist() == [counted.count(u) for u in range(num_unique)]
    assert uses.tolist() == [mask | ((u in counted) << phase) for u, mask in enumerate(before)]
    uniques = u32(data.draw(st.permutations(range(num_unique))))
    out = Poisoned(torch.int32, num_unique)
    ops.order_uses(at(uses), at(uniques), num_unique, out.address)
    assert read_u32(out).tolist() == uses[uniques].tolist()


@given(cut=cut_masks(), row_bytes=st.sampled_from([4, 34, 512]), renumbers=st.booleans())
def test_what_travels_is_read_where_it_arrives_first(cut, row_bytes, renumbers):
    order, count = sort(*cut)[0], len(cut[0])
    uniques = u32(np.random.default_rng(count).permutation(count))
    out, base, expected = Poisoned(torch.int64, count), 10**12, [-7] * count
    numbers = uniques if renumbers else np.arange(count)
    ops.place(at(order), len(order), at(uniques) if renumbers else 0, base, row_bytes, out.address)
    for place, e in reversed([*enumerate(order.tolist())]):
        expected[numbers[e]] = base + place * row_bytes
    assert out.result().tolist() == expected


def check_packing(dim, dtype, cut, phase, generator):
    values, bounds, own = cut
    kernels, compute = ops.kernels(dim, STORAGE[dtype]), COMPUTE_DTYPE[STORAGE[dtype]]
    of_phase = reference.sort_phases(values.tolist(), bounds.tolist(), own, NUM_PHASES)[phase]
    picked = [e for entries in of_phase for e in entries]
    arena = torch.randn(11, dim, generator=generator).to(dtype)
    slots, order = torch.randint(11, (len(values),), generator=generator, dtype=torch.int32), u32(picked)
    out = Poisoned(dtype, len(picked), dim)
    kernels.take_rows(arena.data_ptr(), slots.data_ptr(), at(order), len(order), out.address)
    assert torch.equal(out.result(), arena[slots[picked].long()])
    gradients = torch.randn(len(values), dim, generator=generator).to(compute)
    packed = Poisoned(compute, len(picked), dim)
    kernels.take_gradients(gradients.data_ptr(), at(order), len(order), packed.address)
    assert torch.equal(packed.result(), gradients[picked])
    check_adding(kernels, packed.result().contiguous(), gradients, values, picked, phase)


def check_adding(kernels, packed, gradients, values, picked, phase):
    """Entries that came in an earlier phase are added to, the rest left alone."""
    expected, order = gradients.flip(0).contiguous(), u32(picked)
    into = expected.clone()
    addresses = into.data_ptr() + np.arange(len(values)) * into.shape[1] * into.itemsize
    kernels.add_gradients(packed.data_ptr(), at(order), len(order), at(values), phase, at(addresses))
    earlier = [e for e in picked if values[e] & np.uint32((1 << phase) - 1)]
    expected[earlier] += gradients[earlier]
    assert torch.equal(into, expected)


@pytest.mark.compiles
@pytest.mark.parametrize("dim, dtype", CASES)
def test_rows_and_gradients_of_a_phase(dim, dtype):
    generator = torch.Generator().manual_seed(dim)
    random = np.random.default_rng(dim)
    for phase, cuts, own in ((0, [0, 9, 9, 40], 1), (5, [0, 13, 20, 40], 0), (30, [0, 40], 0), (31, [0, 1, 40], 1)):
        values = random.integers(0, 2**32, 40, dtype=np.uint32)
        check_packing(dim, dtype, (values, np.array(cuts, np.int64), own), phase, generator)


@settings(max_examples=60)
@given(cut=cut_masks(), phase=st.integers(0, MAX_PARTS), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_entries_of_a_phase(cut, phase, dtype):
    check_packing(17, dtype, cut, phase, torch.Generator().manual_seed(phase))


class Sums:
    """Micro-batches of random cells over some rows, whose gradients are summed one after the other.

    The rows are two tables of two owners; `uniques` is their order in the outbox.
    """

    def __init__(self, dim, dtype, cells, num_cells, *, is_weighted=False, kept=None):
        self.dim, self.compute, self.cells = dim, COMPUTE_DTYPE[STORAGE[dtype]], cells
        self.num_rows, self.num_cells = len(cells[0]), num_cells
        self.kernels, self.kept = ops.kernels(dim, STORAGE[dtype]), kept or (0, self.num_rows)
        self.generator = torch.Generator().manual_seed(dim)
        self.uniques = torch.randperm(self.num_rows, generator=self.generator).to(torch.int32)
        self.weights = [
            torch.rand(sum(map(len, rows)), generator=self.generator).to(self.compute) if is_weighted else None
            for rows in cells
        ]
        self.grads = [torch.randn(num_cells, dim, generator=self.generator, dtype=self.compute) for _ in cells]

    @property
    def uses(self):
        by_row = [sum(bool(rows[u]) << k for k, rows in enumerate(self.cells)) for u in range(self.num_rows)]
        return u32([by_row[u] for u in self.uniques.tolist()])

    def run(self):
        sink, uses, total = Poisoned(self.compute, self.num_rows, self.dim), self.uses, self.num_rows
        bounds = torch.tensor([[0, total // 4, total // 2], [total // 2, total - total // 8, total]])
        for k, rows in enumerate(self.cells):
            pointers = u32([*accumulate(map(len, rows), initial=0)])
            cells = u32([cell * self.dim for row in rows for cell in row])
            weights = self.weights[k]
            self.kernels.backward(
                self.grads[k].data_ptr(),
                at(pointers),
                at(cells),
                0 if weights is None else weights.data_ptr(),
                self.uniques.data_ptr(),
                bounds.data_ptr(),
                2,
                2,
                at(uses),
                k,
                *self.kept,
                sink.address,
            )
        return sink.result()

    def expected(self):
        sums = torch.full((self.num_rows, self.dim), float("nan"), dtype=self.compute)
        for place, u in enumerate(self.uniques.tolist()):
            total = None
            for k, rows in enumerate(self.cells):
                if rows[u] and not self.kept[0] <= place < self.kept[1]:
                    total = None
                begin = sum(map(len, rows[:u]))
                for j, cell in enumerate(rows[u]):
                    weights = self.weights[k]
                    term = self.grads[k][cell] * (1 if weights is None else weights[begin + j])
                    total = term if total is None else total + term
            if total is not None:
                sums[place] = total
        return sums

    def check(self):
        tolerance = 0.0
        if self.weights[0] is not None:  # products and sums may be fused
            tolerance = 1e-5 if self.compute == torch.float32 else 1e-13
        torch.testing.assert_close(self.run(), self.expected(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.compiles
@pytest.mark.parametrize("dim, dtype", CASES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_over_micro_batches(dim, dtype, is_weighted):
    cells = [
        [[0, 3], [], [1], [5, 5, 5], [], [2, 0]],
        [[], [], [0], [], [], []],
        [[4], [6, 2], [], [0] * 40, [], [1]],
    ]
    Sums(dim, dtype, cells, 7, is_weighted=is_weighted).check()
    Sums(dim, dtype, cells, 7, is_weighted=is_weighted, kept=(2, 4)).check()


@settings(max_examples=60)
@given(data=st.data(), num_parts=st.sampled_from([1, 2, 5, 31]), num_rows=st.integers(1, 9), weighted=st.booleans())
def test_any_sums_over_micro_batches(data, num_parts, num_rows, weighted):
    row = st.lists(st.integers(0, 4), max_size=3)
    cells = [data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)) for _ in range(num_parts)]
    kept = tuple(sorted((data.draw(st.integers(0, num_rows)), data.draw(st.integers(0, num_rows)))))
    Sums(3, torch.float32, cells, 5, is_weighted=weighted, kept=kept).check()
