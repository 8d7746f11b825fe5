"""synthesize: writes a data set drawn from a planted model, in Criteo's shape."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowmesh._support.files.folder import replacing_folder
from rowmesh.data.inputs import OPTIMUM_FILE, SCHEMA_FILE
from rowmesh.data.planted import PlantedConfig, PlantedModel, Samples
from rowmesh.data.prepared import SPLITS
from rowmesh.data.progress import Progress, silent
from rowmesh.data.request import drawing_request
from rowmesh.data.schema import Schema, criteo_schema
from rowmesh.errors import ConfigurationError

CHUNK_SAMPLES = 65_536
SHARD_CHUNKS = 64
DRAWN = "drawn data"
"""The kind of folder that the manifest of drawn data names."""

Optimum = dict[str, dict[str, float]]
_NUM_BINS = 1 << 20


def synthesize(
    out: Path,
    samples: Mapping[str, int],
    config: PlantedConfig,
    *,
    file_format: Literal["parquet", "text"] = "parquet",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Optimum:
    """Writes a data set that `prepare` reads: files of each split, `schema.toml` and `optimum.json`.

    A split that is made longer begins with the samples of the shorter one.

    Args:
        out: the folder to write; it appears whole or not at all.
        samples: split → how many.
        config: the planted model.
        file_format: "parquet", or "text" for Criteo's raw format.
        overwrite: replace a folder that is not empty.
        progress: receives every chunk.

    Returns:
        split → "samples", "positive_rate", and "auc" and "log_loss" of the true probabilities.

    Raises:
        ConfigurationError: multi-hot tables as text, or a split that does not exist.
        RowmeshError: the output folder is in use or not empty, or the disk is full.
    """
    if file_format == "text" and config.bag_sizes:
        raise ConfigurationError("Criteo's text format has no multi-hot columns; write Parquet")
    if unknown := set(samples) - set(SPLITS):
        raise ConfigurationError(f"unknown splits {sorted(unknown)}; there are {', '.join(SPLITS)}")
    for split in ("train", *samples):
        if samples.get(split, 0) < 1:
            raise ConfigurationError(f"the {split} split needs 1 or more samples, got {samples.get(split, 0)}")
    schema = criteo_schema(len(config.num_rows), file_format)
    total, done = sum(samples.values()), 0
    request = drawing_request(samples, config, file_format)
    with replacing_folder(out, kind=DRAWN, request=request, overwrite=overwrite) as folder:
        model = PlantedModel(config)
        optimum: Optimum = {}
        for split, count in samples.items():
            scores = Scores()
            with _SplitFiles(folder, split, schema) as files:
                for chunk in _draw(model, split, count):
                    files.write(_table(chunk, schema))
                    scores.add(chunk.probabilities, chunk.labels)
                    done += len(chunk.labels)
                    progress("drawing", done / total)
            optimum[split] = _summary(scores)
        schema.save(folder / SCHEMA_FILE)
        (folder / OPTIMUM_FILE).write_text(json.dumps(optimum, indent=1) + "\n", encoding="utf-8")
    return optimum


def _draw(model: PlantedModel, split: str, count: int) -> Iterator[Samples]:
    """The samples of a split in chunks, each from a stream of its own."""
    for chunk, start in enumerate(range(0, count, CHUNK_SAMPLES)):
        drawn = model.draw(CHUNK_SAMPLES, stream=(SPLITS.index(split), chunk))
        yield drawn.first(min(CHUNK_SAMPLES, count - start))


def _summary(scores: Scores) -> dict[str, float]:
    return {
        "samples": scores.num_samples,
        "positive_rate": scores.positive_rate,
        "auc": scores.auc,
        "log_loss": scores.log_loss,
    }


class _SplitFiles:
    """Writes the tables of a split, `SHARD_CHUNKS` to a file."""

    def __init__(self, folder: Path, split: str, schema: Schema) -> None:
        self._folder, self._split, self._schema = folder, split, schema
        self._num_chunks = 0
        self._file = None
        self._writer: pq.ParquetWriter | pa_csv.CSVWriter | None = None

    def write(self, table: pa.Table) -> None:
        if self._num_chunks % SHARD_CHUNKS == 0:
            self._close()
            self._open(table.schema)
        assert self._writer is not None
        self._writer.write_table(table)
        self._num_chunks += 1

    def _open(self, kinds: pa.Schema) -> None:
        is_text = self._schema.format == "text"
        name = f"{self._split}-{self._num_chunks // SHARD_CHUNKS:05d}.{'tsv' if is_text else 'parquet'}"
        self._file = (self._folder / name).open("wb")
        if is_text:
            options = pa_csv.WriteOptions(include_header=False, delimiter=self._schema.delimiter, quoting_style="none")
            self._writer = pa_csv.CSVWriter(self._file, kinds, write_options=options)
        else:
            self._writer = pq.ParquetWriter(self._file, kinds, compression="zstd", use_dictionary=False)

    def _close(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.close()
        self._file = self._writer = None

    def _abandon(self) -> None:
        """Closes the file as it is; the disk may be full, and the file is not used."""
        if isinstance(self._writer, pq.ParquetWriter):
            self._writer.is_open = False  # or it would try to write the footer when it is collected
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = self._writer = None

    def __enter__(self) -> _SplitFiles:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            self._abandon()


def _table(samples: Samples, schema: Schema) -> pa.Table:
    """Samples as columns; ids as integers in Parquet, as eight hex digits in text."""
    columns: list[pa.Array] = [pa.array(samples.labels)]
    columns += [pa.array(values, pa.int32(), mask=values < 0) for values in samples.dense]
    for table, ids in enumerate(samples.ids):
        if schema.format == "text":
            columns.append(pa.array(_hex(ids), pa.string(), mask=ids < 0))
            continue
        values = pa.array(ids, mask=ids < 0)
        if table in samples.bag_lengths:
            offsets = np.concatenate([[0], samples.bag_lengths[table].cumsum()])
            values = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
        columns.append(values)
    return pa.table(columns, names=[*schema.label_names, *schema.dense, *schema.features])


def _hex(ids: NDArray[np.int64]) -> NDArray[np.str_]:
    """Eight hex digits for each id.

    >>> _hex(np.array([255, 0])).tolist()
    ['000000ff', '00000000']
    """
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    shifts = np.arange(28, -4, -4)
    nibbles = (ids[:, None] >> shifts) & 15
    return digits[nibbles].view("S8")[:, 0].astype(np.str_)


class Scores:
    """AUC and log-loss of a stream of probabilities and the labels drawn from them, in bounded memory.

    Where the probabilities are those that labels were drawn from, no model can beat them.

    The AUC counts pairs within bins of 2⁻²⁰ as ties, so it is exact to about 1e-6.

    Example:
        >>> scores = Scores()
        >>> scores.add(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
        >>> scores.auc
        0.75
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._log_loss = 0.0
        self._bins = np.zeros((2, _NUM_BINS), np.int64)

    def add(self, probabilities: NDArray[np.float64], labels: NDArray) -> None:
        """Takes in some samples."""
        chosen = np.where(labels == 1, probabilities, 1 - probabilities)
        self._log_loss -= float(np.log(chosen).sum())
        self.num_samples += len(labels)
        bins = np.minimum((probabilities * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        for label in (0, 1):
            np.add.at(self._bins[label], bins[labels == label], 1)

    @property
    def positive_rate(self) -> float:
        """The share of label 1."""
        return float(self._bins[1].sum() / max(self.num_samples, 1))

    @property
    def log_loss(self) -> float:
        """Mean negative log-likelihood, in nats."""
        return self._log_loss / max(self.num_samples, 1)

    @property
    def auc(self) -> float:
        """The probability that a positive sample has a higher score than a negative one, ties half."""
        negatives, positives = self._bins
        below = negatives.cumsum() - negatives
        pairs = int(negatives.sum()) * int(positives.sum())
        return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5
