"""Bucketed sums: vectors of all ranks, added in the order of the ranks, of which parts are sent before all is there.

Each bucket is scattered, added and gathered, as in `rowmesh.mesh.ordered_sums`. Scattering goes on beside whatever the
caller computes after `post`. How a vector is cut does not change a bit of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rowmesh.mesh.channel import Channel, Message, MessageCounters
from rowmesh.mesh.ordered_sums import add_in_order
from rowmesh.ops.memory import round_up


class BucketedSums:
    """Sums of one vector after the other, by torch.distributed, in the host's memory.

    All ranks post all buckets of a vector in the same order, then call `finish`. Messages are posted by several
    functions of a step, so the channel must have a process group that nothing else uses.

    Args:
        channel: between all ranks.
        bounds: where buckets begin, and the length of the vector.
        dtype: of the elements.
        counters: count the messages.
        what: vectors are, for messages of errors.
    """

    def __init__(
        self, channel: Channel, bounds: Sequence[int], dtype: torch.dtype, counters: MessageCounters, what: str
    ) -> None:
        self._channel, self._counters, self._what = channel, counters, what
        self._spans = [slice(*pair) for pair in pairwise(bounds)]
        sizes = [round_up(span.stop - span.start, channel.size) for span in self._spans]
        self._out, self._totals = (
            [torch.zeros(channel.size, size // channel.size, dtype=dtype, device="cpu") for size in sizes]
            for _ in range(2)
        )
        self._posted: list[tuple[int, Message]] = []

    def post(self, bucket: int, vector: Tensor) -> None:
        """Sends a bucket of the vector, which may change afterwards."""
        span = self._spans[bucket]
        self._out[bucket].view(-1)[: span.stop - span.start] = vector[span]
        message = self._channel.post_equal(self._out[bucket], self._counters, f"scattering {self._what}")
        self._posted.append((bucket, message))

    def finish(self, out: Tensor) -> None:
        """Writes the sum of all vectors, once all buckets were posted."""
        assert len(self._posted) == len(self._spans), "every bucket is posted once"
        gathering = []
        for bucket, message in self._posted:
            received = message.wait()
            sums = add_in_order(received, torch.empty_like(received[0]))
            doing = f"gathering sums of {self._what}"
            gathering.append(self._channel.post_gather(sums, self._counters, doing, self._totals[bucket]))
        for (bucket, _), message in zip(self._posted, gathering, strict=True):
            span = self._spans[bucket]
            out[span] = message.wait().view(-1)[: span.stop - span.start]
        self._posted.clear()
