"""`rowmesh data`: make and prepare data sets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from rowmesh.data import progress
from rowmesh.data.inputs import DataSource
from rowmesh.data.planted import CRITEO_ROWS, PlantedConfig
from rowmesh.data.prepare import prepare as prepare_data
from rowmesh.data.prepared import SPLITS, Prepared
from rowmesh.data.schema import nearest
from rowmesh.data.splits import Splitter
from rowmesh.data.synthetic import synthesize as synthesize_data
from rowmesh.errors import ConfigurationError

PLAIN_INTERVAL_S = 5.0

app = App(name="data", help="Make and prepare data sets.")


@app.command
def synthesize(
    out: Path,
    *,
    samples: int = 1_000_000,
    held_out: int = 100_000,
    seed: int = 0,
    signal: float = 1.3,
    head: int = 50,
    base_rate: float = 0.25,
    max_rows: int | None = None,
    multi_hot: Annotated[dict[str, int] | None, Parameter(negative=())] = None,
    format: Literal["parquet", "text"] = "parquet",
    overwrite: bool = False,
) -> None:
    """Draw a data set of Criteo's shape from a planted model whose best reachable scores are known.

    Parameters
    ----------
    out
        Folder to write; give it to `rowmesh data prepare`.
    samples
        Training samples.
    held_out
        Samples of the validation split and of the test split.
    seed
        Equal seeds give equal data.
    signal
        How much the features tell: the standard deviation of the true logits.
    head
        How many ids of each table matter to the label; more are harder to learn.
    base_rate
        Share of positive labels.
    max_rows
        Cap on the number of distinct ids of a table (Criteo's largest has 10,131,227).
    multi_hot
        Multi-hot tables and their mean number of ids a sample, as in --multi-hot.C1 10.
    format
        parquet, or text for Criteo's raw tab-separated format.
    overwrite
        Replace a folder that is not empty.
    """
    config = PlantedConfig(
        seed=seed,
        signal=signal,
        head=head,
        base_rate=base_rate,
        max_rows=max_rows,
        bag_sizes=_bag_sizes(multi_hot or {}),
    )
    counts = {"train": samples, "validation": held_out, "test": held_out}
    console = Console()
    with _progress(console) as show:
        optimum = synthesize_data(
            out,
            {split: count for split, count in counts.items() if count},
            config,
            file_format=format,
            overwrite=overwrite,
            progress=show,
        )
    table = Table(title=f"Drawn into {out}")
    for column in ("split", "samples", "positive rate", "best AUC", "best log-loss"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split, values in optimum.items():
        table.add_row(
            split,
            f"{values['samples']:,.0f}",
            f"{values['positive_rate']:.4f}",
            f"{values['auc']:.4f}",
            f"{values['log_loss']:.4f}",
        )
    console.print(table)


@app.command
def prepare(
    inputs: Annotated[list[Path], Parameter(negative=())],
    /,
    *,
    out: Path,
    schema: str | None = None,
    validation: Annotated[list[Path] | None, Parameter(consume_multiple=True, negative=())] = None,
    test: Annotated[list[Path] | None, Parameter(consume_multiple=True, negative=())] = None,
    validation_share: float = 0.1,
    test_share: float = 0.1,
    split_by: Literal["order", "random"] = "order",
    seed: int = 0,
    min_count: int = 2,
    max_bad_rows: int = 100,
    overwrite: bool = False,
) -> None:
    """Turn raw files into memory-mappable splits whose ids are frequency ranks.

    Parameters
    ----------
    inputs
        Training files, or one folder with train*, validation* and test* files and a schema.toml.
    out
        Folder to write; it appears whole or not at all.
    schema
        criteo, avazu, or a TOML file that names the columns.
    validation
        Files of the validation split.
    test
        Files of the test split.
    validation_share
        Share of the samples cut off for validation, where only training files are given.
    test_share
        Share of the samples cut off for the test, where only training files are given.
    split_by
        order cuts off the last samples (the later ones of a log), random a reproducible choice.
    seed
        Of the random choice.
    min_count
        Ids seen less often in training share the last row of their table with unseen ones.
    max_bad_rows
        Rows that may be malformed; they are kept in quarantine.jsonl. One more stops the preparation.
    overwrite
        Replace a folder that is not empty.
    """
    source = DataSource.find(inputs, schema, validation=validation or (), test=test or ())
    splitter = None
    if len(source.files) == 1:
        splitter = Splitter(validation=validation_share, test=test_share, how=split_by, seed=seed)
    console = Console()
    with _progress(console) as show:
        prepared = prepare_data(
            source.files,
            out,
            source.schema,
            splitter=splitter,
            min_count=min_count,
            max_bad_rows=max_bad_rows,
            overwrite=overwrite,
            optimum=source.optimum,
            progress=show,
        )
    _print_summary(prepared, console)


def _bag_sizes(multi_hot: dict[str, int]) -> dict[int, int]:
    names = [f"C{i}" for i in range(1, len(CRITEO_ROWS) + 1)]
    for name in multi_hot:
        if name not in names:
            raise ConfigurationError(
                f"--multi-hot.{name}: no such table, there are C1 to {names[-1]}{nearest(name, names)}"
            )
    return {names.index(name): size for name, size in multi_hot.items()}


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[progress.Progress]:
    """A bar for each thing that is done; a plain line now and then where there is no terminal."""
    if not console.is_terminal:
        yield _plain_progress(console)
        return
    bars = Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    tasks = {}

    def show(what: str, share: float) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=1.0)
        bars.update(tasks[what], completed=share)

    with bars:
        yield show


def _plain_progress(console: Console) -> progress.Progress:
    last = time.monotonic()

    def show(what: str, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL_S:
            last = now
            console.print(f"{what}: {share:.0%}")

    return show


def _print_summary(prepared: Prepared, console: Console) -> None:
    splits = Table(title=f"Prepared {prepared.folder}")
    for column in ("split", "samples", "positive rate", "best AUC", "best log-loss"):
        splits.add_column(column, justify="left" if column == "split" else "right")
    for name, split in prepared.splits.items():
        best = split.optimum or {}
        splits.add_row(
            name,
            f"{split.samples:,}",
            f"{split.positive_rate:.4f}",
            *(f"{best[score]:.4f}" if score in best else "unknown" for score in ("auc", "log_loss")),
        )
    console.print(splits)
    tables = Table(title=f"Tables (ids seen fewer than {prepared.min_count} times in training are rare)")
    shares = [split for split in SPLITS if split in prepared.splits]
    for column in ("table", "rows", "distinct ids", *(f"rare, {split}" for split in shares)):
        tables.add_column(column, justify="left" if column == "table" else "right")
    for table in prepared.tables:
        tables.add_row(
            f"{table.name} (multi-hot)" if table.multi_hot else table.name,
            f"{table.num_rows:,}",
            f"{table.num_distinct:,}",
            *(f"{table.rare_share[split]:.2%}" for split in shares),
        )
    console.print(tables)
    where = f", kept in {prepared.folder / 'quarantine.jsonl'}" if prepared.bad_rows else ""
    console.print(f"bad rows: {prepared.bad_rows}{where}")
