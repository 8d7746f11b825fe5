"""EpochOrder: in which order one epoch visits the samples of a split.

The split is a sequence of blocks (record batches). A shuffled epoch permutes the blocks, takes
`window_blocks` of them at a time and permutes the samples of each such window. Reading stays sequential
within a block, and memory is one window, however large the data set (the order of the blocks takes 8 bytes
for every block).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class EpochOrder:
    """The order of one epoch, a function of its arguments alone.

    Args:
        num_samples: that are visited.
        block_samples: of every block of the split but the last.
        window_blocks: how many blocks are shuffled together.
        shuffle: whether to shuffle at all.
        seed, epoch: choose the permutation.
        first_sample: of the split that is visited, where not all are.
    """

    def __init__(
        self,
        num_samples: int,
        block_samples: int,
        window_blocks: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: int,
        first_sample: int = 0,
    ) -> None:
        end = first_sample + num_samples
        first_block = first_sample // block_samples
        num_blocks = -(-end // block_samples) - first_block
        self.shuffle, self.seed, self.epoch = shuffle, seed, epoch
        self._blocks = np.arange(num_blocks)
        if shuffle:
            self._blocks = np.random.default_rng([seed, epoch]).permutation(num_blocks)
        self._blocks = self._blocks + first_block
        starts = self._blocks * block_samples
        sizes = np.minimum(starts + block_samples, end) - np.maximum(starts, first_sample)
        self._window_blocks = window_blocks
        ends = sizes.cumsum()[window_blocks - 1 :: window_blocks]
        self.bounds = np.unique(np.concatenate([[0], ends, [num_samples]]))
        """Window i holds the positions `bounds[i]` to `bounds[i + 1]` of the epoch."""

    def window_of(self, position: int) -> int:
        """The window that holds a position of the epoch."""
        return int(np.searchsorted(self.bounds, position, side="right")) - 1

    def blocks(self, window: int) -> NDArray[np.int64]:
        """The blocks of a window, in order."""
        return self._blocks[window * self._window_blocks : (window + 1) * self._window_blocks]

    def permutation(self, window: int) -> NDArray[np.int32]:
        """Which sample of the window, its blocks one after the other, each of its positions visits."""
        samples = np.arange(self.bounds[window + 1] - self.bounds[window], dtype=np.int32)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch, window, 1]).shuffle(samples)
        return samples
