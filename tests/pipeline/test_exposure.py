"""Exposure: waits are shares of the time of the micro-batches that are done."""

import pytest
import torch

from rowmesh.pipeline.exposure import Exposure
from rowmesh.tables.streams import Mark, Stream


class Moment(Mark):
    """A mark with a time that is known."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.is_done = seconds, True

    @property
    def has_passed(self):
        return self.is_done

    def seconds_until(self, later):
        assert self.is_done
        assert later.is_done
        return later.seconds - self.seconds


def test_shares():
    moments = [Moment(seconds) for seconds in (0, 2, 5, 5, 6, 10, 10, 10, 20)]
    exposure = Exposure(iter(moments).__next__)
    for _ in range(2):
        exposure.begin(lambda: None)
        exposure.end()
    assert exposure.take_share() == pytest.approx((2 + 1) / (5 + 5))
    exposure.begin(lambda: None)
    exposure.end()
    moments[-1].is_done = False
    assert exposure.take_share() == 0.0
    moments[-1].is_done = True
    assert exposure.take_share() == 0.0
    assert exposure.take_share() == 0.0


def test_waits_between_the_marks():
    asked = []
    exposure = Exposure(lambda: asked.append("mark") or Moment(0))
    exposure.begin(lambda: asked.append("wait"))
    exposure.end()
    assert asked == ["mark", "wait", "mark", "mark"]


def test_where_all_is_done_at_once_nothing_is_exposed():
    exposure = Exposure(lambda: Stream.current(torch.device("cpu")).mark(has_time=True))
    exposure.begin(lambda: None)
    exposure.end()
    assert exposure.take_share() == 0.0
