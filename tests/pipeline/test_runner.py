"""Runner: does a schedule in threads: in order, no sooner than the driver lets it, and with an end."""

import logging
import threading
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from numba.core.compiler_lock import global_compiler_lock

from rowmesh.errors import DataError, IdRangeError, RowmeshError
from rowmesh.pipeline.runner import PipelineClosedError, Runner, SharedError
from rowmesh.pipeline.schedule import COMPUTE, Task, make_schedule

STAGES = ("read", "copy", "route", "open", "final", "rows", "gradients", "norm", "update", "retrieve", "write back")


class Log:
    """What was done, in which thread; and what some tasks do beside."""

    def __init__(self, special=None):
        self.tasks, self.threads, self._special = [], {}, special or {}
        self._lock = threading.Lock()

    def __call__(self, task):
        if task in self._special:
            self._special[task]()
        with self._lock:
            self.tasks.append(task)
            self.threads.setdefault(task.stage, set()).add(threading.current_thread().name)


def make(schedule, log, **options):
    return Runner(schedule, dict.fromkeys(STAGES, log), rank=3, **options)


def drive(runner, schedule, num_turns, log=None):
    """Enters turns, and computes in each."""
    for turn in range(-schedule.depth, num_turns):
        runner.enter(turn)
        if turn >= 0:
            compute(runner, schedule, turn, log)


def compute(runner, schedule, turn, log=None):
    for part in range(schedule.num_parts):
        runner.wait(Task("compute", turn, part))
        if log is not None:
            log(Task("compute", turn, part))
        runner.done(Task("compute", turn, part))
    if log is not None:
        log(Task("call", turn))
        log(Task("step", turn))
    runner.done(Task("step", turn))
    if log is not None:
        log(Task("dense", turn))


def left_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rowmesh ")]


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert left_threads() == []


def check_order(schedule, log, num_turns):
    """Every resource did its tasks in order, and nothing came before what it waits for."""
    places = {task: place for place, task in enumerate(log.tasks)}
    assert len(places) == len(log.tasks), "something was done twice"
    for resource in schedule.resources:
        order = [task for turn in range(-schedule.depth, num_turns) for task in schedule.tasks(resource, turn)]
        assert [task for task in log.tasks if schedule.stage(task.stage).resource == resource] == order
    for task in log.tasks:
        for before in schedule.before(task):
            assert places[before] < places[task]


@settings(max_examples=25)
@given(
    depth=st.integers(0, 4),
    num_parts=st.integers(1, 4),
    final=st.booleans(),
    tiered=st.booleans(),
    joins=st.booleans(),
    threads=st.booleans(),
    seed=st.integers(0, 99),
)
def test_everything_is_done_in_order(depth, num_parts, final, tiered, joins, threads, seed):
    schedule = make_schedule(depth, num_parts, fetches_final=final, is_tiered=tiered, copies=True, joins=joins)
    log = Log()

    def disturb(task):
        if (seed + 7 * task.batch + len(task.stage)) % 5 == 0:
            time.sleep(0.0005)

    runner = make(schedule, log, threads=threads, disturb=disturb)
    drive(runner, schedule, 6, log)
    runner.wait_for_all()
    runner.close()
    check_order(schedule, log, 6)


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_a_resource_that_lags_is_waited_for(depth):
    """However far behind it is, nothing that it waits for is forgotten."""
    schedule = make_schedule(depth, 1, is_tiered=True)
    log = Log()
    lag = {"write back", "gradients"}
    runner = make(schedule, log, disturb=lambda task: time.sleep(0.004) if task.stage in lag else None)
    drive(runner, schedule, 12, log)
    runner.wait_for_all()
    runner.close()
    check_order(schedule, log, 12)


def test_nothing_of_a_turn_is_begun_before_it_is_entered():
    schedule = make_schedule(2, 2)
    log = Log()
    runner = make(schedule, log)
    assert log.tasks == []
    for turn in range(-2, 4):
        runner.enter(turn)
        if turn >= 0:
            compute(runner, schedule, turn)
        runner.wait_for_all()
        expected = {
            task
            for resource in schedule.resources
            if resource != COMPUTE
            for each in range(-2, turn + 1)
            for task in schedule.tasks(resource, each)
        }
        assert set(log.tasks) == expected
    runner.close()


def test_each_resource_has_a_thread_of_its_own():
    schedule = make_schedule(1, 2)
    log = Log()
    runner = make(schedule, log)
    drive(runner, schedule, 3)
    runner.wait_for_all()
    runner.close()
    assert (log.threads["read"], log.threads["route"]) == ({"rowmesh reader"}, {"rowmesh router"})
    assert log.threads["open"] == log.threads["rows"] == log.threads["final"] == {"rowmesh rows"}
    assert log.threads["gradients"] == log.threads["update"] == {"rowmesh gradients"}


