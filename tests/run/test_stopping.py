"""Early stopping: it stops where it should, and goes on as if nothing had interrupted it."""

import pickle

import hypothesis
import hypothesis.strategies as st
import pytest

from rowmesh.run.stopping import LEAST_GAIN, EarlyStopping


def follow(stopping, losses, first=1):
    """Evaluations until training stops; how many there were."""
    for number, loss in enumerate(losses, first):
        stopping.add(number * 10, loss)
        if stopping.is_over:
            return number
    return len(losses) + first - 1


def test_patience_counts_evaluations_since_the_best():
    stopping = EarlyStopping(patience=3)
    assert follow(stopping, [0.7, 0.6, 0.61, 0.59, 0.6, 0.6, 0.6, 0.1]) == 7
    assert (stopping.best_step, stopping.best_loss) == (40, 0.59)


def test_without_patience_the_best_is_known_and_nothing_stops():
    stopping = EarlyStopping(patience=0)
    assert follow(stopping, [0.5, 0.6, 0.7, 0.8]) == 4
    assert stopping.best_step == 10


def test_a_difference_as_of_another_order_of_sums_is_none():
    stopping = EarlyStopping(patience=1)
    assert stopping.add(1, 0.5)
    assert not stopping.add(2, 0.5 - LEAST_GAIN / 2)
    assert stopping.is_over


@hypothesis.given(
    losses=st.lists(st.sampled_from([0.3, 0.4, 0.5, 0.6]), min_size=1, max_size=30),
    patience=st.integers(0, 4),
    cut=st.integers(0, 30),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_an_interruption_changes_no_decision(losses, patience, cut):
    whole = EarlyStopping(patience)
    expected = follow(whole, losses)
    first = EarlyStopping(patience)
    done = follow(first, losses[:cut])
    second = EarlyStopping(patience)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert second.is_over == first.is_over
    if not second.is_over:
        done = follow(second, losses[cut:], first=done + 1) if cut < len(losses) else done
    assert done == expected
    assert second == whole


@pytest.mark.parametrize("patience", [1, 2])
def test_a_new_run_may_have_more_patience(patience):
    stopping = EarlyStopping(patience=1)
    follow(stopping, [0.5, 0.6])
    resumed = EarlyStopping(patience)
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.is_over == (patience == 1)
