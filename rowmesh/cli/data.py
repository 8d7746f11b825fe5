"""`rowmesh data`: make and prepare data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from rowmesh._support.suggest import hint
from rowmesh.data.events import EventSchema, find_event_schema, prepare_events
from rowmesh.data.events.planted import PlantedEvents, drawn_request
from rowmesh.data.events.planted import synthesize_events as synthesize_drawn
from rowmesh.data.events.prepare import event_request
from rowmesh.data.events.sequences import SEQUENCES
from rowmesh.data.inputs import DataSource
from rowmesh.data.planted import CRITEO_ROWS, PlantedConfig
from rowmesh.data.prepare import prepare as prepare_data
from rowmesh.data.prepared import PREPARED, Prepared
from rowmesh.data.reorder import ReorderOptions, choose_tables, reorder_request
from rowmesh.data.reorder import reorder as reorder_data
from rowmesh.data.reorder.reorder import MIN_ROWS
from rowmesh.data.request import drawing_request, preparation_request
from rowmesh.data.splits import Splitter
from rowmesh.data.synthetic import DRAWN
from rowmesh.data.synthetic import synthesize as synthesize_data
from rowmesh.errors import ConfigurationError
from rowmesh.observe.progress import PartsProgress
from rowmesh.report.data_text import (
    is_current,
    print_best_ranking,
    print_drawn,
    print_prepared,
    print_reordered,
    print_sequences,
)

DEFAULTS = PlantedConfig()
EVENTS = PlantedEvents()
SHARES = Splitter()
ORDER = ReorderOptions()
Switch = Annotated[bool, Parameter(negative=())]
Files = Annotated[list[Path] | None, Parameter(consume_multiple=True, negative=())]

app = App(name="data")


@app.command
def synthesize(
    out: Path,
    *,
    samples: int = 1_000_000,
    held_out: int = 100_000,
    seed: int = DEFAULTS.seed,
    signal: float = DEFAULTS.signal,
    head: int = DEFAULTS.head,
    base_rate: float = DEFAULTS.base_rate,
    max_rows: int | None = None,
    multi_hot: Annotated[dict[str, int] | None, Parameter(negative=())] = None,
    format: Literal["parquet", "text"] = "parquet",
    overwrite: Switch = False,
    reuse: Switch = False,
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
        How informative the features are: the standard deviation of the true logits.
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
        Replace a folder that an earlier call of this command wrote.
    reuse
        Keep a folder that was written from the same files with the same options; replace another.
    """
    config = PlantedConfig(
        seed=seed,
        signal=signal,
        head=head,
        base_rate=base_rate,
        max_rows=max_rows,
        bag_sizes=_bag_sizes(multi_hot or {}),
    )
    counts = {"train": samples} | ({"validation": held_out, "test": held_out} if held_out else {})
    console = Console()
    if reuse and is_current(console, out, DRAWN, drawing_request(counts, config, format)):
        return
    with PartsProgress(console) as show:
        optimum = synthesize_data(out, counts, config, file_format=format, overwrite=overwrite or reuse, progress=show)
    print_drawn(console, out, optimum)


@app.command
def synthesize_events(
    out: Path,
    *,
    users: int = EVENTS.num_users,
    items: int = EVENTS.num_items,
    groups: int = EVENTS.num_groups,
    mean_events: int = EVENTS.mean_events,
    signal: float = EVENTS.signal,
    seed: int = EVENTS.seed,
    overwrite: Switch = False,
    reuse: Switch = False,
) -> None:
    """Draw events from a planted model of sequences, and prepare them; the best reachable ranking is known.

    Parameters
    ----------
    out
        Folder to write; it appears whole or not at all, prepared.
    users
        Number of users; each has 20 events or more, the last two of which are held out.
    items
        Number of items; no user sees an item twice.
    groups
        Number of groups of items; the next item depends on the group of the last item.
    mean_events
        Mean number of events of a user.
    signal
        How much likelier some groups are than others: the standard deviation of the log of the transitions.
    seed
        Equal seeds give equal events.
    overwrite
        Replace a folder that an earlier call of this command wrote.
    reuse
        Keep a folder that is there already.
    """
    planted = PlantedEvents(
        num_users=users, num_items=items, num_groups=groups, mean_events=mean_events, signal=signal, seed=seed
    )
    console = Console()
    if reuse and is_current(console, out, SEQUENCES, drawn_request(planted)):
        return
    with PartsProgress(console) as show:
        sequences = synthesize_drawn(out, planted, overwrite=overwrite or reuse, progress=show)
    print_sequences(console, sequences)
    print_best_ranking(console, sequences)


