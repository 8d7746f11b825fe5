"""prepare: from raw files to memory-mappable splits whose ids are frequency ranks.

Three steps, each streaming: *read* checks every row and writes it with provisional codes, *count* the codes
of the training split and take the means of its dense columns, and *map* codes to ranks and dense values to scaled ones
while the splits are written. Memory: one block of rows, and
the distinct ids of every column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import rowmesh
from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.folder import replacing_folder
from rowmesh._support.files.regular import why_no_file
from rowmesh.data.codes import CodedRows, Coder, Ranking, flat_ids, map_ids
from rowmesh.data.parquet import multi_hot_columns
from rowmesh.data.prepared import (
    BLOCK_SAMPLES,
    PREPARED,
    SPLITS,
    Prepared,
    Split,
    Table,
    arrow_schema,
    counts_path,
    split_file,
    vocabulary_path,
    write_vocabulary,
)
from rowmesh.data.progress import Progress, silent
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.request import preparation_request, unchanged
from rowmesh.data.scales import DenseScale, DenseStatistics, scale_columns
from rowmesh.data.schema import Schema
from rowmesh.data.splits import Splitter
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.data.writer import SplitWriter
from rowmesh.errors import ConfigurationError, DataError

QUARANTINE = "quarantine.jsonl"


def prepare(
    files: Mapping[str, Sequence[Path]],
    out: Path,
    schema: Schema,
    *,
    splitter: Splitter | None = None,
    min_count: int = 2,
    max_bad_rows: int = 100,
    overwrite: bool = False,
    optimum: Mapping[str, Mapping[str, float]] | None = None,
    block_samples: int = BLOCK_SAMPLES,
    progress: Progress = silent,
) -> Prepared:
    """Prepares a data set; the output folder appears whole or not at all.

    Ids become ranks by their frequency in the training split: row 0 is the most frequent, ties go to the
    value met first. Ids seen fewer than `min_count` times there, or only in other splits, share the last
    row, the *rare* row. A missing id is a value like any other.

    Args:
        files: split → its files, read in order; "train" is required.
        out: the folder to write.
        schema: the columns.
        splitter: where given, cuts the samples of "train" into splits.
        min_count: how often an id must occur in training to have a row of its own; 1 or more.
        max_bad_rows: one bad row more stops the preparation.
        overwrite: replace a folder that is not empty.
        optimum: split → the scores of the true probabilities and the number of "samples" they are of; kept
            where the split has all of these samples, and no longer known where it was cut or has bad rows.
        block_samples: samples in a record batch, the unit that the loader reads and shuffles.
        progress: receives every block.

    Raises:
        DataError: too many bad rows, a missing column, an unreadable file, a split without a usable row.
        RowmeshError: the output folder is in use or not empty, or the disk is full.
    """
    _check_arguments(files, splitter, min_count, max_bad_rows)
    for key, column in (("time", schema.time), ("score", schema.score)):
        if column is not None:
            raise ConfigurationError(
                f"the schema names the column of {key}s, {column!r}, and prepared data have none; leave {key} out, or "
                'train on the rows as they are (data.source = "raw")'
            )
    out = out.absolute()
    request = preparation_request(
        files,
        schema,
        splitter=splitter,
        min_count=min_count,
        max_bad_rows=max_bad_rows,
        optimum=optimum,
        block_samples=block_samples,
    )
    sums: dict[str, Checksums] = {}
    with replacing_folder(out, kind=PREPARED, request=request, overwrite=overwrite, checksums=sums) as folder:
        keep_at = out.with_name(f"{out.name}.{QUARANTINE}")
        every = [path for paths in files.values() for path in paths]
        with unchanged(every), Quarantine(folder / QUARANTINE, max_bad_rows, keep_at) as quarantine:
            coder = Coder(schema, multi_hot_features(files, schema), quarantine, progress)
            sources = {name: coder.write(paths, folder / f"{name}.codes") for name, paths in files.items()}
        parts = _Parts(sources, splitter)
        parts.check()
        rankings, scales = _count(parts, schema, coder.vocabularies, min_count, progress)
        _save_rankings(folder, rankings, coder.vocabularies)
        kinds = arrow_schema(schema, coder.multi_hot)
        paths = {name: folder / split_file(name) for name in parts.splits}
        with contextlib.ExitStack() as stack:
            writers = {
                name: stack.enter_context(SplitWriter(path, kinds, block_samples)) for name, path in paths.items()
            }
            tallies = _write_splits(parts, _Mapping(schema, scales, rankings), writers, progress)
        sums.update({split_file(name): writer.checksums for name, writer in writers.items()})
        for source in sources.values():
            source.path.unlink()
        Prepared(
            folder=folder,
            schema=schema,
            tables=_tables(schema, coder.multi_hot, rankings, tallies),
            splits={name: tally.split(name, (optimum or {}).get(name)) for name, tally in tallies.items()},
            min_count=min_count,
            bad_rows=quarantine.num_bad_rows,
            block_samples=block_samples,
            rowmesh_version=rowmesh.__version__,
            sources={name: [str(path) for path in paths] for name, paths in files.items()},
            dense_scales=scales,
        ).save()
    keep_at.unlink(missing_ok=True)  # of an attempt that failed
    return Prepared.open(out)


def multi_hot_features(files: Mapping[str, Sequence[Path]], schema: Schema) -> tuple[bool, ...]:
    """Which categorical features hold lists of ids."""
    if schema.format == "text":
        return schema.separated
    return multi_hot_columns([path for paths in files.values() for path in paths], schema)


def _check_arguments(
    files: Mapping[str, Sequence[Path]], splitter: Splitter | None, min_count: int, max_bad_rows: int
) -> None:
    if unknown := set(files) - set(SPLITS):
        raise ConfigurationError(f"unknown splits {sorted(unknown)}; there are {', '.join(SPLITS)}")
    if not files.get("train"):
        raise ConfigurationError("no training files; name at least one")
    for path in (path for paths in files.values() for path in paths):
        if why := why_no_file(path):
            raise DataError(f"{path}: {why}")
    if splitter is not None and len(files) > 1:
        raise ConfigurationError("give either files for the other splits or shares to cut them from training")
    if min_count < 1:
        raise ConfigurationError(f"min_count must be 1 or more, got {min_count}")
    if max_bad_rows < 0:
        raise ConfigurationError(f"max_bad_rows must be 0 or more, got {max_bad_rows}")


@dataclass(frozen=True)
class _Parts:
    """Coded rows and the splits they fall into."""

    sources: Mapping[str, CodedRows]
    splitter: Splitter | None

    @property
    def splits(self) -> tuple[str, ...]:
        names = self.sources if self.splitter is None else self.splitter.splits
        return tuple(name for name in SPLITS if name in names)

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources.values())

    def check(self) -> None:
        """Raises DataError where the cut leaves a split without samples."""
        if self.splitter is None:
            return
        sizes = self.splitter.sizes(self.num_samples)
        for name in self.splits:
            if sizes[name] == 0:
                raise DataError(
                    f"the {name} split would be empty: {self.num_samples} usable rows, of which "
                    f"{self.splitter.validation:g} go to validation and {self.splitter.test:g} to the test; "
                    "give more rows, or change --validation-share and --test-share (0 makes no such split)"
                )

    def batches(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """(split, rows), in order within each split."""
        for name, source in self.sources.items():
            for start, batch in source.batches():
                if self.splitter is None:
                    yield name, batch
                    continue
                stop = start + batch.num_rows
                assigned = self.splitter.assign(start, stop, total=source.num_samples)
                for index in np.unique(assigned):
                    yield SPLITS[index], batch.filter(pa.array(assigned == index))


def _count(
    parts: _Parts, schema: Schema, vocabularies: Sequence[Vocabulary], min_count: int, progress: Progress
) -> tuple[list[Ranking], tuple[DenseScale, ...] | None]:
    """How codes become rows, and how dense columns are scaled, if they are."""
    by_table = {each.name: np.zeros(len(each), np.int64) for each in vocabularies}
    counts = [by_table[each.name] for each in vocabularies]  # features that share a vocabulary add to one array
    statistics = DenseStatistics(schema.dense) if schema.dense and schema.dense_transform == "standardize" else None
    done = 0
    for split, batch in parts.batches():
        if statistics is not None:
            first = schema.num_targets
            dense = batch.columns[first : first + len(schema.dense)]
            statistics.add(split, np.stack([column.to_numpy() for column in dense]))
        if split == "train":
            for count, column in zip(counts, batch.columns[-len(counts) :], strict=True):
                np.add.at(count, flat_ids(column), 1)
        done += batch.num_rows
        progress("counting", done / parts.num_samples)
    rankings = {name: Ranking.from_counts(count, min_count) for name, count in by_table.items()}
    return [rankings[each.name] for each in vocabularies], statistics.scales() if statistics else None


def _save_rankings(folder: Path, rankings: Sequence[Ranking], vocabularies: Sequence[Vocabulary]) -> None:
    (folder / "counts").mkdir()
    (folder / "vocabulary").mkdir()
    pairs = zip(rankings, vocabularies, strict=True)
    distinct = {vocabulary.name: (ranking, vocabulary) for ranking, vocabulary in pairs}
    for ranking, vocabulary in distinct.values():
        np.save(counts_path(folder, vocabulary.name), ranking.counts)
        write_vocabulary(vocabulary_path(folder, vocabulary.name), vocabulary.values(ranking.code_of_row))


@dataclass
class _Tally:
    """The counts and sums of a split while it is written."""

    schema: Schema
    samples: int = 0
    positives: int = 0
    weight: float = 0.0
    labels: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    rare_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Takes in the labels, and the weights behind them, of some samples."""
        *labels, weights = [column.to_numpy().astype(np.float64) for column in columns] + (
            [np.ones(len(columns[0]))] if self.schema.weight is None else []
        )
        self.samples += len(weights)
        self.positives += int((labels[0] == 1).sum())
        self.weight += float(weights.sum())
        self.labels = self.labels + np.array([(label * weights).sum() for label in labels])

    def split(self, name: str, optimum: Mapping[str, float] | None) -> Split:
        """Raises DataError where no sample counts."""
        if not self.weight > 0:
            raise DataError(
                f"every sample of the {name} split has weight 0 in column {self.schema.weight!r}; give at least one a "
                "weight above 0, or leave weight out of the schema"
            )
        means = (self.labels / self.weight).tolist()
        return Split(
            samples=self.samples,
            positive_rate=self.positives / self.samples if self.schema.labels[0].kind == "binary" else None,
            optimum=dict(optimum) if optimum and optimum.get("samples") == self.samples else None,
            label_means=dict(zip(self.schema.label_names, means, strict=True)),
        )


