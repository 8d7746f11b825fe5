"""Compiling: which ranks of a run compile kernels, which takes long and always ends."""

from __future__ import annotations

from typing import Any

from numba.core.event import Event, Listener, register, unregister

from rowmesh.mesh.liveness import LivenessCheck

_KIND = "numba:compiler_lock"  # held from looking for a kernel on disk until it is loaded, or compiled and written


class CompilingRanks(Listener):
    """Tells other ranks, between `begin` and `end`, when a thread of this one compiles.

    Args:
        rank: this one.
        world_size: of the run.
        group: of the run; None where there is one rank.

    Example:
        >>> compiling = CompilingRanks()
        >>> compiling.begin()
        >>> compiling.is_here, compiling.is_anywhere
        (False, False)
        >>> compiling.end()
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self._world_size, self._is_begun = world_size, False
        self._check = LivenessCheck(rank, range(world_size), group, "compiling")

    def begin(self) -> None:
        """Begins to tell."""
        self._is_begun = True
        register(_KIND, self)

    def end(self) -> None:
        """Ends it. May be called again."""
        if self._is_begun:
            self._is_begun = False
            unregister(_KIND, self)
            while self._check.is_here:
                self._check.withdraw()

    @property
    def is_here(self) -> bool:
        """Whether a thread of this rank compiles."""
        return self._check.is_here

    @property
    def is_anywhere(self) -> bool:
        """Whether a thread of any rank does; where several ranks are asked, it takes a message to the store."""
        return self.is_here or len(self._check.absent() or range(self._world_size)) < self._world_size

    def on_start(self, event: Event) -> None:
        """A thread is about to compile; overrides numba's."""
        self._check.answer()

    def on_end(self, event: Event) -> None:
        """It has; overrides numba's."""
        self._check.withdraw()
