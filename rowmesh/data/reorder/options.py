"""ReorderOptions: which ids are put in another order, and how much work may go into it."""

from __future__ import annotations

from dataclasses import dataclass

from rowmesh.errors import ConfigurationError
from rowmesh.tables.tensor_train import factor_rows


@dataclass(frozen=True, kw_only=True)
class ReorderOptions:
    """The options of a new order; with the data, they determine it.

    Attributes:
        hot_share: the share of a table's rows, the most frequent, that stay in order of frequency.
        batch_size: ids of so many consecutive samples occur together, where samples have one id each; in a multi-hot
            table the ids of one sample do. Batches of this size judge the new order.
        prefix_rows: p₃, so many consecutive rows share a prefix; 0 for that of cores whose factors are chosen.
        max_ids: so many ids after the hot ones are put in order of communities; the others stay as they are.
        max_edges: pairs of ids that are looked at in each table.
        seed: of the choice of pairs.

    Raises:
        ConfigurationError: a number that cannot work.
    """

    hot_share: float = 0.01
    batch_size: int = 4096
    prefix_rows: int = 0
    max_ids: int = 1_000_000
    max_edges: int = 10_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.hot_share <= 1:
            raise ConfigurationError(f"hot_share must be 0 to 1, got {self.hot_share}")
        if self.batch_size < 2:
            raise ConfigurationError(f"batch_size must be 2 or more, got {self.batch_size}: one id makes no pair")
        if min(self.max_ids, self.max_edges) < 1:
            raise ConfigurationError(
                f"max_ids and max_edges must be 1 or more, got {self.max_ids} and {self.max_edges}"
            )
        if min(self.prefix_rows, self.seed) < 0:
            raise ConfigurationError(f"prefix_rows and seed must be 0 or more, got {self.prefix_rows} and {self.seed}")

    def span(self, num_rows: int) -> range:
        """The ranks that get another order in a table whose last row stands for all rare ids.

        Example:
            >>> ReorderOptions(hot_share=0.1, max_ids=20).span(101)
            range(10, 30)
        """
        num_ids = num_rows - 1
        hot = min(int(num_rows * self.hot_share), num_ids)
        return range(hot, min(hot + self.max_ids, num_ids))

    def rows_of_a_prefix(self, num_rows: int) -> int:
        """How many consecutive rows share a prefix.

        Example:
            >>> ReorderOptions().rows_of_a_prefix(1_000_001), ReorderOptions(prefix_rows=7).rows_of_a_prefix(10)
            (107, 7)
        """
        return self.prefix_rows or factor_rows(num_rows)[2]
