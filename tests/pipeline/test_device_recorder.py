"""Device recorder: spans by a device's clock, which the host learns late and never waits for."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmesh.ops.streams import Mark, Stream
from rowmesh.pipeline import device_recorder
from rowmesh.pipeline.device_recorder import DeviceRecorder
from rowmesh.pipeline.playing import play
from rowmesh.pipeline.recorder import WAIT
from rowmesh.pipeline.schedule import COMPUTE, Task, make_schedule
from rowmesh.pipeline.streams import DeviceStreams
from tests.support.streams import drive_all

NUM_BATCHES = 6


class Moment(Mark):
    """Passes at a time of the device's clock. As with events, only differences can be read."""

    def __init__(self, device, seconds):
        super().__init__()
        self.device, self._seconds = device, seconds

    @property
    def has_passed(self):
        return self.device.looks() >= self._seconds

    def wait(self):
        assert self.device.may_wait, "the host waits"
        self.device.seconds = max(self.device.seconds, self._seconds)

    def seconds_until(self, later):
        """As CUDA: refused where one has not passed. That a time may be negative is not promised."""
        assert self._seconds <= later._seconds <= self.device.seconds, "the device is not there yet, or not any more"
        self.device.longest = max(self.device.longest, later._seconds - self._seconds)
        return later._seconds - self._seconds


class Lane(Stream):
    """A stream of a device: when it has done what it was asked for so far."""

    def __init__(self, device):
        super().__init__(None)
        self.device, self.until = device, 0.0

    def mark(self, *, has_time=False):
        self.until = max(self.until, self.device.seconds)
        return Moment(self.device, self.until)

    def wait_for(self, marks):
        self.until = max([self.until, *(mark._seconds for mark in marks)])

    def work(self, seconds):
        self.until = max(self.until, self.device.seconds) + seconds
        if self.device.is_quick:
            self.device.seconds = min(lane.until for lane in (*self.device.lanes, self.device.compute))


class Device:
    """Streams whose work takes as long as it is said to; stands in for the class `Stream`.

    Attributes:
        seconds: where it is.
        is_quick: whether it has done what it was asked for before any of its streams has nothing to do; else nothing.
        ahead_s: of the host's clock over its own.
        look_s: what it costs to look at it, the next times; a µs after that.
    """

    def __init__(self, seconds=0.0, ahead_s=0.0, is_quick=False, busy_s=0.0):
        self.seconds, self.ahead_s, self.is_quick = seconds, ahead_s, is_quick
        self.may_wait, self.longest, self.look_s = True, 0.0, []
        self.lanes, self.compute = [], Lane(self)
        self.compute.until = busy_s
        self.recorder = DeviceRecorder(lambda: self.compute)
        self.may_wait = False

    def new(self, device, *, is_urgent=False):
        self.lanes.append(Lane(self))
        return self.lanes[-1]

    def current(self, device):
        return self.compute

    def looks(self):
        if self.may_wait:
            self.seconds += self.look_s.pop() if self.look_s else 1e-6
        return self.seconds

    def host_clock(self):
        return self.seconds + self.ahead_s

    def spans(self):
        """Of all that was done, by task, in the order in which they were learnt."""
        self.may_wait = True
        spans = self.recorder.spans()
        self.may_wait = False
        return {span.task: span for span in spans}

    def note(self, resource, lane, seconds, number=0):
        """A task that takes so long, on a stream."""
        start = lane.mark(has_time=True)
        lane.work(seconds)
        self.recorder.note(Task(resource, number), resource, start, lane.mark(has_time=True))


@pytest.fixture
def clock(monkeypatch):
    """The host's clock, which shows what a device's does, and `ahead_s` more; tests name the device."""
    found = SimpleNamespace(device=None)
    timer = SimpleNamespace(perf_counter=lambda: found.device.host_clock())
    monkeypatch.setattr(device_recorder, "time", timer)
    return found


def seconds_of(task):
    """Different for all; the host reads at once."""
    if task.stage in ("read", "call", "step"):
        return 0.0
    base = {"route": 2.0, "open": 1.0, "final": 1.5, "rows": 1.0, "compute": 3.0, "gradients": 1.25, "dense": 0.5}
    return base.get(task.stage, 0.75) + task.batch / 64 + task.part / 8


class Drive:
    """Asks a device for all tasks of a schedule, at once, as the threads of a pipeline do."""

    def __init__(self, schedule, device):
        self.schedule, self.device = schedule, device
        self.streams = DeviceStreams(schedule, None, device.recorder, is_traced=True, streams=device)
        lanes = dict(zip(self.streams._streams, device.lanes, strict=True))
        act = lambda task: lanes[schedule.stage(task.stage).resource].work(seconds_of(task))  # noqa: E731
        drive_all(schedule, lambda task: self.streams.run(act, task), self.compute, NUM_BATCHES)

    def compute(self, runner, turn):
        for part in range(self.schedule.num_parts):
            task = Task("compute", turn, part)
            start = self.device.recorder.now()
            runner.wait(task)
            self.streams.begin(task)
            there = self.device.recorder.now()
            self.device.recorder.note(task._replace(stage=WAIT), COMPUTE, start, there)
            self.device.compute.work(seconds_of(task))
            self.streams.end(task)
            self.device.recorder.note(task, COMPUTE, there, self.device.recorder.now())
            runner.done(task)
        runner.done(Task("step", turn))
        start = self.device.recorder.now()
        self.device.compute.work(seconds_of(Task("dense", turn)))
        self.device.recorder.note(Task("dense", turn), COMPUTE, start, self.device.recorder.now())


