"""What `rowmesh data` prints: what was reused or is made again, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rowmesh._support.files.manifest import why_stale
from rowmesh.data.events import Sequences
from rowmesh.data.prepared import SPLITS, Prepared
from rowmesh.data.reorder.groups import LEAST_APART
from rowmesh.data.reorder.order import LEAST_GAIN, LEAST_HELD_OUT
from rowmesh.data.scales import DenseScale
from rowmesh.report.printing import show, table_of_numbers, write

MAX_REASONS = 5


def is_current(console: Console, folder: Path, kind: str, request: Mapping[str, Any]) -> bool:
    """Whether a folder is what is asked for; says so, or says why it is not."""
    reasons = why_stale(folder, kind, request)
    if reasons == []:
        write(console, f"reused {folder}: made from the same files with the same options")
        return True
    if reasons:
        more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        write(console, f"making {folder} again: {'; '.join(reasons[:MAX_REASONS])}{more}")
    return False


def print_drawn(console: Console, out: Path, optimum: Mapping[str, Mapping[str, float]]) -> None:
    """The data that were drawn, and the scores that no model can beat."""
    table = table_of_numbers("split", "samples", "positive rate", "best AUC", "best log-loss")
    for split, values in optimum.items():
        table.add_row(split, f"{values['samples']:,.0f}", f"{values['positive_rate']:.4f}", *_best(values))
    write(console, f"drawn into {out}")
    show(console, table)


def print_prepared(console: Console, prepared: Prepared) -> None:
    """The splits and tables of a prepared data set."""
    write(console, f"prepared {prepared.folder}")
    show(console, _splits(prepared))
    if prepared.dense_scales:
        write(console, "dense features, standardized by means of the training split; missing values become 0, the mean")
        show(console, _dense(prepared.dense_scales))
    write(console, f"tables ({_what_is_rare(prepared.min_count)})")
    show(console, _tables(prepared))
    where = f", kept in {prepared.folder / 'quarantine.jsonl'}" if prepared.bad_rows else ""
    write(console, f"bad rows: {prepared.bad_rows}{where}")


def print_sequences(console: Console, sequences: Sequences) -> None:
    """Prints the counts of kept and left-out events, the users of each split, and the share of tied last events."""
    counts, schema = sequences.counts, sequences.schema
    write(console, f"prepared {sequences.folder}")
    table = table_of_numbers("users", "items", "events", "not positive", "outside the core", "bad rows")
    kept = (counts.num_users, counts.num_items, counts.num_events)
    left_out = (counts.num_negative, counts.num_outside_core, counts.bad_rows)
    table.add_row(*(f"{number:,}" for number in (*kept, *left_out)))
    show(console, table)
    splits = table_of_numbers("split", "users")
    for split in SPLITS:
        splits.add_row(split, f"{len(sequences.users(split)):,}")
    show(console, splits)
    share = counts.num_tied_last / counts.num_users
    rule = "files" if schema.ties == "file" else "frequency of items"
    write(
        console,
        f"{share:.1%} of users have their last two events at one time; the order of the {rule} decides which is the "
        "last (ties in the schema)",
    )


def print_best_ranking(console: Console, sequences: Sequences) -> None:
    """Prints the scores of the best ranking on events that were drawn."""
    for split, best in sequences.optimum.items():
        write(console, f"{split}: the best ranking reaches NDCG@10 {best['ndcg@10']:.5f}, HR@10 {best['hr@10']:.5f}")


def print_reordered(console: Console, reordered: Prepared) -> None:
    """The result of reordering: rows that changed places, the gain, and the time."""
    assert reordered.reordering is not None
    write(console, f"reordered {reordered.folder}; prefixes that a held out batch reads before and after")
    table = table_of_numbers("table", "rows", "reordered", "pairs", "communities", "before", "after", "seconds")
    for name, facts in reordered.reordering["tables"].items():
        rows = reordered.unordered_rows(name)
        table.add_row(
            Text(name),
            f"{reordered.table(name).num_rows:,}",
            f"{len(rows):,}",
            f"{facts['num_edges']:,}",
            f"{facts['communities']:,}" if rows else "",
            *(f"{facts[key]:,.1f}" for key in ("prefixes_before", "prefixes_after", "elapsed_s")),
        )
    show(console, table)
    for line in _unchanged(reordered.reordering["tables"]):
        write(console, line)


def _unchanged(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why tables keep their order."""
    unjudged = [name for name, facts in tables.items() if facts["held_out_batches"] < LEAST_HELD_OUT]
    judged = [name for name, facts in tables.items() if not facts["num_ids"] and name not in unjudged]
    lines = []
    if judged:
        fewer = f"no other made batches read {LEAST_GAIN:.0%} fewer prefixes"
        lines.append(f"{', '.join(judged)} stay in order of frequency: {fewer}")
    if unjudged:
        few = f"fewer than {LEAST_APART * LEAST_HELD_OUT} batches, too few to judge another"
        advice = "lower --batch-size or prepare more samples"
        lines.append(f"{', '.join(unjudged)} stay in order of frequency: {few}; {advice}")
    return lines


def _what_is_rare(min_count: int) -> str:
    if min_count < 2:
        return "ids that training has not seen are rare, and share the last row"
    return f"ids seen fewer than {min_count} times in training are rare, and share the last row"


def _splits(prepared: Prepared) -> Table:
    is_known = any(split.optimum for split in prepared.splits.values())
    labels = prepared.schema.labels
    is_plain = len(labels) == 1 and labels[0].kind == "binary" and prepared.schema.weight is None
    heads = ["positive rate"] if is_plain else [f"mean of {label.name}" for label in labels]
    best_heads = ("best AUC", "best log-loss") if is_known else ()
    table = table_of_numbers("split", "samples", *map(escape, heads), *best_heads)
    for name, split in prepared.splits.items():
        best = _best(split.optimum or {}) if is_known else ()
        table.add_row(name, f"{split.samples:,}", *(f"{split.label_means[label.name]:.4f}" for label in labels), *best)
    return table


def _dense(scales: Sequence[DenseScale]) -> Table:
    splits = list(scales[0].missing)
    table = table_of_numbers("feature", "logarithm", "mean", "deviation", *(f"missing, {split}" for split in splits))
    for scale in scales:
        shares = (f"{scale.missing[split]:.2%}" for split in splits)
        table.add_row(Text(scale.name), "yes" if scale.log1p else "", f"{scale.mean:.4g}", f"{scale.std:.4g}", *shares)
    return table


def _tables(prepared: Prepared) -> Table:
    names = [split for split in SPLITS if split in prepared.splits]
    table = table_of_numbers("table", "rows", "distinct ids", *(f"rare, {split}" for split in names))
    for entry in prepared.tables:
        table.add_row(
            Text(f"{entry.name} (multi-hot)" if entry.multi_hot else entry.name),
            f"{entry.num_rows:,}",
            f"{entry.num_distinct:,}",
            *(f"{entry.rare_share[split]:.2%}" for split in names),
        )
    return table


def _best(scores: Mapping[str, float]) -> Sequence[str]:
    return [f"{scores[name]:.4f}" if name in scores else "unknown" for name in ("auc", "log_loss")]
