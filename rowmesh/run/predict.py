"""predict: scores for a file of raw rows, in bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rowmesh._support.files.atomic import replacing_file
from rowmesh._support.files.output import check_output
from rowmesh._support.files.regular import why_no_file
from rowmesh.data.encoder import rebatched
from rowmesh.data.parquet import read_types
from rowmesh.data.progress import Progress, silent
from rowmesh.data.quarantine import BadRows, Quarantine
from rowmesh.data.reader import Block, read_blocks, total_size
from rowmesh.data.schema import ScoringSchema
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.run.finished import FinishedRun
from rowmesh.run.trained_model import TrainedModel, load_finished

logger = logging.getLogger("rowmesh")
LINE = "line"

_QUARANTINED = b'{"file": '  # how lines of bad rows begin


@dataclass(frozen=True)
class Predicted:
    """The result of a prediction.

    Attributes:
        num_rows: rows with a score.
        means: mean scores, by the name of their column.
        bad_rows: rows without a score; they are in `quarantine`.
        quarantine: the file of bad rows, None without any.
        ids, unseen: by feature, how many ids there were, and how many of them have no row of their own.
    """

    num_rows: int
    means: dict[str, float]
    bad_rows: int
    quarantine: Path | None
    ids: dict[str, int]
    unseen: dict[str, int]


def predict(
    run: Path,
    file: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    has_label: bool = True,
    data: Path | None = None,
    max_bad_rows: int = 100,
    overwrite: bool = False,
    verify: bool = True,
    trust: bool = False,
    progress: Progress = silent,
    log: Callable[[str], object] = logger.info,
) -> Predicted:
    """Writes a Parquet file with a line and the scores for each usable row of a file of raw rows, in their order.

    Memory is bounded, whatever the size of the file: the model, the vocabularies, one block of the file and one batch.

    Args:
        run: the run's folder.
        file: in the format of the data that the run was trained on; it needs no label.
        out: the file to write; it appears whole or not at all.
        keep: columns to copy beside the scores.
        has_label: False for text files without a header whose lines lack the label.
        data: the prepared data of the training, where they are no longer where they were; not of raw rows.
        max_bad_rows: one bad row more stops the prediction.
        overwrite: replace `out`.
        verify: compare what is read of the model and of the data with their checksums.
        trust: import the module of an own model that the folder names, also where no run of this user left the folder.
        progress: called with what is being done, and the share that is done.
        log: receives a line for the model that is the best of its run, and for data that are not verified.

    Raises:
        RowmeshError: there is no model, it is damaged, the data are not those of the training, the file lacks a column
            or cannot be read, it has no usable row or too many bad ones, or `out` is not free.
    """
    _check_arguments(file, out, keep, max_bad_rows, overwrite)
    finished = FinishedRun.open(run)
    prepared = finished.scored_data(data, verify=verify)
    for line in finished.remarks(prepared):
        log(line)
    schema = prepared.schema.for_scoring(keep, has_label=has_label)
    model = load_finished(finished, prepared, verify=verify, trust=trust)
    _check_kept(keep, model.score_names)
    if schema.format == "parquet":
        model.encoder.check_forms(file, schema, read_types(file))
    path = _quarantine_of(out)
    path.unlink(missing_ok=True)  # of a former prediction
    with Quarantine(path, max_bad_rows, keep_at=path) as quarantine, replacing_file(out) as sink:
        num_rows, totals = 0, torch.zeros(len(model.score_names), dtype=torch.float64)
        with _Scores(sink) as scores:
            for batch in _batches(_encoded(file, schema, model, quarantine, progress), model.batch_size):
                num_features = prepared.schema.num_targets + prepared.num_dense + len(prepared.tables)
                samples = pa.RecordBatch.from_arrays(
                    batch.columns[:num_features], names=batch.schema.names[:num_features]
                )
                found = model.score(samples).view(batch.num_rows, -1)
                columns = {name: pa.array(each.numpy()) for name, each in zip(model.score_names, found.T, strict=True)}
                scores.write(batch.select(range(num_features, batch.num_columns)), columns)
                num_rows, totals = num_rows + batch.num_rows, totals + found.double().sum(0)
        if not num_rows:
            bad = f"; {quarantine.num_bad_rows} bad rows, {quarantine.first()}" if quarantine.num_bad_rows else ""
            raise DataError(f"no usable rows in {file}{bad}")
    counts = model.encoder
    bad = quarantine.num_bad_rows
    means = dict(zip(model.score_names, (totals / num_rows).tolist(), strict=True))
    return Predicted(num_rows, means, bad, path if bad else None, dict(counts.ids), dict(counts.unseen))


def _check_arguments(file: Path, out: Path, keep: Sequence[str], max_bad_rows: int, overwrite: bool) -> None:
    if why := why_no_file(file):
        raise DataError(f"{file}: {why}")
    check_output(out, read=file, overwrite=overwrite)
    check_output(_quarantine_of(out), read=file, overwrite=overwrite, is_own=is_quarantine)
    if max_bad_rows < 0:
        raise ConfigurationError(f"max_bad_rows must be 0 or more, got {max_bad_rows}")
    if len(set(keep)) < len(keep):
        raise ConfigurationError("--keep names a column twice; name it once")


def is_quarantine(path: Path) -> bool:
    """Whether a file has the bad rows of a former prediction."""
    with path.open("rb") as file:
        begin = file.read(len(_QUARANTINED))
    return begin in (b"", _QUARANTINED)


def _quarantine_of(out: Path) -> Path:
    """Where bad rows go."""
    return out.with_name(f"{out.name}.quarantine.jsonl")


def _check_kept(keep: Sequence[str], scores: Sequence[str]) -> None:
    if taken := [name for name in keep if name in (LINE, *scores)]:
        raise ConfigurationError(f"--keep {taken[0]}: the scores have a column of this name; rename that of the file")


def _encoded(
    file: Path, schema: ScoringSchema, model: TrainedModel, quarantine: BadRows, progress: Progress
) -> Iterator[pa.RecordBatch]:
    """Encoded rows, with their lines and the columns to copy behind them."""
    size = total_size(file, schema)
    for block in read_blocks(file, schema, quarantine):
        try:
            samples = model.encoder.encode(block)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        copied = list(block.copied)
        if schema.format == "text":
            copied = [_as_text(file, name, column) for name, column in zip(schema.keep, copied, strict=True)]
        yield _beside(samples, block, copied, schema.keep)
        progress("scoring", block.position / max(size, 1))


def _beside(samples: pa.RecordBatch, block: Block, copied: Sequence[pa.Array], keep: Sequence[str]) -> pa.RecordBatch:
    columns = [*samples.columns, pa.array(block.lines), *copied]
    return pa.RecordBatch.from_arrays(columns, names=[*samples.schema.names, LINE, *keep])


def _as_text(file: Path, name: str, column: pa.Array) -> pa.Array:
    """A column to copy of a text file."""
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        raise DataError(f"{file}: column {name!r}, which is to be copied, holds bytes that are no UTF-8") from None


def _batches(blocks: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows, `size` at a time: the batches that an evaluation of them computes, and so the same bits."""
    rest: list[pa.RecordBatch] = []
    for block in blocks:
        full, rest = rebatched([*rest, block], size)
        yield from full
    yield from [pa.concat_batches(rest)] if sum(batch.num_rows for batch in rest) else []


class _Scores:
    """Writes the file of scores; its columns are known with the first batch."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> _Scores:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, beside: pa.RecordBatch, scores: Mapping[str, pa.Array]) -> None:
        """Adds rows: their lines and copied columns, and their scores."""
        names = [LINE, *scores, *beside.schema.names[1:]]
        batch = pa.RecordBatch.from_arrays([beside.columns[0], *scores.values(), *beside.columns[1:]], names=names)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._sink, batch.schema)
        self._writer.write_batch(batch)
