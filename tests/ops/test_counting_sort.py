"""Quotients by multiplication; the sorts themselves are tested in test_route.py and test_relay.py."""

import hypothesis.strategies as st
from hypothesis import example, given

from rowmesh.ops.counting_sort import quotient

BOUND = 2**51


@given(divisor=st.integers(1, 2**20) | st.integers(1, BOUND), multiple=st.integers(0, BOUND), below=st.integers(0, 9))
@example(divisor=3, multiple=BOUND, below=0)
@example(divisor=1, multiple=BOUND, below=1)
@example(divisor=BOUND - 1, multiple=1, below=1)
def test_quotients_are_exact_up_to_the_bound(divisor, multiple, below):
    """Next to a multiple of the divisor, on both sides; the last multiple below the bound, too."""
    last = (BOUND - 1) // divisor * divisor
    for value in (min(multiple * divisor, last), last, last - below, last + divisor - 1, BOUND - 1 - below):
        if 0 <= value < BOUND:
            assert quotient(value, 1.0 / divisor) == value // divisor


def test_quotients_are_not_exact_far_beyond():
    """What the bound is there for: the largest numbers that leave room for the half are past it."""
    value, divisor = 2682021358574249, 957
    assert BOUND < value < 2 * BOUND
    assert quotient(value, 1.0 / divisor) != value // divisor
