"""Where the time of a step goes: time spent in named functions, without what they call that has a name of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

OTHER = "other"


class PhaseClock:
    """Charges time to phases; the innermost one pays.

    Example:
        >>> clock = PhaseClock()
        >>> with clock.step():
        ...     clock.wrap("sort", sorted)([2, 1])
        [1, 2]
        >>> list(clock.medians_ms())
        ['sort', 'other']
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._current: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; what no phase claims is charged to "other"."""
        self._current, self._open, self._since = {}, [OTHER], time.perf_counter()
        yield
        self._charge()
        self._steps.append(self._current)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time charged to a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._open.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._open.pop()

        return timed

    @contextmanager
    def watching(self, points: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Wraps (owner, attribute, phase) while the context lasts."""
        with ExitStack() as stack:
            for owner, attribute, name in points:
                timed = self.wrap(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, timed))
            yield

    def medians_ms(self) -> dict[str, float]:
        """Median of each phase over the steps, in milliseconds."""
        names = dict.fromkeys(name for step in self._steps for name in step if name != OTHER)
        return {
            name: round(statistics.median(step.get(name, 0.0) for step in self._steps) * 1e3, 4)
            for name in (*names, OTHER)
        }

    def _charge(self) -> None:
        now = time.perf_counter()
        name = self._open[-1] if self._open else OTHER
        self._current[name] = self._current.get(name, 0.0) + now - self._since
        self._since = now
