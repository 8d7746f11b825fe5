"""load_run: the model of a finished run as a torch module, from raw values to scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rowmesh._support.files.places import local_path
from rowmesh.data import Batch
from rowmesh.data.encoder import VALUES, Encoder, prepared_encoder
from rowmesh.data.loader import to_batch
from rowmesh.data.prepared import Prepared
from rowmesh.data.raw import RawData
from rowmesh.data.raw.encoder import raw_batch, raw_encoder
from rowmesh.errors import DataError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.run.build import job_on
from rowmesh.run.config import Config, PlacementConfig, chosen
from rowmesh.run.finished import FinishedRun
from rowmesh.run.job import Job
from rowmesh.run.loading import load_model
from rowmesh.run.placement import Placement, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import task_of
from rowmesh.run.trust import check_trusted
from rowmesh.sparse import SparseBatch


class DataFrame(Protocol):
    """A pandas.DataFrame, as far as it is looked at; pandas need not be installed."""

    columns: Any

    def to_dict(self) -> Any:
        """Told apart from other objects by this method."""
        ...


Column = Sequence[object] | NDArray[Any] | Tensor | pa.Array | pa.ChunkedArray
Values = Mapping[str, Column] | pa.Table | DataFrame


class TrainedModel(nn.Module):
    """A trained model: raw values in, scores out; made by `load_run`.

    It is in one process, on the CPU, and in evaluation mode; it computes no gradients. Its parameters are those of the
    network; the rows of tables are in `embeddings`.

    Attributes:
        job: the run, set up for one process.
        encoder: maps raw ids, and counts those without a row of their own.
        steps: of the training.
    """

    def __init__(self, job: Job, encoder: Encoder, steps: int | None, opened: ExitStack) -> None:
        super().__init__()
        self._opened = opened  # closes the tables when the model is freed
        self.job, self.encoder, self.steps = job, encoder, steps
        self.embeddings, self.network = job.embeddings, job.network
        self.schema = job.schema.for_scoring()
        self.eval()

    @property
    def batch_size(self) -> int:
        """Samples computed at a time: those of a global batch of the run."""
        return chosen(self.job.config.data.batch_size)

    @property
    def unseen(self) -> Counter[str]:
        """The number of ids so far without a row of their own, by feature: rare and unseen ids.

        For dynamic tables, ids that the table does not know count, which read what its `missing` says.
        """
        return Counter(self.encoder.unseen)

    def forward(self, values: Values) -> Tensor:
        """Scores `[n]`, or `[n, L]` of several labels: the probability of label 1, or the value, of each row.

        Args:
            values: a dictionary from column to raw values, or a table of pandas or pyarrow, with the columns that
                the preparation read, but for labels and weight. Ids may be text or integers, as in training;
                those of multi-hot features lists, or text with the separator; None is a missing value. Other columns
                are not read.

        Raises:
            DataError: a column is missing or of no use, or a value is none that the preparation takes; names row and
                column.
        """
        table = as_table(values, [feature.source for feature in self.schema.categorical])
        samples = self.encoder.encode(self.encoder.check_table(table, self.schema))
        targets = self.job.targets
        parts = range(0, samples.num_rows, self.batch_size)
        scores = [self.score(samples.slice(first, self.batch_size)) for first in parts]
        return torch.cat(scores) if scores else torch.empty((0, len(targets)) if len(targets) > 1 else 0)

    def score(self, samples: pa.RecordBatch) -> Tensor:
        """Scores `[n]`, or `[n, L]` of several labels, of encoded rows, computed as one batch.

        Raises:
            RowmeshError: scores are not finite.
        """
        data = self.job.data
        batch: Batch = raw_batch(samples, data) if isinstance(data, RawData) else to_batch(samples, self.job.clicks)
        self._count_unknown(batch.sparse)
        with torch.no_grad():
            logits = self.job.logits(batch)
        if count := int((~torch.isfinite(logits)).sum()):
            raise RowmeshError(
                f"{count:,} of {len(logits):,} scores are not finite: the model diverged; train again with smaller "
                "learning rates"
            )
        if len(self.job.targets) == 1:
            return self.job.targets[0].predictions(logits)
        return torch.stack([t.predictions(z) for t, z in zip(self.job.targets, logits.unbind(1), strict=True)], 1)

    def _count_unknown(self, batch: SparseBatch) -> None:
        """Counts ids that dynamic tables do not know; the row of rare ids, which many share, is counted already."""
        for table in (table for table in self.embeddings.tables if table.dynamic is not None):
            for feature in table.features:
                number = batch.features.index(feature)
                ids = batch.ids[slice(*batch.feature_range(number))].numpy()
                is_unknown = ~self.embeddings.statistics(table.name, ids).known
                if isinstance(self.job.data, Prepared):
                    is_unknown &= ids != self.job.data.table(feature).rare_row
                self.encoder.unseen[feature] += int(is_unknown.sum())

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the columns of scores: `score`, or `score_NAME` for each of several labels."""
        names = [target.name for target in self.job.targets]
        return ("score",) if len(names) == 1 else tuple(f"score_{name}" for name in names)


