"""Sizes of micro-batches: small at both ends of a window, where nothing hides their exchange.

In a window whose rows travel once (*delta* in `rowmesh.exchange.window`), with all other exchange behind computation,

    window time = max(communication, computation + first fetch + last push)

so what counts is not the number of micro-batches but how few rows the first and the last have. Yet the second must not
have so many that the first is computed before they are there. Sizes therefore grow from both ends by a ratio g:

    size of micro-batch k  ∝  g ^ min(k, N − 1 − k)

g = 1 is even. The ratio is the one, of a grid, with which the window takes least time, by a model of one link that
makes all fetches first, then the pushes in order, each as soon as it is ready. n of B samples, not chosen by rows, have

    ρ(n) = (n / B) ^ α

of the batch's distinct rows (Heaps' law), which `rows_exponent` fits; light ends have fewer.

Source: NestPipe §V-C has even sizes and exposes 1 / N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rowmesh.errors import ConfigurationError

RATIOS = tuple(1 + step / 20 for step in range(81))  # 1 to 5


@dataclass(frozen=True, kw_only=True)
class WindowWork:
    """The work of one batch's window.

    Attributes:
        compute_ms: forward and backward of all its samples.
        fetch_ms: time on the link to fetch every distinct row once.
        push_ms: time on the link to push every gradient once.
        latency_ms: time that each exchange takes beside.
        rows_exponent: α.
    """

    compute_ms: float
    fetch_ms: float
    push_ms: float
    latency_ms: float = 0.0
    rows_exponent: float = 0.77

    def __post_init__(self) -> None:
        times = (self.compute_ms, self.fetch_ms, self.push_ms, self.latency_ms)
        if not all(0 <= time < math.inf for time in times):
            raise ConfigurationError(f"times of a window must be 0 or more, and finite; got {self}")
        if not 0 < self.rows_exponent <= 1:
            raise ConfigurationError(f"rows_exponent must be above 0 and at most 1, got {self.rows_exponent}")

    @classmethod
    def of_share(cls, communication: float) -> WindowWork:
        """The work of a step in turn that spends this share on communication, half on rows and half on gradients.

        >>> WindowWork.of_share(0.25).fetch_ms
        0.125
        """
        return cls(compute_ms=1 - communication, fetch_ms=communication / 2, push_ms=communication / 2)


def rows_exponent(num_rows: int, batch_size: int, part_rows: int, part_size: int) -> float:
    """α, such that `part_size` of `batch_size` samples have `part_rows` of `num_rows` distinct rows.

    >>> round(rows_exponent(13104, 2048, 865, 64), 2)
    0.78
    """
    if not (0 < part_size < batch_size and 0 < part_rows < num_rows):
        raise ValueError(
            f"a part must be smaller than the batch, got {part_rows} of {num_rows} rows "
            f"and {part_size} of {batch_size} samples"
        )
    return min(1.0, math.log(num_rows / part_rows) / math.log(batch_size / part_size))


def window_ms(sizes: Sequence[int], work: WindowWork) -> float:
    """How long a window takes, from the first fetch to the end of the last push.

    Example:
        >>> work = WindowWork(compute_ms=100.0, fetch_ms=30.0, push_ms=30.0, rows_exponent=1.0)
        >>> window_ms([100], work), window_ms([25, 25, 25, 25], work)
        (160.0, 115.0)
    """
    fetches = [work.fetch_ms * share + work.latency_ms for share in new_rows(sizes, work.rows_exponent)]
    pushes = [work.push_ms * share + work.latency_ms for share in new_rows(sizes[::-1], work.rows_exponent)]
    link_ms, computed_ms = sum(fetches), 0.0
    for size, arrived_ms, push_ms in zip(sizes, accumulate(fetches), reversed(pushes), strict=True):
        computed_ms = max(computed_ms, arrived_ms) + work.compute_ms * size / max(sum(sizes), 1)
        link_ms = max(link_ms, computed_ms) + push_ms
    return link_ms


def new_rows(sizes: Sequence[int], exponent: float) -> list[float]:
    """The share of the batch's rows that each micro-batch has and none before it.

    >>> new_rows([25, 75], 0.5)
    [0.5, 0.5]
    """
    bounds, batch_size = pairwise(accumulate(sizes, initial=0)), max(sum(sizes), 1)
    return [(end / batch_size) ** exponent - (begin / batch_size) ** exponent for begin, end in bounds]


def choose_sizes(batch_size: int, count: int, work: WindowWork) -> tuple[int, ...]:
    """Sizes of `count` micro-batches of `batch_size` samples with which a window takes least time.

    Args:
        batch_size: B of this rank, `count` or more.
        count: N, 1 or more.
        work: of the window.

    Returns:
        Sizes of 1 or more, B together; of windows that take equally long, the most even.

    Raises:
        ConfigurationError: there are fewer samples than micro-batches.

    Example:
        >>> work = WindowWork(compute_ms=100.0, fetch_ms=33.0, push_ms=33.0)  # communication is 40 % of a step
        >>> sizes = choose_sizes(2048, 8, work)
        >>> sizes
        (45, 106, 257, 616, 616, 257, 106, 45)
        >>> round(window_ms([256] * 8, work), 1), round(window_ms(sizes, work), 1)
        (113.3, 104.5)
    """
    if not 1 <= count <= batch_size:
        raise ConfigurationError(f"{batch_size} samples do not make {count} micro-batches of a sample or more")
    candidates = [_growing(batch_size, count, ratio) for ratio in RATIOS]
    return min((sizes for sizes in candidates if min(sizes) > 0), key=lambda sizes: round(window_ms(sizes, work), 9))


def _growing(batch_size: int, count: int, ratio: float) -> tuple[int, ...]:
    """Sizes ∝ ratio ^ (distance from the nearer end), rounded so that they add up.

    >>> _growing(10, 3, 2.0), _growing(10, 4, 1.0)
    ((3, 5, 2), (3, 2, 3, 2))
    """
    parts = [ratio ** min(k, count - 1 - k) for k in range(count)]
    bounds = [math.floor(batch_size * part / sum(parts) + 0.5) for part in accumulate(parts, initial=0.0)]
    return tuple(end - begin for begin, end in pairwise(bounds))
