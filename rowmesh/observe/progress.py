"""Progress of a run, or of work in several parts: live bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from rowmesh._support.files.printable import printable

PLAIN_INTERVAL_S = 5.0
BAR_INTERVAL_S = 0.1
_WIDE = 100  # columns of a terminal from which on there is room for a longer bar
_TIME_LEFT = len("10:00:00 left")
_GAPS = 5


class _Display:
    """Bars that are redrawn in place on a terminal; elsewhere lines.

    Args:
        console: where to.
        columns: of the bars.
        interval_s: seconds between lines where `console` is no terminal.
    """

    def __init__(self, console: Console, *columns: ProgressColumn, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._is_live = console.is_terminal and not console.quiet
        self._console = console
        self._bars = Bars(*columns, console=console) if self._is_live else None
        self._tasks: dict[str, Any] = {}
        self._interval_s = BAR_INTERVAL_S if self._is_live else interval_s
        self._shown_s = time.perf_counter()

    @property
    def _is_due(self) -> bool:
        """Whether something was shown long enough ago."""
        return time.perf_counter() - self._shown_s >= self._interval_s

    def _show(self, what: str, done: float, total: float | None, line: str, **fields: Any) -> None:
        """Moves the bar of one thing, or prints the line."""
        self._shown_s = time.perf_counter()
        if self._bars is None:
            self._console.print(printable(line), markup=False)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(escape(printable(what)), total=total, **fields)
        self._bars.update(self._tasks[what], completed=done, **fields)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


class PartsProgress(_Display):
    """Shows the share that is done of each of several things.

    Args:
        console: where to; standard output by default.
        interval_s: seconds between lines where `console` is no terminal.

    Example:
        >>> with PartsProgress() as show:
        ...     show("drawing", 0.5)
    """

    def __init__(self, console: Console | None = None, *, interval_s: float = PLAIN_INTERVAL_S) -> None:
        columns = (TextColumn("{task.description:>9}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        super().__init__(console or Console(), *columns, interval_s=interval_s)

    def __call__(self, what: str, share: float) -> None:
        """Says that a share of something is done, 0 to 1; shown now and then."""
        if self._is_due or (self._is_live and share >= 1.0):
            self._show(what, share, 1.0, f"{what}: {share:.0%}")


class Progress(_Display):
    """Shows step, loss, global samples/s, memory and time left.

    Args:
        total: steps of the run; None: nobody knows.
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
        total: int | None,
        *,
        title: str = "train",
        enabled: bool = True,
        stream: TextIO | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        self._total, self._title, self._facts = total, title, list[str]()
        console = Console(file=stream or sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True)
        super().__init__(console, *_columns(console.width), interval_s=interval_s)
        self._first: tuple[int, float] | None = None  # a step that was done, and when; a resumed run begins late
        if self._is_live:
            self._show_step(0)

    def advance(self, step: int) -> None:
        """Shows that `step` steps of the run are done, now and then: call it after every step."""
        self._begin(step)
        if self._is_due or (self._is_live and step == self._total):
            self._show_step(step)

    def update(
        self,
        step: int,
        *,
        loss: float,
        samples_per_s: float,
        memory_bytes: float,
        exposed_share: float | None = None,
        hit_rate: float | None = None,
    ) -> None:
        """Like `advance`, with new facts about the last interval, which are shown until the next."""
        self._facts = [f"loss {loss:.4f}", f"{samples_per_s:,.0f} samples/s", f"{memory_bytes / 1e9:.2f} GB"]
        if exposed_share is not None:
            self._facts.append(f"{exposed_share:.0%} exposed")
        if hit_rate is not None:
            self._facts.append(f"{hit_rate:.1%} of ids known")
        self._begin(step)
        if self._is_live or self._is_due or step == self._total:
            self._show_step(step)

    def write(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(printable(text), markup=False)

    def _begin(self, step: int) -> None:
        """Counts time from the first step that is done on: what comes before it, and it alone, says little."""
        self._first = self._first or (step, time.perf_counter())

    def _show_step(self, step: int) -> None:
        self._show(self._title, step, self._total, self._line(step), facts=self._fitting())

    def _fitting(self) -> str:
        """The first facts, as many as there is room for: step and time left stay whole."""
        others = len(self._title) + _bar_width(self._console.width) + 2 * len(str(self._total or 0)) + 1 + _TIME_LEFT
        room, text = self._console.width - others - _GAPS, ""
        for fact in self._facts:
            longer = f"{text}, {fact}" if text else fact
            if len(longer) > room:
                break
            text = longer
        return text

    def _line(self, step: int) -> str:
        of = "" if self._total is None else f"/{self._total}"
        return ", ".join([f"{self._title} step {step}{of}", *self._facts, *self._left(step)])

    def _left(self, step: int) -> list[str]:
        """The time left, at the speed since the first step; nothing where that is not known."""
        if self._total is None or self._first is None or step <= self._first[0]:
            return []
        first, began_s = self._first
        left_s = (time.perf_counter() - began_s) / (step - first) * (self._total - step)
        return [f"{left_s:.0f} s left"]


def _bar_width(width: int) -> int:
    return 24 if width >= _WIDE else 8


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=_bar_width(width)),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
