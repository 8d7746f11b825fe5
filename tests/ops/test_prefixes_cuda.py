"""How tensor-train ids are arranged, beside a sort in Python."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("prefixes")


@settings(max_examples=20)
@given(ids=st.lists(st.integers(0, 59), max_size=30), spare=st.integers(0, 2), shared=st.booleans())
def test_arrangement(device, ids, spare, shared):
    p1, p2, p3 = 4, 3, 5
    count = torch.tensor([len(ids)], device=device) if spare else None
    given_ids = torch.tensor(ids + [-1] * spare, dtype=torch.int64, device=device)
    a = cuda.arrange(given_ids, (p1, p2, p3), 60, count, shared=shared)
    split = [(i // p3 % p2, i // p3 // p2, i % p3) for i in ids]
    order = sorted(range(len(ids)), key=split.__getitem__)
    assert a.order[: len(ids)].tolist() == order
    assert a.lasts.tolist() == [split[i][2] for i in order] + [p3] * spare
    begins = [n for n, i in enumerate(order) if not shared or n == 0 or split[i][:2] != split[order[n - 1]][:2]]
    prefixes = [split[order[n]][:2] for n in begins]
    num = int(a.num_prefixes)
    assert num == len(prefixes)
    assert a.starts[: num + 1].tolist() == [*begins, len(ids)]
    assert a.prefixes.tolist() == [sum(b <= n for b in begins) - 1 for n in range(len(ids))] + [-1] * spare
    assert a.firsts[:num].tolist() == [first for _, first in prefixes]
    assert a.group_starts.tolist() == [sum(second < g for second, _ in prefixes) for g in range(p2 + 1)]
