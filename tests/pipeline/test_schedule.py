"""Schedule: the same order everywhere, nothing before what it needs, and durations that can be checked by hand."""

import zlib
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmesh.errors import ConfigurationError
from rowmesh.pipeline.playing import play, slowdown, step_s
from rowmesh.pipeline.schedule import COMPUTE, After, Schedule, Stage, Task, make_schedule


def chance(below, *what):
    """The same number below a bound in every process."""
    return zlib.crc32(repr(what).encode()) % below


@st.composite
def schedules(draw):
    return make_schedule(
        draw(st.integers(0, 5)),
        draw(st.integers(1, 6)),
        fetches_final=draw(st.booleans()),
        is_tiered=draw(st.booleans()),
        copies=draw(st.booleans()),
        joins=draw(st.booleans()),
    )


@st.composite
def plays(draw):
    """A schedule, how long each task takes, and the number of turns."""
    schedule, seed = draw(schedules()), draw(st.integers(0, 1000))
    return schedule, lambda task: 0.1 * chance(7, seed, task), draw(st.integers(1, 8))


def stages_of(schedule, resource, turn=10):
    return [(task.stage, task.batch - turn) for task in schedule.tasks(resource, turn) if task.part == 0]


@given(play_=plays())
def test_nothing_is_done_before_what_it_waits_for(play_):
    schedule, seconds, num_turns = play_
    spans = {span.task: span for span in play(schedule, seconds, num_turns)}
    for task, span in spans.items():
        assert span.end_s == pytest.approx(span.start_s + seconds(task))
        for before in schedule.before(task):
            assert spans[before].end_s <= span.start_s


@given(play_=plays())
def test_no_task_of_a_turn_is_begun_before_the_driver_enters_it(play_):
    """It enters a turn when it has updated the dense network in the turn before."""
    schedule, seconds, num_turns = play_
    spans = play(schedule, seconds, num_turns)
    over = {span.task.batch: span.end_s for span in spans if span.task.stage == "dense"}
    for task, resource, start_s, *_ in spans:
        turn = task.batch - schedule.stage(task.stage).ahead
        assert turn <= 0 or start_s >= over[turn - 1], resource


@given(play_=plays())
def test_everything_is_done_once(play_):
    schedule, seconds, num_turns = play_
    spans = play(schedule, seconds, num_turns)
    count = sum((schedule.num_parts if stage.by_part else 1) * (num_turns + stage.ahead) for stage in schedule.stages)
    assert len(spans) == len({span.task for span in spans}) == count


@given(play_=plays(), seed=st.integers(0, 1000))
def test_a_resource_has_one_order_whatever_takes_how_long(play_, seed):
    """So collectives of ranks cannot cross."""
    schedule, seconds, num_turns = play_
    others = play(schedule, lambda task: 0.1 * chance(5, seed, task), num_turns)
    spans = play(schedule, seconds, num_turns)
    for resource in schedule.resources:
        first, second = ([span for span in each if span.resource == resource] for each in (spans, others))
        for mine in (first, second):
            mine.sort(key=lambda span: (span.start_s, span.end_s))
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(mine))
        order = [task for turn in range(-schedule.depth, num_turns) for task in schedule.tasks(resource, turn)]
        assert sorted(span.task for span in first) == sorted(order)
        starts = {span.task: span.start_s for span in spans}
        assert all(starts[a] <= starts[b] for a, b in pairwise(order))


@given(play_=plays())
def test_no_more_than_depth_batches_are_ahead(play_):
    schedule, _, _ = play_
    for resource in schedule.resources:
        for task in schedule.tasks(resource, 10):
            assert 10 <= task.batch <= 10 + schedule.depth


@given(schedule=schedules(), seconds=st.lists(st.integers(0, 9), min_size=10, max_size=10))
def test_it_takes_no_longer_than_one_after_the_other_and_no_less_than_any_resource(schedule, seconds):
    names = [stage.name for stage in schedule.stages]

    def duration(task):
        return float(seconds[names.index(task.stage) % 10])

    spans = play(schedule, duration, 5)
    total = max(span.end_s for span in spans)
    assert total <= sum(duration(span.task) for span in spans) + 1e-9
    for resource in schedule.resources:
        assert total >= sum(duration(span.task) for span in spans if span.resource == resource) - 1e-9


