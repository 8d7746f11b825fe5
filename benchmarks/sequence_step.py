"""A training step of HSTU on packed sequences, one thread, beside a padded implementation in plain torch.

    python -m benchmarks.sequence_step                        Beauty and MovieLens, 2 and 8 blocks, d 50 and 256
    python -m benchmarks.sequence_step --data ../shared/data  with the lengths of the data instead of their quantiles
    python -m benchmarks.sequence_step --quick

A step is forward and backward of the encoder, from random vectors; both have the same parameters, and what they compute
is compared first. Linear layers are by `rowmesh.ops.linear`; with `torch_products` they are by torch, as those of the
padded one are. The padded one pads to the longest length that the set's models are trained with, as published ones
do; `tokens_share` is how many of its rows are events. The embedding tax is the share of the table's look-up, backward
and update, an `EmbeddingCollection` with pooling "none", in a step with it, without the loss.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.command import Report
from benchmarks.measure import summarize
from benchmarks.plain_sequence import PaddedHSTU, pad
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.models.sequence import SequenceEncoder
from rowmesh.ops.linear import Choices, using

POINTS = (*(number / 20 for number in range(20)), 0.97, 0.98, 0.99, 1.0)
_SPAN_S = 3 * 365 * 86400


@dataclass(frozen=True)
class DataSet:
    """Lengths of a public data set.

    Attributes:
        file: where it is in the folder of data; the first column names the user.
        quantiles: of the events of a user, at POINTS, as counted in that file.
        longest: N that models are trained with.
        num_items: rows of the table.
        users: of a batch.
        target: how many times the padded step ours is meant to be.
    """

    file: str
    quantiles: tuple[int, ...]
    longest: int
    num_items: int
    users: int
    target: float


DATA_SETS = {
    "beauty": DataSet(
        "sequences/beauty_timed.tsv.gz",
        (5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 8, 8, 9, 10, 12, 14, 21, 26, 32, 43, 204),
        50,
        12_101,
        256,
        3.0,
    ),
    "movielens": DataSet(
        "movielens_100k/ml-100k.inter.tsv.gz",
        (
            *(20, 21, 23, 26, 29, 33, 38, 43, 50, 57, 65, 75, 93, 108, 127, 148, 172, 205, 244, 311),
            *(359, 388, 443, 737),
        ),
        200,
        1_682,
        32,
        1.2,
    ),
}


@dataclass(frozen=True)
class Batch:
    """Users' events; all int64, packed but for `lengths`."""

    lengths: Tensor
    offsets: Tensor
    items: Tensor
    times: Tensor
    asked: Tensor


def draw(data: DataSet, users: int, folder: Path | None, generator: torch.Generator) -> Batch:
    """Users whose last event is what is predicted; items and times are random, times in order."""
    if folder is None:
        drawn = torch.rand(users, generator=generator, dtype=torch.float64).numpy()
        lengths = torch.from_numpy(np.interp(drawn, POINTS, data.quantiles)).round().long()
    else:
        every = torch.tensor(read_lengths(folder / data.file))
        lengths = every[torch.randint(len(every), (users,), generator=generator)]
    lengths = (lengths - 1).clamp(1, data.longest)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    drawn = torch.randint(_SPAN_S, (total,), generator=generator)
    times = torch.cat([each.sort().values for each in drawn.split(lengths.tolist())])
    return Batch(lengths, offsets, torch.randint(data.num_items, (total,), generator=generator), times, times + 3600)


