"""Streams call torch as it wants to be called; what it then does only a GPU can show."""

from unittest import mock

import pytest
import torch

from rowmesh.ops.streams import Mark, Stream

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """Torch's classes with their methods and arguments, and nothing behind them."""
    calls = mock.Mock()
    for name in ("Stream", "Event"):
        made = mock.create_autospec(getattr(torch.cuda, name), instance=True)
        make = mock.create_autospec(getattr(torch.cuda, name).__new__, return_value=made)
        monkeypatch.setattr(torch.cuda, name, lambda *args, make=make, **options: make(None, *args, **options))
        calls.attach_mock(made, name)
    current = mock.create_autospec(torch.cuda.current_stream, return_value=calls.Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    enter = mock.create_autospec(torch.cuda.stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    calls.attach_mock(enter, "enter")
    return calls


@pytest.mark.parametrize("make", [Stream.new, Stream.current])
def test_work_and_marks(cuda, make):
    stream, work = make(CUDA), mock.Mock()
    cuda.attach_mock(work, "work")
    mark = stream.mark()
    cuda.Event.record.assert_called_once_with(cuda.Stream)
    stream.wait_for([mark, Mark()])
    cuda.Stream.wait_event.assert_called_once_with(cuda.Event)
    stream.run(work)
    names = [call[0] for call in cuda.mock_calls]
    assert (
        names.index("enter") < names.index("enter().__enter__") < names.index("work") < names.index("enter().__exit__")
    )
    cuda.enter.assert_called_once_with(cuda.Stream)


def test_marks_are_asked_and_waited_for(cuda):
    mark = Stream.new(CUDA).mark()
    cuda.Event.query.return_value = False
    assert not mark.has_passed
    mark.wait()
    cuda.Event.synchronize.assert_called_once_with()


def test_everything_is_done_at_once_on_a_cpu():
    done, stream = [], Stream.new(torch.device("cpu"))
    stream.run(lambda: done.append(1))
    assert done
    stream.wait_for([stream.mark()])
    assert stream.mark().has_passed
    stream.mark().wait()


def test_times_and_urgent_streams(cuda):
    before, after = (Stream.new(CUDA, is_urgent=True).mark(has_time=True) for _ in range(2))
    cuda.Event.elapsed_time.return_value = 1500.0
    assert before.seconds_until(after) == 1.5
    cuda.Event.elapsed_time.assert_called_once_with(cuda.Event)
    at_once = Stream.new(torch.device("cpu")).mark(has_time=True)
    assert at_once.seconds_until(at_once) == 0.0
