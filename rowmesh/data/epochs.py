"""EpochLoader: the batches of one rank, epoch after epoch, and the position in them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from rowmesh.data.prefetch import prefetch as run_ahead
from rowmesh.errors import ConfigurationError

B = TypeVar("B")


def check_parts(batch_size: int, rank: int, world_size: int) -> None:
    """Refuses batches that cannot be cut into parts.

    Raises:
        ConfigurationError: there are no samples in them, or there is no such rank.
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be 1 or more, got {batch_size}")
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is not below world size {world_size}")


class EpochLoader(ABC, Generic[B]):
    """Iterates over batches whose number and order are known.

    Iterating yields what is left of the epoch; the next iteration is the next epoch. Leaving a loop early
    keeps the position (`reset` forgets it).

    Args:
        batch_size: global, over all ranks.
        rank: which part of each batch to yield.
        world_size: into how many parts each batch is cut.
        prefetch: how many batches a thread makes ahead; 0 for none.

    Attributes:
        epoch: the number of the present one; the first is 0.
        waited_s: how long iterating has waited for batches that were not ready, in total.

    Raises:
        ConfigurationError: sizes that cannot work.
    """

    def __init__(self, batch_size: int, rank: int, world_size: int, prefetch: int) -> None:
        check_parts(batch_size, rank, world_size)
        if prefetch < 0:
            raise ConfigurationError(f"prefetch must be 0 or more, got {prefetch}")
        self.batch_size, self.rank, self.world_size, self.prefetch = batch_size, rank, world_size, prefetch
        self.epoch, self.waited_s = 0, 0.0
        self._next_batch = 0

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Batches an epoch, the same on every rank."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """All that global batches, and their order, depend on."""

    @abstractmethod
    def _make(self, epoch: int, first_batch: int) -> Iterator[B]:
        """The rank's part of each batch of an epoch, from `first_batch` on."""

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[B]:
        if self._next_batch >= self.num_batches:
            self._next_epoch()
        batches = run_ahead(self._make(self.epoch, self._next_batch), self.prefetch)
        try:
            while True:
                start = time.perf_counter()
                batch = next(batches, None)
                self.waited_s += time.perf_counter() - start
                if batch is None:
                    break
                self._next_batch += 1  # before the yield: the loop's body has this batch
                yield batch
            self._next_epoch()
        finally:
            batches.close()

    def reset(self) -> None:
        """Goes back to the start of the first epoch."""
        self.epoch, self._next_batch = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded, and what it means; equal on all ranks."""
        epoch, batch = self.epoch, self._next_batch
        if batch >= self.num_batches:
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch, **self._identity()}

    def state_after(self, batches: int) -> dict[str, Any]:
        """As `state_dict`, of a loader that has yielded so many batches since the start of its first epoch.

        For a loop whose batches are read ahead of its steps: the position of the steps, not that of the reader.
        """
        epoch, batch = divmod(batches, max(self.num_batches, 1))  # there may be none: no batch fills, and it is dropped
        return {"epoch": epoch, "batch": batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position, also one saved under another world size.

        Raises:
            ConfigurationError: the position was saved for other batches, or another order of them.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigurationError(
                    f"the loader's position was saved with {name} = {state.get(name)!r}, this run has "
                    f"{value!r}; batches would be others, or come in another order. Use the same value, "
                    "or start without the position"
                )
        self.epoch, self._next_batch = int(state["epoch"]), int(state["batch"])

    def _next_epoch(self) -> None:
        self.epoch, self._next_batch = self.epoch + 1, 0