def test_what_is_declared_for_each_depth():
    sequential = make_schedule(0, 2)
    assert stages_of(sequential, "rows") == [("open", 0), ("rows", 0)]
    assert stages_of(sequential, "reader") == [("read", 0)]
    assert stages_of(sequential, "router") == [("route", 0)]
    assert stages_of(sequential, COMPUTE) == [("compute", 0), ("call", 0), ("step", 0), ("dense", 0)]
    assert stages_of(sequential, "gradients") == [("gradients", 0), ("norm", 0), ("update", 0)]
    assert stages_of(make_schedule(4, 2), "rows") == [("rows", 0), ("open", 2), ("final", 1)]
    assert stages_of(make_schedule(1, 2, fetches_final=False), "rows") == [("rows", 0), ("open", 1)]
    late = make_schedule(1, 2, is_on_device=True, opens_ahead=False)
    assert [stage for stage, _ in stages_of(late, "communication")] == ["open", "rows", "gradients", "norm", "update"]
    assert stages_of(late, "router") == [("route", 1)]
    copies = make_schedule(3, 2, copies=True)
    assert [stages_of(copies, each) for each in ("reader", "copier", "router")] == [
        [("read", 3)],
        [("copy", 3)],
        [("route", 3)],
    ]
    joined = make_schedule(3, 2, copies=True, joins=True)
    assert stages_of(joined, "worker") == [("read", 3), ("copy", 3), ("route", 3)]
    tiered = make_schedule(2, 2, is_tiered=True)
    assert stages_of(tiered, "tier") == [("retrieve", 1)]
    assert Task("retrieve", 5) in tiered.before(Task("rows", 5, 1))
    assert Task("retrieve", 5) in tiered.before(Task("final", 5))


def test_what_rows_wait_for():
    schedule = make_schedule(2, 3)
    assert set(schedule.before(Task("rows", 5, 2))) == {Task("open", 5), Task("update", 4)}
    assert set(schedule.before(Task("final", 5))) == {Task("open", 5), Task("open", 4), Task("update", 3)}
    assert set(schedule.before(Task("compute", 5, 2))) == {Task("rows", 5, 2), Task("step", 4)}
    assert set(schedule.before(Task("call", 5))) == {Task("compute", 5, part) for part in range(3)}
    assert set(schedule.before(Task("step", 5))) == {Task("call", 5)}
    assert Task("gradients", 5, 2) in schedule.before(Task("norm", 5)), "all that was pushed"
    assert Task("step", 5) not in schedule.before(Task("norm", 5))
    assert set(schedule.before(Task("gradients", 5, 1))) == {Task("compute", 5, 1)}
    assert set(schedule.before(Task("rows", 0, 2))) == {Task("open", 0)}, "there is no batch before the first"


def test_a_timeline_by_hand():
    """Depth 1, two micro-batches: opening 1 s, rows 2 s each, computing 5 s each, gradients 2 s each, all else 0.

    Batch 0 is opened by 1, its rows are here at 3 and 5, it is computed by 8 and 13, its gradients are there by 10 and
    15, when it is updated. Batch 1 was opened meanwhile, by 6; its rows are here at 17 and 19, it is computed by 27.
    """
    seconds = {"open": 1.0, "rows": 2.0, "compute": 5.0, "gradients": 2.0}
    spans = play(make_schedule(1, 2), lambda task: seconds.get(task.stage, 0.0), 2)
    ends = {span.task: span.end_s for span in spans}
    assert [ends[Task("open", batch)] for batch in (0, 1)] == [1.0, 6.0]
    assert [ends[Task("rows", 0, part)] for part in (0, 1)] == [3.0, 5.0]
    assert [ends[Task("compute", 0, part)] for part in (0, 1)] == [8.0, 13.0]
    assert [ends[Task("gradients", 0, part)] for part in (0, 1)] == [10.0, 15.0]
    assert ends[Task("update", 0)] == 15.0
    assert [ends[Task("rows", 1, part)] for part in (0, 1)] == [17.0, 19.0]
    assert [ends[Task("compute", 1, part)] for part in (0, 1)] == [22.0, 27.0]


def test_rows_that_are_final_shorten_the_step():
    """With rows 4 s, of which 3 s are final, a step of 10 s of computing exposes the update and what is left."""

    def seconds(share):
        times = {"compute": 10.0, "gradients": 1.0, "rows": 4.0 * (1 - share), "final": 4.0 * share, "open": 0.5}
        return lambda task: times.get(task.stage, 0.0)

    whole = play(make_schedule(1, 1, fetches_final=False), seconds(0.0), 20)
    final = play(make_schedule(1, 1), seconds(0.75), 20)
    assert step_s(whole) == pytest.approx(10 + 1 + 4)
    assert step_s(final) == pytest.approx(10 + 1 + 1)


def test_the_dense_network_is_averaged_beside_the_last_gradients():
    """The longer of the two is exposed."""

    def step(dense_s):
        times = {"compute": 10.0, "gradients": 2.0, "dense": dense_s}
        return step_s(play(make_schedule(1, 1), lambda task: times.get(task.stage, 0.0), 20))

    assert [step(dense_s) for dense_s in (0.0, 1.5, 5.0)] == pytest.approx([12.0, 12.0, 15.0])


