"""Auto: what measured stages advise, and the model by which."""

from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmesh.pipeline.auto import COST_S, LEAST_GAIN, choose, predicted_s, work_of
from rowmesh.pipeline.schedule import make_schedule

STAGES = {"read": 1e-4, "route": 1e-3, "open": 2e-3, "rows": 0.02, "compute": 0.06, "gradients": 0.02, "update": 1e-3}


def predict(depth, count, stages=STAGES, cores=2.0, can_split=True):
    return predicted_s(stages, {}, depth, count, cores=cores, can_split=can_split)


def test_in_turn_is_the_sum():
    assert predict(0, 1) == pytest.approx(sum(STAGES.values()))


def test_a_window_hides_what_it_can():
    """Two even micro-batches: half the computation hides what is left of the rows, the other half the first push."""
    assert predict(0, 4) < predict(0, 1)
    assert predict(1, 2) < predict(0, 2)
    assert predict(1, 2) >= STAGES["compute"] + 2 * COST_S


def test_final_rows_are_not_expected_of_many_micro_batches():
    """With nothing to read or to route, depth hides no more than the window does."""
    assert predict(1, 4) == predict(0, 4)


def test_what_cannot_be_split_is_not():
    choice = choose(STAGES | {"route": 0.01}, {}, cores=2.0, can_split=False)
    assert (choice.depth, choice.micro_batches) == (1, 1)


def test_nothing_to_gain_leaves_it_off():
    choice = choose({"compute": 0.1, "rows": 1e-4, "gradients": 1e-4}, {}, cores=2.0, can_split=True)
    assert choice.is_off
    assert str(choice).startswith("off: nothing would gain 3%")


def test_threads_that_need_the_same_core_gain_nothing():
    assert choose(STAGES, STAGES, cores=1.0, can_split=True).is_off
    assert not choose(STAGES, STAGES, cores=2.0, can_split=True).is_off


def test_rows_and_gradients_share_what_brings_them_on_a_device():
    """Where two threads bring more in the time of one, it gains less."""
    busy = {"rows": 0.05, "compute": 0.06, "gradients": 0.05}
    on_device = partial(make_schedule, is_on_device=True)
    apart, shared = (choose(busy, {}, cores=1.0, can_split=True, schedule=each) for each in (make_schedule, on_device))
    assert apart.step_s < 0.1 <= shared.step_s


@given(
    times=st.dictionaries(st.sampled_from(sorted(STAGES)), st.floats(1e-5, 0.2), min_size=2),
    cores=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    can_split=st.booleans(),
)
def test_a_choice_gains_or_is_off(times, cores, can_split):
    choice = choose(times, {}, cores=cores, can_split=can_split)
    assert choice.is_off or choice.step_s <= (1 + LEAST_GAIN) * (1 - LEAST_GAIN) * choice.in_turn_s
    assert can_split or choice.micro_batches == 1


def test_the_dense_network_is_beside_the_last_gradients():
    without, short, long = (predict(1, 4, STAGES | {"dense": dense_s}) for dense_s in (0.0, 1e-3, 0.05))
    assert short == without
    assert without + 0.03 < long < without + 0.05


def test_light_ends_are_sized_by_what_was_measured():
    work = work_of(STAGES)
    assert (work.compute_ms, work.fetch_ms, work.push_ms) == (60.0, 20.0, 20.0)
    light = predicted_s(STAGES, {}, 1, 8, cores=2.0, can_split=True, sizes="light_ends")
    assert light < predict(1, 8)
