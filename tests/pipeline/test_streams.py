"""Streams: what is done on a device comes after all that it needs, and memory is reused after all its users."""

import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.streams import Mark, Stream
from rowmesh.pipeline.recorder import Recorder
from rowmesh.pipeline.schedule import COMPUTE, REUSED_AFTER, Task, make_schedule
from rowmesh.pipeline.streams import DeviceStreams, HostStreams
from tests.support.streams import drive_all

CPU = torch.device("cpu")
NUM_BATCHES = 8


class Past(Mark):
    """What came before a point of a stream."""

    def __init__(self, tasks):
        super().__init__()
        self.tasks = frozenset(tasks)


class Clock(Stream):
    """A stream that knows what has come before what it is asked next; stands in for the class, too."""

    compute: "Clock"

    def __init__(self):
        super().__init__(None)
        self.past = set()

    @classmethod
    def new(cls, device, *, is_urgent=False):
        return cls()

    @classmethod
    def current(cls, device):
        return cls.compute

    def mark(self, *, has_time=False):
        return Past(self.past)

    def wait_for(self, marks):
        for mark in marks:
            self.past |= mark.tasks


class Kept:
    """What belongs to a batch."""


class Drive:
    """Drives a schedule through streams, in one thread, and notes what had come before every task."""

    def __init__(self, schedule):
        Clock.compute = Clock()
        self.schedule, self.past, self.dropped, self.kept = schedule, {}, {}, {}
        self.streams = DeviceStreams(schedule, CPU, Recorder(), streams=Clock)
        self.by_resource = {**self.streams._streams, COMPUTE: Clock.compute}
        drive_all(schedule, lambda task: self.streams.run(self.act, task), self.compute, NUM_BATCHES)

    def compute(self, runner, turn):
        for part in range(self.schedule.num_parts):
            task = Task("compute", turn, part)
            runner.wait(task)
            self.streams.begin(task)
            self.note(task)
            self.streams.end(task)
            runner.done(task)
        runner.done(Task("step", turn))

    def act(self, task):
        self.note(task)
        if task.stage == "update":
            thing = Kept()
            self.kept[task.batch] = weakref.ref(thing, lambda _: self.note_drop(task.batch))
            self.streams.keep(task.batch, thing)
            item = Kept()
            self.kept[-1 - task.batch] = weakref.ref(item, lambda _: self.note_drop(-1 - task.batch))
            self.streams.keep(task.batch + 1, item)

    def note(self, task):
        stream = self.by_resource[self.schedule.stage(task.stage).resource]
        self.past[task] = frozenset(stream.past)
        stream.past.add(task)

    def note_drop(self, batch):
        self.dropped[batch] = {name: frozenset(stream.past) for name, stream in self.by_resource.items()}


shapes = st.tuples(st.integers(0, 4), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())


def drive(shape):
    depth, num_parts, fetches_final, copies, joins = shape
    return Drive(
        make_schedule(
            depth, num_parts, fetches_final=fetches_final and depth > 0, is_on_device=True, copies=copies, joins=joins
        )
    )


@given(shapes)
def test_tasks_come_after_what_they_need(shape):
    found = drive(shape)
    parts = range(shape[1])
    for batch in range(NUM_BATCHES):
        before = {Task("update", batch - 1)} if batch else set()
        for part in parts:
            rows, computed = found.past[Task("rows", batch, part)], found.past[Task("compute", batch, part)]
            assert before | {Task("open", batch), Task("route", batch)} <= rows
            arrived = {Task("rows", batch, each) for each in range(part + 1)}
            assert before | arrived | {Task("open", batch), Task("route", batch)} <= computed
            assert Task("compute", batch, part) in found.past[Task("gradients", batch, part)]
        sent = {Task("gradients", batch, part) for part in parts} | {Task("compute", batch, part) for part in parts}
        assert before | sent <= found.past[Task("update", batch)]
        if final := found.past.get(Task("final", batch)):
            asked = {Task("open", batch), *([Task("open", batch - 1)] if batch else [])}
            assert asked | ({Task("update", batch - 2)} if batch > 1 else set()) <= final
            assert Task("final", batch) in found.past[Task("compute", batch, 0)]


@settings(max_examples=8)  # each collects garbage
@given(shapes)
def test_memory_is_used_again_when_every_stream_that_has_any_is_past_the_batch(shape):
    """All that computed and sent a batch, on all streams that allocated for it; and no later than can be."""
    found = drive(shape)
    depth, num_parts, *_ = shape
    gc.collect()
    last = NUM_BATCHES - 1 + depth  # the batch that was routed last
    windows = range(last - depth - REUSED_AFTER + 1)
    assert set(found.dropped) == {*windows, *(-1 - batch for batch in windows[:-1])}
    for number, past in found.dropped.items():
        batch = number if number >= 0 else -number  # the program uses items until it computes the next one
        used = {Task("compute", batch, part) for part in range(num_parts)} | {Task("update", batch)}
        for resource, tasks in past.items():
            assert used <= tasks, f"{resource} goes on"


@given(shapes)
def test_marks_are_forgotten(shape):
    found = drive(shape)
    assert len(found.streams._marks) <= (2 * shape[0] + REUSED_AFTER + 1) * (6 + 3 * shape[1])
    found.streams.forget()
    assert not found.streams._marks
    assert all(reference() is None for reference in found.kept.values())


def test_streams_meet():
    found = drive((2, 2, True, True, False))
    everything = set().union(*(stream.past for stream in found.by_resource.values()))
    found.streams.meet()
    assert all(stream.past == everything for stream in found.by_resource.values())


@pytest.mark.parametrize("depth, opened", [(0, 0), (1, 1), (4, 2)])
def test_messages_have_one_order(depth, opened):
    """One resource has all of them."""
    schedule = make_schedule(depth, 2, is_on_device=True)
    talks = {"open", "final", "rows", "gradients", "norm", "update"} & {stage.name for stage in schedule.stages}
    assert {schedule.stage(name).resource for name in talks} == {"communication"}
    tasks = [(task.stage, task.batch) for task in schedule.tasks("communication", 5)]
    ends = [("gradients", 5), ("gradients", 5), ("norm", 5), ("update", 5)]
    final = [("final", 6)] if depth else []
    opening = [("open", 5 + opened)]
    rows = [("rows", 5), ("rows", 5)]
    assert tasks == [*(rows + opening + final if depth else opening + rows), *ends]


def test_a_host_has_done_what_was_asked():
    recorder, done = Recorder(), []
    streams = HostStreams(make_schedule(0, 1), recorder)
    streams.run(done.append, Task("route", 3))
    assert done == [Task("route", 3)]
    ((task, resource, start_s, end_s, cpu_s),) = recorder.spans()
    assert (task, resource) == (Task("route", 3), "router")
    assert cpu_s >= 0
    assert start_s < end_s