def test_small_ends_expose_less():
    """Two ways to cut 8 s of computing and 4 s of rows: what is exposed is the first fetch and the last push."""

    def step(shares):
        times = {"compute": 8.0, "rows": 4.0, "gradients": 2.0}
        schedule = make_schedule(1, len(shares))
        return step_s(play(schedule, lambda task: times.get(task.stage, 0.0) * shares[task.part], 20))

    assert step([0.25] * 4) == pytest.approx(8 + 1 + 0.5)
    assert step([0.1, 0.4, 0.4, 0.1]) < step([0.25] * 4)
    assert step([0.1, 0.4, 0.4, 0.1]) == pytest.approx(8 + 0.4 + 0.2 + (1.6 - 0.8))  # the second fetch is waited for


@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_sequential_loop_adds_up(num_parts):
    """Depth 0 and one resource: one after the other."""
    schedule = make_schedule(0, num_parts)
    alone = replace(schedule, stages=tuple(replace(stage, resource=COMPUTE) for stage in in_order(schedule)))
    spans = play(alone, lambda task: 1.0, 4)
    tasks = 8 + 3 * num_parts
    assert max(span.end_s for span in spans) == 4 * tasks
    assert step_s(spans) == tasks


SLEEPY = ("read", "copy", "route", "retrieve", "compute")


@pytest.mark.parametrize(
    "depth, num_parts, names, step",
    [
        *((depth, 1, SLEEPY, ms) for depth, ms in enumerate([100, 50, 100 / 3, 25, 20])),
        (4, 1, ("rows", "compute", "gradients", "update"), 80),
        (4, 8, ("rows", "compute", "gradients", "update"), 20 + 20 + 2.5 + 2.5),
    ],
)
def test_stages_of_20_ms_hide_behind_each_other(depth, num_parts, names, step):
    """K + 1 of them; but rows, computing, gradients and the update of one batch after the other are one loop."""

    def seconds(task):
        return 0.02 / (num_parts if schedule.stage(task.stage).by_part else 1) if task.stage in names else 0.0

    schedule = make_schedule(depth, num_parts, is_tiered=True, copies=True)
    assert 1e3 * step_s(play(schedule, seconds, 61)) == pytest.approx(step, abs=0.7)
    joined = make_schedule(depth, num_parts, is_tiered=True, copies=True, joins=True)
    assert 1e3 * step_s(play(joined, seconds, 61)) >= 60 * ("read" in names)


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=6), cores=st.sampled_from([0.5, 1.0, 2.0, 3.5]))
def test_a_slowdown_gives_away_the_cores_that_there_are(shares, cores):
    slower = slowdown(shares, cores)
    used = sum(share / (1 + share * (slower - 1)) for share in shares)
    assert used == pytest.approx(min(sum(shares), cores), abs=1e-6)


@given(play_=plays(), cores=st.sampled_from([0.5, 1.0, 2.0]), share=st.floats(0, 1))
def test_it_takes_no_less_than_the_processor_has_to_do(play_, cores, share):
    schedule, seconds, num_turns = play_
    spans = play(schedule, seconds, num_turns, cores=cores, share=lambda task: share)
    work = sum(share * seconds(span.task) for span in spans)
    assert sum(span.cpu_s for span in spans) == pytest.approx(work)
    assert max(span.end_s for span in spans) >= work / cores - 1e-6
    alone = play(schedule, seconds, num_turns)
    assert max(span.end_s for span in spans) >= max(span.end_s for span in alone) - 1e-6


def test_two_busy_tasks_on_one_core_take_twice_as_long():
    stages = (Stage("a", "one"), Stage("b", "two"), Stage("waits", "three"), Stage("dense", COMPUTE))
    spans = play(Schedule(stages, 1, 0), lambda task: 1.0, 1, cores=1.0, share=lambda task: float(task.stage in "ab"))
    ends = {span.task.stage: span.end_s for span in spans}
    assert ends == pytest.approx({"a": 2.0, "b": 2.0, "waits": 1.0, "dense": 1.0})


def in_order(schedule):
    """The stages of a batch, each after what it waits for."""
    order = ["read", "route", "open", "rows", "compute", "call", "step", "dense", "gradients", "norm", "update"]
    return [schedule.stage(name) for name in order]


def test_schedules_that_cannot_work():
    with pytest.raises(ConfigurationError, match=r"stages wait for \['sleep'\]"):
        Schedule((Stage("read", "worker", (After("sleep"),)),), 1, 0)
    crossed = (Stage("a", "one", (After("b"),)), Stage("b", "one"))
    with pytest.raises(ConfigurationError, match=r"waits for itself: \[Task\(stage='a', batch=0, part=0\)"):
        play(Schedule(crossed, 1, 0), lambda task: 1.0, 1)