def test_without_threads_the_driver_does_everything():
    schedule = make_schedule(0, 2)
    log = Log()
    runner = make(schedule, log, threads=False)
    drive(runner, schedule, 2, log)
    runner.close()
    assert set.union(*log.threads.values()) == {threading.current_thread().name}
    mine = [(task.stage, task.part) for task in log.tasks if task.batch == 1]
    assert mine == [
        ("read", 0),
        ("route", 0),
        ("open", 0),
        ("rows", 0),
        ("rows", 1),
        ("compute", 0),
        ("gradients", 0),
        ("compute", 1),
        ("call", 0),
        ("step", 0),
        ("dense", 0),
        ("gradients", 1),
        ("norm", 0),
        ("update", 0),
    ]


def fail_with(error):
    def fail():
        raise error

    return fail


def test_a_call_is_answered_before_the_step():
    for threads in (True, False):
        schedule, log = make_schedule(1, 2), Log()
        runner = make(schedule, log, threads=threads)
        for turn in (-1, 0):
            runner.enter(turn)
        for part in (0, 1):
            runner.wait(Task("compute", 0, part))
            runner.done(Task("compute", 0, part))
        runner.done(Task("call", 0))
        runner.wait_for(Task("norm", 0))
        assert Task("gradients", 0, 1) in log.tasks
        assert Task("update", 0) not in log.tasks
        runner.done(Task("step", 0))
        runner.wait_for_all()
        runner.close()
        assert Task("update", 0) in log.tasks


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("stage", ["read", "route", "open", "final", "rows", "gradients", "norm", "update"])
@pytest.mark.parametrize("error, kind", [(KeyError("x"), RowmeshError), (IdRangeError("too big"), IdRangeError)])
def test_an_error_ends_the_driver_and_is_named(stage, error, kind, threads):
    schedule = make_schedule(1, 2)
    runner = make(schedule, Log({Task(stage, 2): fail_with(error)}), threads=threads)
    text = "too big" if kind is IdRangeError else "KeyError: 'x'"
    with pytest.raises(kind, match=f"^rank 3 in stage '{stage}' of batch 2: {text}$") as caught:
        drive(runner, schedule, 6)
    assert caught.value.__cause__ is error
    with pytest.raises(kind, match="in stage"):
        runner.wait_for_all()
    runner.close()
    assert runner.cancelled.is_set()


def test_an_error_that_cannot_be_made_of_a_text_keeps_what_it_says():
    class ParticularError(RowmeshError):
        def __init__(self, what, why):
            super().__init__(f"{what}: {why}")

    schedule = make_schedule(1, 1)
    runner = make(schedule, Log({Task("read", 0): fail_with(ParticularError("rows", "gone"))}))
    with pytest.raises(RowmeshError, match=r"^rank 3 in stage 'read' of batch 0: rows: gone$"):
        drive(runner, schedule, 2)
    runner.close()


def test_the_first_error_is_the_one_that_is_told():
    """What fails because something else has failed says nothing new."""
    schedule = make_schedule(1, 1)
    failed = threading.Event()

    def fail_first():
        failed.set()
        raise DataError("bad line")

    def fail():
        failed.wait(5)
        time.sleep(0.1)
        raise RowmeshError("failed")

    log = Log({Task("update", 0): fail, Task("read", 2): fail_first})
    runner = make(schedule, log)
    with pytest.raises(DataError, match="bad line"):
        drive(runner, schedule, 4)
    with pytest.raises(DataError, match="bad line"):
        runner.wait_for_all()
    runner.close()


def test_a_failure_ahead_lets_the_steps_before_it_be_done():
    """The driver hears of it when nothing that it asked for is left."""
    schedule = make_schedule(1, 1)
    began, log = threading.Event(), Log()

    def fail():
        began.set()
        raise MemoryError("no room")

    def wait_and_update():
        began.wait(5)
        time.sleep(0.1)

    runner = make(schedule, log, disturb=lambda task: wait_and_update() if task == Task("update", 1) else None)
    log._special[Task("final", 2)] = fail
    with pytest.raises(RowmeshError, match="in stage 'final' of batch 2: MemoryError: no room"):
        drive(runner, schedule, 6)
    assert Task("update", 1) in log.tasks
    runner.close()


def test_an_error_that_is_kept_ends_nothing():
    schedule, kept = make_schedule(1, 1), []

    def keep(task, error):
        kept.append((task, str(error)))
        return True

    log = Log({Task("read", 2): fail_with(DataError("bad line"))})
    runner = make(schedule, log, keep=keep)
    drive(runner, schedule, 4, log)
    runner.wait_for_all()
    assert runner.close() is None
    assert kept == [(Task("read", 2), "bad line")]
    assert Task("update", 3) in log.tasks


