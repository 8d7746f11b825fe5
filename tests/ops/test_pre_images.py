"""What is kept is what rows were, and it is put back where it was."""

from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from rowmesh.ops.memory import Buffer
from rowmesh.ops.pre_images import CLAIMED, DevicePreImages, PreImages, claim, copy_all, reference, settle
from rowmesh.ops.pre_images import device as pre_images_of_devices

MAX_SLOTS = 12


def u32(numbers):
    return np.array(numbers, np.uint32)


@given(
    is_free=st.lists(st.integers(0, CLAIMED), min_size=1, max_size=MAX_SLOTS),
    pairs=st.lists(st.tuples(st.integers(0, MAX_SLOTS + 1), st.integers(0, 99))),
    first=st.integers(0, 2**31),
)
def test_slots_are_claimed_as_by_the_reference(is_free, pairs, first):
    slots, at = u32([slot for slot, _ in pairs]), u32([beside for _, beside in pairs])
    found = []
    for way in (claim, reference.claim):
        own, places = np.array(is_free, np.uint8), np.zeros(len(is_free), np.uint32)
        found.append([each.tolist() for each in (way(own, places, slots, at, first), own, places)])
    assert found[0] == found[1]


@given(is_free=st.lists(st.integers(0, CLAIMED), min_size=1, max_size=MAX_SLOTS), data=st.data())
def test_slots_are_settled_as_by_the_reference(is_free, data):
    last = len(is_free) - 1
    first, stop = sorted(data.draw(st.tuples(st.integers(0, last), st.integers(0, last))))
    every = u32(data.draw(st.lists(st.integers(0, last), unique=True)))
    places = u32(range(10, 10 + len(is_free)))
    for slots in (range(first, stop), every):
        found = []
        for way in (settle, reference.settle):
            own = np.array(is_free, np.uint8)
            found.append([way(own, places, slots).tolist(), own.tolist()])
        assert found[0] == found[1]


@pytest.mark.parametrize("slots", [range(1, 4), u32([0, 3])])
def test_slots_that_are_not_there_are_not_settled(slots):
    with pytest.raises(AssertionError, match="that there are"):
        settle(np.ones(3, np.uint8), np.zeros(3, np.uint32), slots)


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 63], [64 * 1000 + 17, 128, 0, 5]])
def test_all_bytes_are_copied_and_no_others(sizes, shift):
    draw = torch.Generator().manual_seed(0)
    sources = [torch.randint(1, 256, (size,), generator=draw, dtype=torch.uint8) for size in sizes]
    memory = [Buffer(shift + size + 64).tensor(torch.uint8, shift + size + 64) for size in sizes]
    copy_all(sources, [each[shift : shift + len(of)] for each, of in zip(memory, sources, strict=True)])
    for source, each in zip(sources, memory, strict=True):
        assert torch.equal(each[shift : shift + len(source)], source)
        assert not each[:shift].any()
        assert not each[shift + len(source) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (33,), (32,)])
def test_rows_of_any_size_come_back(dtype, shape):
    draw, kept = torch.Generator().manual_seed(0), PreImages()
    before = torch.randn(40, *shape, generator=draw).to(dtype)
    rows, places, num = before.clone(), np.zeros(40, np.uint32), 0
    for slots in ([5], [39, 0, 7], [8, 9]):
        out = Buffer(rows[slots].nbytes).tensor(dtype, len(slots), *shape)  # some are multiples of 64 bytes long
        kept.keep(rows, u32(slots), out)
        rows[slots] += 1
        places[slots] = range(num + 1, num + len(slots) + 1)
        num += len(slots)
    blocks = [each.rows.float().numpy() for each in kept.blocks]
    expected = rows.float().numpy()
    reference.restore(places, blocks, expected)
    PreImages.restore(places, rows, kept.blocks)
    assert torch.equal(rows, before)
    assert torch.equal(rows.float(), torch.from_numpy(expected))


def test_without_pre_images_nothing_changes():
    rows = torch.ones(2, 3)
    PreImages.restore(u32([0, 0]), rows, [])
    assert torch.equal(rows, torch.ones(2, 3))


def test_pre_images_that_are_not_there_are_refused():
    kept = PreImages()
    kept.keep(torch.ones(2, 3), u32([1]), torch.empty(1, 3))
    with pytest.raises(AssertionError, match="that there are"):
        PreImages.restore(u32([2, 0]), torch.ones(2, 3), kept.blocks)
    with pytest.raises(AssertionError, match="that there are"):
        kept.keep(torch.ones(2, 3), u32([2]), torch.empty(1, 3))


@pytest.mark.parametrize("room_bytes", [0, 100, 1 << 20])
@given(events=st.lists(st.lists(st.integers(0, MAX_SLOTS + 1), unique=True), max_size=6), seed=st.integers(0, 99))
def test_rows_of_a_device_are_read_as_they_were(room_bytes, events, seed):
    """Whatever is updated before, between and amid reads, in slabs of three rows."""
    draw, arrays = np.random.default_rng(seed), [torch.arange(24.0).view(12, 2), torch.arange(12.0)]
    expected, missing = [array.clone() for array in arrays], draw.permutation(MAX_SLOTS)[:2]
    due = [range(4), u32([slot for slot in range(4, MAX_SLOTS) if slot not in missing])]
    with mock.patch.object(pre_images_of_devices, "SLAB_ROWS", 3):
        kept = DevicePreImages(arrays, due, MAX_SLOTS, room_bytes)
        saved, updates = 0, iter(events)

        def update():
            slots = torch.tensor(next(updates, []), dtype=torch.int64)
            count = kept.keep(slots, slots)
            for array in arrays:
                array[slots[slots < MAX_SLOTS]] += 100
            return count

        for slots in due:
            saved += update()
            copied = kept.copy(slots)
            saved += update()
            places = kept.settle(slots)
            saved += update()
            out = [torch.empty_like(array) for array in copied]
            kept.restore(places, copied, out)
            index = torch.tensor(list(slots), dtype=torch.int64)
            assert all(torch.equal(a, b[index]) for a, b in zip(out, expected, strict=True))
        kept.close()
    assert saved <= sum(map(len, due))
