"""Pending: routes whose backward has run and that no push has taken yet, and which threads drive them.

A look-up, its backward and its step may be in different threads, one after the other. Where two threads train at once,
the step of one would take the gradients of the other, or change rows that the other has read and not stepped. This is
an error, since the model would silently differ from that of the plain loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

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
        self._routes: list[Route] = []
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

    def add(self, route: Route) -> None:
        """Takes a route whose gradients are summed."""
        with self._lock:
            if self._is_refused:  # a step was left out, and these gradients with it
                self._routes.clear()
                self._is_refused = False
            self._routes.append(route)
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
            self._routes = [each for each in self._routes if each.pin is None or not each.pin.is_taken_back]

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            self._routes.clear()
            self._is_refused = False

    def take(self, routes: Sequence[Route] | None, number: int) -> list[Route]:
        """Removes what this thread is about to push; in the order of the look-ups, since backward may run in any.

        Args:
            routes: them; None for all.
            number: of the push, from 1.

        Raises:
            RowmeshError: one has no gradients, or was pushed before; or several threads train.
        """
        with self._lock:
            taken, left = (self._routes, []) if routes is None else ([*routes], self._others(routes))
            for route in taken:
                if route.thread != taken[0].thread:
                    raise _two_train(taken[0].thread, route.thread)
                of_others = self._last_of_others if route.thread == self._pusher else self._last
                if of_others > route.num_pushes:
                    raise _stepped_between(self._pusher, route.thread)
            self._routes = left
            if (me := threading.get_ident()) != self._pusher:
                self._pusher, self._last_of_others = me, self._last
            self._last = number
        if len(taken) > 1:
            taken.sort(key=lambda route: route.number)
        return taken

    def _others(self, routes: Sequence[Route]) -> list[Route]:
        """What waits beside some routes, which must wait too."""
        pushed, waiting = {id(route) for route in routes}, {id(route) for route in self._routes}
        if len(pushed & waiting) != len(routes):
            raise RowmeshError("a route can be pushed once, after its backward; one here was pushed before or has none")
        return [route for route in self._routes if id(route) not in pushed]


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
