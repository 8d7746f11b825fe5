"""Pending: routes whose backward has run and that no push has taken yet, and which threads drive them.

A look-up, its backward and its step may be in different threads, one after the other. Where two threads train at once,
the step of one would take the gradients of the other, or change rows that the other has read and not stepped. This is
an error, since the model would silently differ from that of the plain loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rowmesh._support.interrupts import hold, release
from rowmesh.errors import RowmeshError
from rowmesh.exchange.route import Route


class Pending:
    """Gradients that wait for a push.

    Attributes:
        num_added: how many look-ups had their backward so far.
    """

    def __init__(self) -> None:
        self.num_added = 0
        self._lock = threading.Lock()
        self._routes: dict[Route, tuple[int, int]] = {}  # which thread pooled each for training, after how many pushes
        self._is_refused = False
        self._pusher = 0  # the thread that pushed last
        self._last = self._last_of_others = 0  # the numbers of its last push, and of the last one of another thread

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def routes(self) -> list[Route]:
        """All of them now."""
        with self._lock:
            return [*self._routes]

    def add(self, route: Route, thread: int, num_pushes: int) -> None:
        """Takes a route whose gradients are summed.

        Args:
            route: of a look-up.
            thread, num_pushes: which thread pooled it, and after how many pushes.
        """
        with self._lock:
            if self._is_refused:  # a step was left out, and these gradients with it
                self._routes.clear()
                self._is_refused = False
            self._routes[route] = thread, num_pushes
            self.num_added += 1

    def count(self) -> None:
        """Counts a look-up whose gradients a pipeline takes."""
        with self._lock:
            self.num_added += 1

    def refuse(self) -> None:
        """Forgets all routes when the next one comes: their gradients are not finite, and no step takes them."""
        with self._lock:
            self._is_refused = True

    def drop_refused(self) -> None:
        """Forgets what was refused, though no backward has come since."""
        with self._lock:
            if self._is_refused:
                self._routes.clear()
            self._is_refused = False

    def drop_taken_back(self) -> None:
        """Forgets those of batches that another rank refused: their frames may be those of other ids now."""
        with self._lock:
            for route in [each for each in self._routes if any(pin.is_taken_back for pin in each.pins)]:
                del self._routes[route]

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            routes, self._routes, self._is_refused = self._routes, {}, False
        if routes:
            hold()  # Python drops what is raised as routes give their memory back, and they would not have done so
            try:
                routes.clear()
            finally:
                release()

    def choose(self, routes: Sequence[Route] | None) -> list[Route]:
        """The routes that this thread is about to push, in the order of the look-ups, since backward may run in any.

        They wait until `remove`: the push may be refused, and tried again.

        Args:
            routes: them; None for all.

        Raises:
            RowmeshError: one has no gradients, or was pushed before; or several threads train.
        """
        with self._lock:
            chosen = [*(self._routes if routes is None else routes)]
            if routes is not None:
                self._check_waiting(routes)
            for route in chosen:
                (first, _), (thread, num_pushes) = self._routes[chosen[0]], self._routes[route]
                if thread != first:
                    raise _two_train(first, thread)
                of_others = self._last_of_others if thread == self._pusher else self._last
                if of_others > num_pushes:
                    raise _stepped_between(self._pusher, thread)
        if len(chosen) > 1:
            chosen.sort(key=lambda route: route.number)
        return chosen

    def remove(self, chosen: Sequence[Route], number: int) -> None:
        """Removes what this thread has pushed.

        Args:
            chosen: by `choose`.
            number: of the push, from 1.
        """
        with self._lock:
            for route in chosen:
                self._routes.pop(route, None)
            if (me := threading.get_ident()) != self._pusher:
                self._pusher, self._last_of_others = me, self._last
            self._last = number

    def _check_waiting(self, routes: Sequence[Route]) -> None:
        if len(self._routes.keys() & routes) != len(routes):
            raise RowmeshError("a route can be pushed once, after its backward; one here was pushed before or has none")


def _two_train(first: int, second: int) -> RowmeshError:
    return RowmeshError(
        f"{_named([first, second])} trained at the same time: this step would take the gradients of both; let one "
        "thread look up, run backward and step (others may look up under torch.no_grad()), and call zero_grad() to "
        "drop these"
    )


def _stepped_between(pusher: int, thread: int) -> RowmeshError:
    return RowmeshError(
        f"{_named([pusher])} stepped between a look-up of {_named([thread])} and its step, whose gradients are of rows "
        "as they were before; let one thread look up, run backward and step (others may look up under "
        "torch.no_grad()), and call zero_grad() to drop these gradients"
    )


def _named(threads: Sequence[int]) -> str:
    """Threads by name, as far as they still run."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    known = [repr(names.get(ident, "one that has ended")) for ident in threads]
    return f"thread{'s' * (len(known) > 1)} {' and '.join(known)}"
