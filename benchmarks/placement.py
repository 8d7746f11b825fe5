"""Placements of every strategy, judged by accesses that they were not made from.

    python -m benchmarks.placement --table 2            communication against memory for copies (OPER Table 2)
    python -m benchmarks.placement --table 3            balance, search time, gap to the bound (OPER Table 3)
    python -m benchmarks.placement --figure 10          memory, look-ups, communication of every strategy (OPER Fig. 10)
    python -m benchmarks.placement --topology 2x4       nodes with links 4.21 times apart (OPER Fig. 8); any topology
    python -m benchmarks.placement --profile            sketches of a stream beside exact counts
    python -m benchmarks.placement --traces ../shared/data      real accesses: planned on one half, judged on the other

Several may be asked for at once. Data are drawn from curves fitted to Avazu, Criteo Kaggle and the shape of Criteo
Terabyte (`benchmarks.shapes`), 16,384 samples a rank unless said. Every line has the value, and beside it the paper's
or the bound; the last has the ratios that the targets are about.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import placement_links, placement_profile, placement_tables, placement_traces
from benchmarks.command import Report
from benchmarks.shapes import NAMES


def main(arguments: list[str] | None = None) -> None:
    """Runs what is asked for."""
    parser = _parser()
    options = parser.parse_args(arguments)
    report = Report("placement", options.output)
    shapes = (
        ("kaggle",) if options.quick and options.shape is None else tuple((options.shape or ",".join(NAMES)).split(","))
    )
    runs: list[Callable[[], None]] = []
    if 2 in options.table:
        runs.append(lambda: placement_tables.table_2(report, shapes, options.quick))
    if 3 in options.table:
        runs.append(lambda: placement_tables.table_3(report, shapes, options.quick))
    if options.figure:
        runs.append(lambda: placement_tables.figure_10(report, shapes))
    for name in options.topology:
        runs.append(lambda name=name: placement_links.topology(report, name, shapes, options.quick))
    if options.profile:
        runs.append(lambda: placement_profile.profiles(report, shapes, options.quick))
    if options.traces:
        runs.append(lambda: placement_traces.traces(report, options.traces))
    if not runs:
        parser.error("nothing asked for: give --table, --figure, --topology, --profile or --traces")
    for run in runs:
        run()
    report.finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--table", type=int, choices=(2, 3), action="append", default=[], help="of OPER")
    add("--figure", type=int, choices=(10,), help="of OPER")
    add("--topology", action="append", default=[], help="a shipped name or a TOML file")
    add("--profile", action="store_true", help="sketches of a stream beside exact counts")
    add("--traces", type=Path, metavar="FOLDER", help="a folder with criteo_kaggle, avazu and meta_traces")
    add("--shape", help=f"some of {', '.join(NAMES)}, separated by commas (default: all)")
    add("--quick", action="store_true", help="Kaggle alone, few cases, under 30 s")
    add("--output", type=Path, help="also append the lines to this file")
    return parser


if __name__ == "__main__":
    main()
