"""Progress of a run: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self, TextIO

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Shows step, loss, global samples/s, memory and time left.

    Args:
        total: steps of the run.
        title: what stands before the bar.
        enabled: False shows nothing (ranks other than 0).
        stream: where to; standard output by default.
        interval_s: seconds between plain lines where `stream` is no terminal.

    Example:
        >>> with Progress(100, enabled=False) as progress:
        ...     progress.update(10, loss=0.4, samples_per_s=1e5)
    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "train",
        enabled: bool = True,
        stream: TextIO | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        self._total, self._title, self._interval_s = total, title, interval_s
        self._console = Console(file=stream or sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True)
        self._live = enabled and self._console.is_terminal
        self._started_s = self._printed_s = time.perf_counter()
        if self._live:
            self._bar = _make_bar(self._console)
            self._task = self._bar.add_task(title, total=total, facts="")

    def update(self, step: int, *, loss: float, samples_per_s: float) -> None:
        """Shows the state after `step` steps of the run."""
        now_s = time.perf_counter()
        if self._live:
            self._bar.update(self._task, completed=step, facts=_facts(loss, samples_per_s))
        elif now_s - self._printed_s >= self._interval_s or step == self._total:
            self._printed_s = now_s
            left = f"{self._seconds_left(step, now_s):.0f} s left"
            position = f"{self._title} step {step}/{self._total}"
            self._console.print(f"{position}, {_facts(loss, samples_per_s)}, {left}", markup=False)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, markup=False)

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def _seconds_left(self, step: int, now_s: float) -> float:
        return (now_s - self._started_s) / step * (self._total - step)


def resident_bytes() -> int:
    """Memory that this process has in use, its share of shared memory included."""
    return psutil.Process(os.getpid()).memory_info().rss


def _make_bar(console: Console) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )


def _facts(loss: float, samples_per_s: float) -> str:
    memory_gb = resident_bytes() / 1e9
    return f"loss {loss:.4f}, {samples_per_s:,.0f} samples/s, {memory_gb:.2f} GB on rank 0"
