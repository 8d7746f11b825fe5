"""When replicas are synchronized; what their ranks compare is tested in test_two_dimensional.py."""

from rowmesh import Mesh
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.sync_schedule import SyncSchedule
from rowmesh.tables.update_rules import Rate


def digest(*rates):
    """Of steps with these rates, one after the other."""
    step = Step(0, ())
    for number, lr in enumerate(rates):
        step = Step(number, (Rate(lr),)).after(step.digest if number else 0)
    return step.digest


def test_a_synchronization_is_due_with_the_rates_of_all_steps_since_the_last_one():
    schedule = SyncSchedule(Mesh(), every=3)
    due = [schedule.after(Step(number, (Rate(0.1 * number),))) for number in range(1, 8)]
    assert [None if step is None else step.number for step in due] == [None, None, 3, None, None, 6, None]
    assert [step.digest for step in due if step is not None] == [
        digest(*(0.1 * number for number in numbers)) for numbers in ((1, 2, 3), (4, 5, 6))
    ]
    assert [schedule.is_due(step) for step in (3, 4)] == [True, False]


def test_calls_between_steps_count_down():
    schedule = SyncSchedule(Mesh(), every=1)
    assert [schedule.call(), schedule.call()] == [-1, -2]
