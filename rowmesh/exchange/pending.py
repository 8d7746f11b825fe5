"""Pending: routes whose backward has run and that no push has taken yet, and which threads drive them.

A look-up, its backward and its step may be in different threads, one after the other. Where two threads train at once,
the step of one would take the gradients of the other, or change rows that the other has read and not stepped: it is
refused, for nothing would tell that such a model is not that of the plain loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rowmesh.errors import RowmeshError
from rowmesh.exchange.route import Route


class Pending:
    """Gradients that wait for a push."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: list[Route] = []
        self._is_refused = False
        self.num_added = 0
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
        """Forgets them when the next one comes: they are not finite, and no step takes them."""
        with self._lock:
            self._is_refused = True

    def drop_refused(self) -> None:
        """Forgets what was refused, though no backward has come since."""
        with self._lock:
            if self._is_refused:
                self._routes.clear()
            self._is_refused = False

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            self._routes.clear()
            self._is_refused = False

    def take(self, routes: Sequence[Route] | None = None) -> list[Route]:
        """Removes what is about to be pushed, by default all; in the order of the look-ups, since backward may run in
        any.

        Raises:
            RowmeshError: one has no gradients, or was pushed before; or several threads train.
        """
        with self._lock:
            if routes is None:
                self._check_threads(self._routes)
                taken, self._routes = self._routes, []
            else:
                taken = self._take_some(routes)
        if len(taken) > 1:
            taken.sort(key=lambda route: route.number)
        return taken

    def _take_some(self, routes: Sequence[Route]) -> list[Route]:
        pushed, waiting = {id(route) for route in routes}, {id(route) for route in self._routes}
        if len(pushed & waiting) != len(routes):
            raise RowmeshError("a route can be pushed once, after its backward; one here was pushed before or has none")
        self._check_threads(routes)
        self._routes = [route for route in self._routes if id(route) not in pushed]
        return [*routes]

    def note_push(self, number: int) -> None:
        """Takes the number of a push that this thread makes now."""
        if (me := threading.get_ident()) != self._pusher:
            self._pusher, self._last_of_others = me, self._last
        self._last = number

    def _check_threads(self, routes: Sequence[Route]) -> None:
        for route in routes:
            if route.thread != routes[0].thread:
                raise RowmeshError(
                    f"{_named([routes[0].thread, route.thread])} trained at the same time: this step would take the "
                    "gradients of both; let one thread look up, run backward and step (others may look up under "
                    "torch.no_grad()), and call zero_grad() to drop these"
                )
            of_others = self._last_of_others if route.thread == self._pusher else self._last
            if of_others > route.num_pushes:
                raise RowmeshError(
                    f"{_named([self._pusher])} stepped between a look-up of {_named([route.thread])} and its step, "
                    "whose gradients are of rows as they were before; let one thread look up, run backward and step "
                    "(others may look up under torch.no_grad()), and call zero_grad() to drop these gradients"
                )


def _named(threads: Sequence[int]) -> str:
    """Threads by name, as far as they still run."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    known = [repr(names.get(ident, "one that has ended")) for ident in threads]
    return f"thread{'s' * (len(known) > 1)} {' and '.join(known)}"