@dataclass(frozen=True)
class _Mapping:
    """From rows with codes and raw dense values to what is kept."""

    schema: Schema
    scales: Sequence[DenseScale] | None
    rankings: Sequence[Ranking]

    def dense(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Dense columns as a model sees them: missing values, here NaN, are 0."""
        scaled = scale_columns((column.to_numpy() for column in columns), self.scales)
        return [pa.array(values) for values in scaled]


def _write_splits(
    parts: _Parts, mapping: _Mapping, writers: Mapping[str, SplitWriter], progress: Progress
) -> dict[str, _Tally]:
    num_tables = len(mapping.rankings)
    tallies = {
        name: _Tally(mapping.schema, ids=np.zeros(num_tables, np.int64), rare_ids=np.zeros(num_tables, np.int64))
        for name in parts.splits
    }
    done = 0
    for split, batch in parts.batches():
        writers[split].write(_map_batch(batch, mapping, tallies[split]))
        done += batch.num_rows
        progress("writing", done / parts.num_samples)
    return tallies


def _map_batch(batch: pa.RecordBatch, mapping: _Mapping, tally: _Tally) -> list[pa.Array]:
    columns = batch.columns
    begin = mapping.schema.num_targets
    first = begin + len(mapping.schema.dense)
    tally.add(columns[:begin])
    columns[begin:first] = mapping.dense(columns[begin:first])
    for i, ranking in enumerate(mapping.rankings):
        mapped = map_ids(columns[first + i], lambda ids, rows=ranking.row_of_code: rows[ids.to_numpy()])
        rows = flat_ids(mapped)
        tally.ids[i] += len(rows)
        tally.rare_ids[i] += int((rows == ranking.num_rows - 1).sum())
        columns[first + i] = mapped
    return columns


def _tables(
    schema: Schema, multi_hot: Sequence[bool], rankings: Sequence[Ranking], tallies: Mapping[str, _Tally]
) -> tuple[Table, ...]:
    return tuple(
        Table(
            name=name,
            num_rows=ranking.num_rows,
            multi_hot=multi_hot[i],
            num_distinct=len(ranking.row_of_code),
            rare_share={split: float(tally.rare_ids[i] / max(tally.ids[i], 1)) for split, tally in tallies.items()},
        )
        for i, (name, ranking) in enumerate(zip(schema.features, rankings, strict=True))
    )