@app.command
def prepare(
    inputs: Annotated[list[Path], Parameter(negative=())],
    /,
    *,
    out: Path,
    schema: str | None = None,
    validation: Files = None,
    test: Files = None,
    validation_share: float = SHARES.validation,
    test_share: float = SHARES.test,
    split_by: Literal["order", "random"] = SHARES.how,
    seed: int = SHARES.seed,
    min_count: int = 2,
    max_bad_rows: int = 100,
    overwrite: Switch = False,
    reuse: Switch = False,
) -> None:
    """Turn raw files into memory-mappable splits whose ids are frequency ranks.

    Parameters
    ----------
    inputs
        Training files, or one folder with train*, validation* and test* files and a schema.toml.
    out
        Folder to write; it appears whole or not at all.
    schema
        criteo, avazu, or a TOML file that names the columns; for sequences of events movielens-100k, movielens-1m,
        movielens-csv, amazon-2014, amazon-2018, kuairand, or a TOML file with user, item and time.
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
        Seed of the random choice.
    min_count
        Ids seen less often in training share the last row of their table with unseen ones.
    max_bad_rows
        Rows that may be malformed; they are kept in quarantine.jsonl. A larger number stops the preparation.
    overwrite
        Replace a folder that an earlier call of this command wrote.
    reuse
        Keep a folder that was written from the same files with the same options; replace another.
    """
    if (of_events := find_event_schema(schema)) is not None:
        splitter = Splitter(validation=validation_share, test=test_share, how=split_by, seed=seed)
        if validation or test or splitter != Splitter() or min_count != 2:
            raise ConfigurationError(
                "the schema of an event table says what is held out and left out (split, k_core): leave out "
                "--validation, --test, --validation-share, --test-share, --split-by, --seed and --min-count"
            )
        _prepare_events(inputs, out, of_events, max_bad_rows, overwrite, reuse)
        return
    source = DataSource.find(inputs, schema, validation=validation or (), test=test or ())
    splitter = Splitter(validation=validation_share, test=test_share, how=split_by, seed=seed)
    if len(source.files) > 1:
        _check_unused(splitter, source)
        splitter = None
    options = {
        "splitter": splitter,
        "min_count": min_count,
        "max_bad_rows": max_bad_rows,
        "optimum": source.optimum,
    }
    console = Console()
    request = preparation_request(source.files, source.schema, **options)
    if reuse and is_current(console, out, PREPARED, request):
        return
    with PartsProgress(console) as show:
        prepared = prepare_data(
            source.files, out, source.schema, overwrite=overwrite or reuse, progress=show, **options
        )
    print_prepared(console, prepared)


@app.command
def reorder(
    folder: Path,
    *,
    out: Path,
    tables: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    min_rows: int = MIN_ROWS,
    hot_share: float = ORDER.hot_share,
    batch_size: int = ORDER.batch_size,
    prefix_rows: int = ORDER.prefix_rows,
    max_ids: int = ORDER.max_ids,
    max_edges: int = ORDER.max_edges,
    seed: int = ORDER.seed,
    overwrite: Switch = False,
    reuse: Switch = False,
) -> None:
    """Give ids that occur together neighbouring rows, so that tensor-train tables share more work.

    Parameters
    ----------
    folder
        What `rowmesh data prepare` wrote.
    out
        Folder to write; it appears whole or not at all.
    tables
        Tables to reorder; by default all of --min-rows rows or more.
    min_rows
        See --tables.
    hot_share
        Share of a table's rows, the most frequent, that stay in order of frequency.
    batch_size
        Samples of a training batch: ids of one batch occur together; in a multi-hot table those of one sample do.
    prefix_rows
        Consecutive rows that share a prefix, the last row factor of a tensor-train table; 0: that of chosen factors.
    max_ids
        Ids after the hot ones that may change places; memory is 256 bytes for each.
    max_edges
        Pairs of ids that are looked at in each table; memory is about 100 bytes for each.
    seed
        Seed of the choice of pairs.
    overwrite
        Replace a folder that an earlier call of this command, or of prepare, wrote.
    reuse
        Keep a folder that was written from the same data with the same options; replace another.
    """
    options = ReorderOptions(
        hot_share=hot_share,
        batch_size=batch_size,
        prefix_rows=prefix_rows,
        max_ids=max_ids,
        max_edges=max_edges,
        seed=seed,
    )
    source, console = Prepared.open(folder), Console()
    request = reorder_request(source, choose_tables(source, tables or (), min_rows), options)
    if reuse and is_current(console, out, PREPARED, request):
        return
    with PartsProgress(console) as show:
        reordered = reorder_data(
            source,
            out,
            tables=tables or (),
            min_rows=min_rows,
            options=options,
            overwrite=overwrite or reuse,
            progress=show,
        )
    print_reordered(console, reordered)


def _prepare_events(
    files: list[Path], out: Path, schema: EventSchema, max_bad_rows: int, overwrite: bool, reuse: bool
) -> None:
    """Prepares sequences, unless they are there and may be reused."""
    console = Console()
    if reuse and is_current(console, out, SEQUENCES, event_request(files, schema, max_bad_rows)):
        return
    with PartsProgress(console) as show:
        sequences = prepare_events(
            files, out, schema, max_bad_rows=max_bad_rows, overwrite=overwrite or reuse, progress=show
        )
    print_sequences(console, sequences)


def _check_unused(splitter: Splitter, source: DataSource) -> None:
    """Raises ConfigurationError for options of a cut where nothing is cut."""
    if splitter != Splitter():
        raise ConfigurationError(
            f"there are files of the {' and '.join(source.files)} splits, so nothing is cut: leave out "
            "--validation-share, --test-share, --split-by and --seed, or give training files only"
        )


def _bag_sizes(multi_hot: dict[str, int]) -> dict[int, int]:
    names = [f"C{i}" for i in range(1, len(CRITEO_ROWS) + 1)]
    for name in multi_hot:
        if name not in names:
            raise ConfigurationError(
                f"--multi-hot.{name}: no such table, there are C1 to {names[-1]}{hint(name, names)}"
            )
    return {names.index(name): size for name, size in multi_hot.items()}
