"""Sizes of micro-batches: the model of a window, and the sizes chosen by it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmesh.errors import ConfigurationError
from rowmesh.pipeline.sizes import WindowWork, choose_sizes, rows_exponent, window_ms

times = st.floats(0, 200)
works = st.builds(
    WindowWork,
    compute_ms=times,
    fetch_ms=times,
    push_ms=times,
    latency_ms=st.floats(0, 2),
    rows_exponent=st.floats(0.3, 1),
)


def share_40(**changes):
    """Communication is 40 % of a sequential step."""
    return WindowWork(**{"compute_ms": 100.0, "fetch_ms": 33.3, "push_ms": 33.3, **changes})


@given(works, st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any))
def test_a_window_takes_what_cannot_be_hidden_at_least(work, sizes):
    exponent, batch_size = work.rows_exponent, sum(sizes)
    first = work.fetch_ms * (sizes[0] / batch_size) ** exponent + work.latency_ms
    last = work.push_ms * (sizes[-1] / batch_size) ** exponent + work.latency_ms
    communication = work.fetch_ms + work.push_ms + 2 * len(sizes) * work.latency_ms
    took = window_ms(sizes, work)
    assert took >= max(communication, work.compute_ms + first + last) - 1e-6
    assert took <= communication + work.compute_ms + 1e-6


def test_one_micro_batch_hides_nothing():
    assert window_ms([64], share_40(latency_ms=1.0)) == pytest.approx(100 + 66.6 + 2)
    assert window_ms([], share_40()) == 0.0


def test_computation_waits_for_its_rows():
    """Half the rows arrive after 20 ms, the others after 40; in between there is computation of 1 ms only."""
    work = WindowWork(compute_ms=2.0, fetch_ms=40.0, push_ms=0.0, rows_exponent=1.0)
    assert window_ms([50, 50], work) == pytest.approx(41.0)


@given(works, st.integers(1, 16), st.integers(0, 500))
def test_sizes_add_up_and_are_never_worse_than_even_ones(work, count, more):
    batch_size = count + more
    sizes = choose_sizes(batch_size, count, work)
    assert (len(sizes), sum(sizes)) == (count, batch_size)
    assert min(sizes) >= 1
    even = [batch_size * (m + 1) // count - batch_size * m // count for m in range(count)]
    slowest = max(window_ms(even, work), window_ms(even[::-1], work))  # one more sample here or there
    assert window_ms(sizes, work) <= slowest * 1.02 + 1e-6


def test_ends_are_small_where_computation_binds():
    sizes = choose_sizes(2048, 8, share_40())
    assert max(sizes[0], sizes[-1]) < 64 < 2048 // 8 < min(sizes[3:5])
    assert all(abs(a - b) <= 1 for a, b in zip(sizes, reversed(sizes), strict=True))
    exposed = window_ms(sizes, share_40()) - 100
    assert exposed < 0.1 * 66.6 < 0.5 * (window_ms([256] * 8, share_40()) - 100)


def test_ends_grow_with_latency():
    """What the second micro-batch waits for must hide behind the first."""
    ends = [choose_sizes(2048, 8, share_40(latency_ms=ms))[0] for ms in (0.0, 0.5, 1.0)]
    assert ends == sorted(ends)
    assert ends[0] < ends[2]


def test_sizes_are_even_where_communication_binds():
    work = WindowWork(compute_ms=10.0, fetch_ms=100.0, push_ms=100.0)
    assert choose_sizes(2048, 8, work) == (256,) * 8


def test_exponent_is_fitted_to_two_counts():
    assert rows_exponent(1000, 100, 500, 25) == pytest.approx(0.5)
    assert rows_exponent(100, 100, 9, 10) == 1.0
    with pytest.raises(ValueError, match="smaller than the batch, got 5 of 5 rows and 1 of 2 samples"):
        rows_exponent(5, 2, 5, 1)


@pytest.mark.parametrize("changes", [{"compute_ms": -1.0}, {"push_ms": float("nan")}, {"latency_ms": float("inf")}])
def test_refuses_times_that_are_none(changes):
    with pytest.raises(ConfigurationError, match="0 or more, and finite"):
        share_40(**changes)


def test_refuses_what_cannot_be_cut():
    with pytest.raises(ConfigurationError, match=r"rows_exponent must be above 0 and at most 1, got 1.5"):
        share_40(rows_exponent=1.5)
    with pytest.raises(ConfigurationError, match="7 samples do not make 8 micro-batches"):
        choose_sizes(7, 8, share_40())
    with pytest.raises(ConfigurationError, match="7 samples do not make 0 micro-batches"):
        choose_sizes(7, 0, share_40())
