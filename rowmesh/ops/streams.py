"""Streams: copies between a device and the host beside the computation. On a CPU everything is done when it is asked.

[Note: copies beside the computation]
Rows of tiered tables travel on two streams of their own, inward and outward, so that copies into a GPU's memory are not
held up behind those out of it. Kernels run on the stream that is current, the user's. The host runs ahead of all three:
it counts a cache slot as free when the last kernel that uses it is launched, not when it has run. These things
could go wrong; each has its remedy:

1. A kernel reads a cache slot before the row is there. `PinnedRows.ready` is called before rows are used. It lets the
   current stream wait for all that was asked of the inward stream when they were pinned: not for later batches' copies.
2. A row is copied into a cache slot that kernels of an earlier batch still read or update. Unpinning leaves a mark in
   the stream that used the rows, and copies wait for the marks of the cache slots they need (`Uses`). The rows that
   leave were used longest ago, so that copies for the next batch run while this one is computed.
3. A row is copied out before the kernel that updates it has run. The same marks.
4. A row that is on its way out is found in its cache slot by a later batch, which updates it meanwhile: half of the
   record would be old. `PinnedRows.ready` waits for the outward stream, too.
5. A row is copied out of a cache slot before it came in (`read_rows` of a batch that is only looked ahead). Outward
   copies wait for what was asked of the inward stream before.
6. The store returns what an update has replaced. A cache slot is reused only when the store has its row, and the host
   writes that only after it has waited for the copy. A row that is needed before is found in its cache slot.
7. The host fills, or reads, a staging buffer that is still being copied. Buffers are bounded in number, each has the
   mark of its last copy, and the host waits for it before it touches the buffer again: where more rows come than fit,
   this is where the host waits for the device.
8. The cache's memory had another use before, or is freed. It is allocated on the stream that is current then, whose
   earlier kernels may still use it: the mark of that moment counts as a use of every cache slot. Before it is freed the
   host waits for both streams (`CacheMemory.wait`); torch's allocator knows of no use on them.
9. Memory on the device that a copy needs for a moment is allocated and freed while its stream is current, so that the
   allocator gives it to that stream alone, in whose order it is free. Nothing of it is used on another stream, so no
   `record_stream` is needed. Numbers of cache slots go to the device on the kernels' own stream.
10. A copy from memory that is not pinned makes the host wait, and one into it may not be done when its event says so.
    All that is copied without waiting is pinned.
11. The thread that writes back has a current device of its own, the first. A stream is always entered with its device.

Marks wait for what was asked before they were made, of streams whose work waits for such marks alone: they cannot wait
for each other in a circle. `tests/tables/test_cached_late.py` runs streams that are late at random, with these rules
and with rules left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


class Mark:
    """The work that a stream was given before this mark was made.

    Args:
        event: recorded there; None where everything is done at once.
        time_s: when that was, by the host's clock, where everything is done at once.
    """

    def __init__(self, event: torch.cuda.Event | None = None, time_s: float = 0.0) -> None:
        self.event, self.time_s = event, time_s

    @property
    def has_passed(self) -> bool:
        """Whether it is done."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """The host waits until it is done."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        """Between two marks with a time that have passed: by the device's clock, in 24 bits, or by the host's where
        everything is done at once.
        """
        if self.event is None or later.event is None:
            return later.time_s - self.time_s
        return self.event.elapsed_time(later.event) / 1e3


class Stream:
    """Work that a device does in order.

    Args:
        stream: None on a CPU.

    Example:
        >>> stream = Stream.new(torch.device("cpu"))
        >>> stream.run(lambda: print("copied"))
        copied
        >>> stream.mark().has_passed
        True
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @classmethod
    def new(cls, device: torch.device, *, is_urgent: bool = False) -> Stream:
        """A new stream, beside the others of a device.

        Args:
            device: that does the work.
            is_urgent: whether, of two kernels that could begin, its own goes first.
        """
        return cls(torch.cuda.Stream(device, priority=-int(is_urgent)) if device.type == "cuda" else None)

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """The stream on which this thread launches kernels."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def mark(self, *, has_time: bool = False) -> Mark:
        """A mark behind the work so far; `has_time`: whether the mark says when that work was done."""
        if self._stream is None:
            return Mark(time_s=time.perf_counter())
        # The host sleeps while it waits: the thread that writes back often does.
        event = torch.cuda.Event(enable_timing=has_time, blocking=True)
        event.record(self._stream)
        return Mark(event)

    def wait_for(self, marks: Iterable[Mark]) -> None:
        """Later work of this stream begins when marks have passed; the host goes on."""
        for mark in marks:
            if self._stream is not None and mark.event is not None:
                self._stream.wait_event(mark.event)

    def run(self, work: Callable[[], T]) -> T:
        """Asks for what a function launches, and returns what it does; the host goes on."""
        if self._stream is None:
            return work()
        with torch.cuda.stream(self._stream):  # and its device
            return work()

    def uses(self, tensor: torch.Tensor) -> None:
        """Has torch's allocator keep memory of another stream until this one has done what it is asked before the
        tensor is dropped.
        """
        if self._stream is not None:
            tensor.record_stream(self._stream)