def load_run(
    folder: str | Path, *, data: str | Path | None = None, verify: bool = True, trust: bool = False
) -> TrainedModel:
    """The model of a finished run, for raw values, in this process and on the CPU, however it was trained.

    Tables lie as in training: tensor-train tables as cores, tiered ones in tiers; every other row is in memory.

    Args:
        folder: the run's.
        data: the prepared data of the training, where they are no longer where they were; their vocabularies are read.
            For a run on raw rows nothing is read but its schema.
        verify: compare what is read with its checksums.
        trust: import the module of an own model that the folder names, also where no run of this user left the folder.

    Raises:
        RowmeshError: there is no model, it or the data are damaged, or the data are not those of the training.
        MemoryError: the model has no room.

    Example (not run)::

        model = rowmesh.load_run("runs/criteo")
        scores = model({"price": [3.5, None], "user": ["ann", "bob"], "tags": [["new", "red"], []]})
    """
    finished = FinishedRun.open(local_path(folder, "folder"))
    prepared = finished.scored_data(Path(data) if data is not None else None, verify=verify)
    return load_finished(finished, prepared, verify=verify, trust=trust)


def load_finished(
    finished: FinishedRun, data: Prepared | RawData, *, verify: bool = True, trust: bool = False
) -> TrainedModel:
    """As `load_run`, with the data opened.

    Raises:
        RowmeshError: see `load_run`.
    """
    trained = resolve(finished.folder.config)
    if trained.model.is_own:
        run = finished.folder
        check_trusted(run.path, trained.model.name, run.seal, trust=trust, how="pass --trust (trust=True in a program)")
    finished.check_meaning(data, "the same ids and values mean something else")
    task, _ = task_of(for_one_process(trained), data)
    mesh, shapes = Mesh(timeout_s=trained.parallel.timeout_s), shapes_of(task.config, data)
    with ExitStack() as stack:

        def place() -> Placement:
            return Placement(Plan.cyclic(shapes, mesh.world_size, mesh.ranks_per_node), "in one process")

        job = stack.enter_context(job_on(task, mesh, place, trains=False))
        load_model(job, finished.folder, verify)
        job.embeddings.synchronize()
        encoder = raw_encoder(data) if isinstance(data, RawData) else prepared_encoder(data)
        steps = finished.manifest.metadata.get("steps")
        return TrainedModel(job, encoder, steps, stack.pop_all())


def as_table(values: Values, ids: Collection[str] = ()) -> pa.Table:
    """Raw values as an Arrow table.

    Args:
        values: see `TrainedModel.forward`.
        ids: the columns that hold ids. Ids that pandas has as floats, because one is missing, become integers again.

    Raises:
        DataError: columns differ in length, a column mixes types or has no order, or this is no table.
    """
    if isinstance(values, pa.Table):
        return values
    if isinstance(values, Mapping):
        columns = {str(name): _as_array(str(name), column) for name, column in values.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"{VALUES}: columns differ in length ({shown}); give one value a row in each")
        return pa.table(columns)
    if hasattr(values, "columns") and hasattr(values, "to_dict"):  # a pandas.DataFrame; pandas need not be there
        try:
            return with_whole_ids(pa.Table.from_pandas(values, preserve_index=False), ids)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(f"{VALUES}: a column cannot be read ({error}); give it one type") from None
    raise DataError(
        f"{VALUES} are a {type(values).__name__}; give a dictionary from column to values, a pandas.DataFrame or a "
        "pyarrow.Table"
    )


def with_whole_ids(table: pa.Table, ids: Collection[str]) -> pa.Table:
    """The table with floats as integers in columns of ids, where all of a column are whole; others are refused later.

    >>> table = pa.table({"user": [3.0, None, 8.0], "price": [1.0, 2.0, 3.0]})
    >>> with_whole_ids(table, ["user"])["user"].to_pylist()
    [3, None, 8]
    """
    for number, field in enumerate(table.schema):
        if field.name in ids and pa.types.is_floating(field.type):
            with suppress(pa.ArrowInvalid):  # one has something behind the point, or is past 2⁵³
                table = table.set_column(number, field.name, table.column(number).cast(pa.int64()))
    return table


def _as_array(name: str, column: Column) -> pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, Tensor):
        column = _as_numpy(name, column)
    if isinstance(column, np.ndarray) and column.ndim == 2:  # bags of one size
        column = list(column)
    if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
        raise DataError(f"{VALUES}: column {name!r} is one value; give a list of them, one a row")
    if isinstance(column, Mapping):
        raise DataError(
            f"{VALUES}: column {name!r} is a dictionary, and which of its values belongs to which row is not known; "
            'give a list, as df.to_dict("list") makes it of a DataFrame'
        )
    if isinstance(column, Set):
        raise DataError(f"{VALUES}: column {name!r} is a {type(column).__name__}, which has no order; give a list")
    strange = () if isinstance(column, np.ndarray) else (x for x in column if isinstance(x, Set | Mapping))
    for bag in strange:
        raise DataError(
            f"{VALUES}: column {name!r} has a {type(bag).__name__} as a value; give a list of ids for a bag"
        )
    try:
        return pa.array(column)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{VALUES}: column {name!r} cannot be read ({error}); give values of one type") from None


def _as_numpy(name: str, column: Tensor) -> NDArray[Any]:
    """A tensor's values; those of short floats, which NumPy has not, as float32."""
    if column.layout != torch.strided or column.is_meta:
        kind = "without values (on meta)" if column.is_meta else str(column.layout).removeprefix("torch.")
        raise DataError(f"{VALUES}: column {name!r} is a tensor {kind}; give a dense one, as .to_dense() makes it")
    column = column.detach().cpu()
    if column.is_floating_point() and column.dtype not in (torch.float16, torch.float32, torch.float64):
        column = column.float()
    try:
        return column.resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise DataError(f"{VALUES}: column {name!r} of {column.dtype} cannot be read ({error}); give numbers") from None


def for_one_process(config: Config) -> Config:
    """The same model, wherever it was trained."""
    parallel = type(config.parallel)(timeout_s=config.parallel.timeout_s)
    train = config.train.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"parallel": parallel, "train": train, "placement": PlacementConfig()})