def read_lengths(file: Path) -> list[int]:
    """How many events each user has."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = csv.reader(lines, delimiter="\t")
        next(rows)
        return list(Counter(row[0] for row in rows).values())


def measure_case(data: DataSet, batch: Batch, dim: int, blocks: int, repeats: int) -> dict[str, float]:
    """Medians of steps in turns: ours with both kinds of products, the padded one, and the table alone."""
    torch.manual_seed(0)
    encoder = SequenceEncoder("hstu", dim, blocks, 1, data.longest)
    padded = PaddedHSTU(dim, blocks, 1, data.longest, encoder.state_dict())
    check(encoder, padded, batch)
    choices = Choices.everything([(4 * dim, dim), (dim, dim)])
    vectors = torch.randn(len(batch.items), dim)
    grad = torch.randn(vectors.shape)
    ours = partial(packed_step, encoder, batch, vectors.clone().requires_grad_(), grad)
    steps: dict[str, Callable[[], object]] = {
        "packed": ours,
        "packed_torch_products": ours,
        "padded": padded_step(padded, batch, vectors, grad),
        "table": table_step(data, batch, dim, grad),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            with using(choices) if name == "packed" else nullcontext():
                start = time.perf_counter()
                step()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    timings = {key: value for name in steps for key, value in summarize(seconds[name], name).items()}
    return timings | {
        "ratio": round(middle["padded"] / middle["packed"], 2),
        "ratio_torch_products": round(middle["padded"] / middle["packed_torch_products"], 2),
        "embedding_tax": round(middle["table"] / (middle["table"] + middle["packed"]), 4),
    }


def packed_step(encoder: SequenceEncoder, batch: Batch, vectors: Tensor, grad: Tensor) -> None:
    """Forward and backward of ours."""
    encoder(vectors, batch.offsets, batch.times, batch.asked).backward(grad)


def padded_step(padded: PaddedHSTU, batch: Batch, vectors: Tensor, grad: Tensor) -> Callable[[], object]:
    """Forward and backward of the padded one; that batches are padded is not counted."""
    fill = partial(pad, lengths=batch.lengths.tolist(), max_length=padded.max_length)
    x, asked, times, of_out = fill(vectors).requires_grad_(), fill(batch.asked), fill(batch.times), fill(grad)
    return lambda: padded(x, asked, times).backward(of_out)


def table_step(data: DataSet, batch: Batch, dim: int, grad: Tensor) -> Callable[[], object]:
    """Look-up, backward and update of the items' table."""
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=data.num_items, dim=dim, pooling="none")])
    optimizer = EmbeddingOptimizer(embeddings)
    ids = SparseBatch(features=("item",), ids=batch.items, batch_size=len(batch.lengths), jagged_offsets=batch.offsets)

    def step() -> None:
        embeddings(ids)["item"].values.backward(grad)
        optimizer.step()

    return step


def check(encoder: SequenceEncoder, padded: PaddedHSTU, batch: Batch) -> None:
    """Raises where both do not compute the same, in float64: in float32 logarithms round into other buckets."""
    vectors = torch.randn(len(batch.items), encoder.dim, dtype=torch.float64)
    fill = partial(pad, lengths=batch.lengths.tolist(), max_length=padded.max_length)
    with torch.no_grad():
        ours = encoder.double()(vectors, batch.offsets, batch.times, batch.asked)
        theirs = padded.double()(fill(vectors), fill(batch.asked), fill(batch.times))
    theirs = torch.cat([each[:length] for each, length in zip(theirs, batch.lengths.tolist(), strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    encoder.float()
    padded.float()


def main(arguments: list[str] | None = None) -> None:
    """Runs all cases."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    report = Report("sequence_step", options.output)
    for name, blocks, dim in itertools.product(options.lengths, options.blocks, options.dim):
        data = DATA_SETS[name]
        users = data.users // 8 if options.quick else data.users
        batch = draw(data, users, options.data, torch.Generator().manual_seed(options.seed))
        found = measure_case(data, batch, dim, blocks, options.repeats)
        share = round(len(batch.items) / (users * data.longest), 3)
        report.line(
            lengths=name,
            blocks=blocks,
            dim=dim,
            users=users,
            events=len(batch.items),
            tokens_share=share,
            target=data.target,
            **found,
        )
        report.ratio(f"{name}_{blocks}x{dim}", found["ratio"])
    report.finish()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lengths", nargs="+", choices=tuple(DATA_SETS), default=list(DATA_SETS), help="of which data sets")
    add("--dim", nargs="+", type=int, default=[50, 256], help="of vectors")
    add("--blocks", nargs="+", type=int, default=[2, 8], help="of HSTU")
    add("--data", type=Path, help="the folder of data; default: quantiles of lengths that are stated here")
    add("--repeats", type=int, default=5, help="timed steps")
    add("--seed", type=int, default=0, help="of the batches")
    add("--quick", action="store_true", help="small batches, 2 blocks, d 50, that end within 30 s")
    add("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.dim, options.blocks, options.repeats = [50], [2], 3
    return options


if __name__ == "__main__":
    main()