@given(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), st.booleans())
def test_spans_are_those_of_the_schedule(shape, is_quick):
    """Whatever the device finishes first, and when it is seen: as if each resource did its tasks as soon as it can."""
    depth, parts, fetches_final = shape
    schedule = make_schedule(depth, parts, fetches_final=fetches_final and depth > 0, is_on_device=True)
    drive = Drive(schedule, Device(is_quick=is_quick))
    found = drive.device.spans()
    played = play(schedule, seconds_of, NUM_BATCHES + depth)  # batches are routed ahead, some not used
    expected = {
        span.task: span for span in played if span.task in found and span.task.stage not in ("read", "call", "step")
    }
    first = min(found[task].start_s - span.start_s for task, span in expected.items())
    for task, span in expected.items():
        if task.batch < NUM_BATCHES:
            mine = found[task]
            assert mine.resource == span.resource
            assert (mine.start_s - first, mine.end_s - first) == pytest.approx((span.start_s, span.end_s), abs=1e-5)
    assert {span.resource for span in found.values() if span.task.stage == "read"} == {"reader"}
    assert {"route", "rows", WAIT, "compute", "dense", "gradients", "update"} <= {task.stage for task in found}


def test_what_is_not_done_is_not_counted_and_not_waited_for():
    """In any order: a long task of one stream holds up none of another."""
    device = Device()
    recorder, other = device.recorder, device.new(None)
    device.note("long", device.compute, 10.0)
    for number in range(3):
        device.note("short", other, 1.0, number)
    assert recorder.take().stages == {}
    device.seconds = 2.5
    assert recorder.take().stages == pytest.approx({"short": 2.0})
    device.seconds = 9.5
    assert recorder.take().stages == pytest.approx({"short": 1.0})
    device.seconds = 10.0
    assert recorder.take().stages == pytest.approx({"long": 10.0})
    assert recorder.take().stages == {}
    assert len(device.spans()) == 4


def test_the_exposed_share_is_that_of_what_is_done():
    device = Device()
    for number, (waits_s, computes_s) in enumerate([(2.0, 3.0), (1.0, 4.0), (0.0, 10.0)]):
        device.note(WAIT, device.compute, waits_s, number)
        device.note("compute", device.compute, computes_s, number)
    device.seconds = 10.0
    assert device.recorder.take().exposed_share == pytest.approx(3 / 10)
    device.seconds = 100.0
    assert device.recorder.take().exposed_share == 0.0


def test_settling_waits_for_all_and_then_no_more():
    device = Device()
    device.note("rows", device.compute, 5.0)
    device.may_wait = True
    device.recorder.flush()
    assert device.recorder.take().stages == pytest.approx({"rows": 5.0})
    before = device.seconds
    device.recorder.flush()
    assert device.seconds == before, "an idle device is not asked again"


def test_memory_is_bounded(monkeypatch):
    """The oldest are dropped: of what the device does not come to, and of what is not read."""
    monkeypatch.setattr(device_recorder, "KEPT", 8)
    device = Device()
    for number in range(30):
        device.note("rows", device.compute, 1.0, number)
    assert [noted.task.batch for noted in device.recorder._under_way["rows"]] == list(range(22, 30))
    device.seconds = 40.0
    for number in range(30, 33):
        device.note("rows", device.compute, 1.0, number)
    assert device.recorder.take().stages == pytest.approx({"rows": 8.0}), "all that were done in time"
    assert [task.batch for task in device.spans()] == list(range(25, 33))


@pytest.mark.parametrize("ahead_s", [0.0, 1000.0, -7.0])
def test_spans_are_in_the_hosts_clock(clock, ahead_s):
    """Within what the shortest try took, although others took long."""
    clock.device = device = Device(seconds=5.0, ahead_s=ahead_s)
    device.note("rows", device.compute, 2.0)
    device.look_s = [4e-3, 3e-3, 2e-6, 5e-3, 1.0, 1e-6, 1e-6]  # the last ones first: at both marks of the task
    span = device.spans()[Task("rows", 0)]
    assert (span.start_s, span.end_s) == pytest.approx((5.0 + ahead_s, 7.0 + ahead_s), abs=2e-6)


def test_clocks_that_part_are_compared_where_spans_are_read(clock):
    clock.device = device = Device()
    device.note("rows", device.compute, 1.0, 0)
    first = device.spans()[Task("rows", 0)]
    device.seconds, device.ahead_s = 4000.0, 0.5  # half a second in an hour
    device.note("rows", device.compute, 1.0, 1)
    found = device.spans()
    assert found[Task("rows", 0)] == first, "what was read before stays"
    assert found[Task("rows", 1)].start_s == pytest.approx(4000.5, abs=1e-5)


def test_marks_are_timed_from_one_that_passed_not_long_ago():
    """Else a device's seconds, which have 24 bits, would be coarse after an hour."""
    device = Device()
    for number in range(200):
        device.note("rows", device.compute, 0.3, number)
        device.seconds += 0.3
    assert 1.0 < device.longest < 3.0
    device.longest = 0.0
    found = device.spans()
    assert device.longest < 3.0
    assert found[Task("rows", 199)].end_s - found[Task("rows", 0)].start_s == pytest.approx(60.0)


def test_marks_are_timed_from_one_that_was_before_them():
    """Whatever other threads learn between the second mark of a task and its being noted, and from the first on."""
    device = Device(busy_s=3.0)
    lane = device.new(None)
    for number in range(40):
        start, end = lane.mark(has_time=True), lane.mark(has_time=True)
        for task in range(3 * number, 3 * number + 3):
            device.note("rows", device.compute, 0.3, task)
            device.seconds += 0.3
        device.recorder.note(Task("route", number), "router", start, end)
    assert len(device.spans()) == 160