def test_an_error_that_all_ranks_meet_leaves_no_task_of_its_turn():
    schedule, log = make_schedule(1, 1), Log({Task("update", 1): fail_with(SharedError(DataError("refused")))})
    runner = make(schedule, log)
    with pytest.raises(DataError, match="in stage 'update' of batch 1: refused"):
        drive(runner, schedule, 4, log)
    assert not runner.is_beyond_help
    runner.close()
    assert Task("read", 3) in log.tasks
    assert Task("rows", 2) not in log.tasks


def test_closing_does_what_was_begun():
    """What ranks have sent depends on where they stop, and not on how far their threads have come."""
    schedule = make_schedule(1, 2)
    for computed in range(2):
        log = Log()
        runner = make(schedule, log, disturb=lambda _: time.sleep(0.002))
        drive(runner, schedule, 2)
        runner.enter(2)
        for part in range(computed):
            runner.wait(Task("compute", 2, part))
            runner.done(Task("compute", 2, part))
        runner.close()
        done = set(log.tasks)
        assert Task("update", 1) in done, "a step that was taken is done"
        assert {Task("rows", 2, 1), Task("open", 3), Task("final", 3)} <= done
        gradients = {task for task in done if (task.stage, task.batch) == ("gradients", 2)}
        assert gradients == {Task("gradients", 2, part) for part in range(computed)}
        assert not any(task.batch > 3 or task == Task("update", 2) for task in done)


def test_waiting_in_a_closed_pipeline():
    schedule = make_schedule(1, 1)
    runner = make(schedule, Log())
    runner.close()
    with pytest.raises(PipelineClosedError, match="rank 3: the pipeline was closed"):
        runner.wait(Task("compute", 0))
    runner.close()


def test_a_thread_that_does_not_end_is_told(monkeypatch, caplog):
    """And does not hold up the program."""
    monkeypatch.setattr("rowmesh.pipeline.runner._CLOSE_S", 0.1)
    monkeypatch.setattr("rowmesh.pipeline.runner._GIVE_UP_S", 0.1)
    let_go = threading.Event()
    schedule = make_schedule(1, 1)
    runner = make(schedule, Log({Task("read", 0): let_go.wait}))
    runner.enter(-1)
    with caplog.at_level(logging.WARNING, "rowmesh"):
        runner.close()
    assert "rank 3: the thread 'rowmesh reader' is still busy" in caplog.text
    let_go.set()
    for _ in range(100):
        if not left_threads():
            break
        time.sleep(0.02)


def test_kernels_that_are_compiled_are_waited_for(monkeypatch):
    for name in ("_CLOSE_S", "_GIVE_UP_S"):
        monkeypatch.setattr(f"rowmesh.pipeline.runner.{name}", 0.5)
    began = threading.Event()

    def compile_long():
        with global_compiler_lock:
            began.set()
            time.sleep(2.0)

    log = Log({Task("rows", 0, 0): compile_long})
    runner = make(make_schedule(1, 1), log)
    runner.enter(-1)
    runner.enter(0)
    began.wait()
    runner.close()
    assert Task("rows", 0, 0) in log.tasks


def test_a_driver_that_is_interrupted_leaves_no_thread():
    schedule = make_schedule(2, 1)
    runner = make(schedule, Log())

    def interrupt(task):
        if task == Task("compute", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(runner, schedule, 2, interrupt)
    runner.close()
    assert left_threads() == []


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_driver_that_waits_hears_a_signal():
    """A thread that waits for a lock without a limit would not."""
    import _thread

    release = threading.Event()
    schedule = make_schedule(1, 1)
    runner = make(schedule, Log({Task("read", 1): release.wait}))
    timer = threading.Timer(0.3, _thread.interrupt_main)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            drive(runner, schedule, 4)
    finally:
        release.set()
        timer.join()
        runner.close()


@pytest.mark.parametrize("stage, waits", [("rows", True), ("read", False)])
def test_whoever_still_sends_when_it_is_closed_says_when_it_is_done(monkeypatch, caplog, stage, waits):
    """A thread that reads delays no rank: it sends nothing."""
    for name in ("_CLOSE_S", "_GIVE_UP_S"):
        monkeypatch.setattr(f"rowmesh.pipeline.runner.{name}", 0.01)
    schedule, began, goes_on, silent = make_schedule(1, 1), threading.Event(), threading.Event(), threading.Event()

    def hold():
        began.set()
        goes_on.wait()

    runner = make(schedule, Log({Task(stage, 0, 0): hold}))
    runner.enter(-1)
    runner.enter(0)
    began.wait()
    with caplog.at_level(logging.WARNING, logger="rowmesh"):
        runner.close(silent.set)
    assert "is still busy and is left alone" in caplog.text
    assert silent.is_set() is not waits
    goes_on.set()
    assert silent.wait(30.0)
    for thread in threading.enumerate():
        if thread.name.startswith("rowmesh "):
            thread.join()
