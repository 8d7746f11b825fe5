"""Progress of a run: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_INTERVAL_S = 5.0
BAR_INTERVAL_S = 0.1


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
        ...     progress.advance(9)
        ...     progress.update(10, loss=0.4, samples_per_s=1e5, memory_bytes=3e9)
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
        self._total, self._title, self._facts = total, title, ""
        self._console = Console(file=stream or sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True)
        self._live = enabled and self._console.is_terminal
        self._interval_s = BAR_INTERVAL_S if self._live else interval_s
        self._started_s = self._shown_s = time.perf_counter()
        if self._live:
            self._bar = _make_bar(self._console)
            self._task = self._bar.add_task(title, total=total, facts="")

    def advance(self, step: int) -> None:
        """Shows that `step` steps of the run are done, now and then: call it after every step."""
        now_s = time.perf_counter()
        if now_s - self._shown_s >= self._interval_s or (self._live and step == self._total):
            self._show(step, now_s)

    def update(self, step: int, *, loss: float, samples_per_s: float, memory_bytes: float) -> None:
        """Like `advance`, with new facts about the last interval, which are shown until the next."""
        self._facts = f"loss {loss:.4f}, {samples_per_s:,.0f} samples/s, {memory_bytes / 1e9:.2f} GB"
        now_s = time.perf_counter()
        if self._live or now_s - self._shown_s >= self._interval_s or step == self._total:
            self._show(step, now_s)

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

    def _show(self, step: int, now_s: float) -> None:
        self._shown_s = now_s
        if self._live:
            self._bar.update(self._task, completed=step, facts=self._facts)
            return
        left_s = (now_s - self._started_s) / step * (self._total - step)
        parts = [f"{self._title} step {step}/{self._total}", self._facts, f"{left_s:.0f} s left"]
        self._console.print(", ".join(part for part in parts if part), markup=False)


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
