"""Compiling: which ranks of a run compile kernels, which takes long and ends."""

from __future__ import annotations

import threading
from typing import Any

from numba.core.event import Event, Listener, register, unregister

from rowmesh.mesh.liveness import LivenessCheck
from rowmesh.mesh.processes import RankProcesses

_KIND = "numba:compiler_lock"  # held from looking for a kernel on disk until it is loaded, or compiled and written


class CompilingRanks(Listener):
    """Tells other ranks, between `begin` and `end`, when a thread of this one compiles.

    Args:
        rank: this one.
        world_size: of the run.
        group: of the run; None where there is one rank.
        processes: of all ranks: a rank whose process is gone or stopped finishes no kernel.

    Example:
        >>> compiling = CompilingRanks()
        >>> compiling.begin()
        >>> compiling.is_here, compiling.is_anywhere
        (False, False)
        >>> compiling.end()
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        processes: RankProcesses | None = None,
    ) -> None:
        self._ranks, self._processes, self._is_begun = range(world_size), processes, False
        self._check = LivenessCheck(rank, self._ranks, group, "compiling")
        self._num_told = 0  # threads that compile, as others were told
        self._telling = threading.Lock()

    def begin(self) -> None:
        """Starts telling."""
        self._is_begun = True
        register(_KIND, self)

    def end(self) -> None:
        """Stops telling. May be called again."""
        if self._is_begun:
            self._is_begun = False
            unregister(_KIND, self)
            with self._telling:
                while self._num_told:
                    self._withdraw()

    @property
    def is_here(self) -> bool:
        """Whether a thread of this rank compiles."""
        return self._check.is_here

    @property
    def is_anywhere(self) -> bool:
        """Whether a thread of any rank compiles; asks the store for each rank where there are several."""
        if self.is_here:
            return True
        absent = self._check.absent()
        found = set() if absent is None else set(self._ranks).difference(absent)
        if found and self._processes is not None:
            found.difference_update(self._processes.seen("gone"), self._processes.seen("stopped"))
        return bool(found)

    def on_start(self, event: Event) -> None:
        """A thread is about to compile; overrides numba's."""
        with self._telling:
            self._num_told += 1
            self._check.answer()

    def on_end(self, event: Event) -> None:
        """A thread has compiled; overrides numba's."""
        with self._telling:
            if self._num_told:  # else it began before `begin`
                self._withdraw()

    def _withdraw(self) -> None:
        self._num_told -= 1
        self._check.withdraw()
