import threading

import pytest

from rowmesh._support.worker import Worker
from rowmesh.data.prefetch import prefetch
from rowmesh.placement import Plan, TableShape, Topology
from rowmesh.placement.drift import Planner
from rowmesh.placement.request import Request
from tests.support.interrupts import interrupted

pytestmark = pytest.mark.usefixtures("heeds_ctrl_c")  # in a shell's background job too


def test_the_end_of_a_thread_is_known_where_waiting_for_it_was_interrupted():
    goes_on, done = threading.Event(), []

    def work():
        goes_on.wait(60.0)
        done.append(1)

    worker = Worker(target=work, name="working")
    worker.start()
    with interrupted():
        worker.join()
    assert not worker.has_ended
    worker.join(0.01)
    assert not worker.has_ended
    goes_on.set()
    worker.join()
    assert worker.has_ended
    assert done == [1]


def fail():
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_has_ended():
    worker = Worker(target=fail, name="failing")
    with pytest.raises(RuntimeError, match="failing was not started"):
        worker.join()
    worker.start()
    worker.join()
    assert worker.has_ended


def test_a_thread_does_not_wait_for_itself():
    errors = []

    def work():
        try:
            worker.join()
        except RuntimeError as error:
            errors.append(str(error))

    worker = Worker(target=work, name="working")
    worker.start()
    worker.join()
    assert errors == ["working cannot wait for its own end"]


def test_a_read_ahead_that_was_interrupted_is_still_known_to_run():
    goes_on, begun = threading.Event(), threading.Event()

    def items():
        yield 1
        begun.set()
        goes_on.wait(60.0)
        yield 2

    ahead = prefetch(items(), depth=2)
    assert next(ahead) == 1
    assert begun.wait(60.0)
    (thread,) = (each for each in threading.enumerate() if each.name == "rowmesh-prefetch")
    with interrupted():
        ahead.close()
    assert isinstance(thread, Worker)
    assert not thread.has_ended
    goes_on.set()
    thread.join()


def test_a_plan_that_was_waited_for_in_vain_is_still_being_made():
    goes_on = threading.Event()
    shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
    planner = Planner(Plan.cyclic([shape], 1), "auto", Topology.uniform(1), Request(batch_size=1))
    planner._propose = lambda sketch: goes_on.wait(60.0)
    planner.begin()
    with interrupted():
        planner.wait()
    assert planner.is_planning
    assert planner.take() is None
    goes_on.set()
    planner.close()
    assert not planner.is_planning
