"""Runs of 2 ranks that are killed, and resumed by 1 to 4 ranks in another layout, end as runs that nothing disturbed.

    python -m tests.layouts --out layouts.jsonl    # every layout to every other; goes on where it was stopped
    python -m tests.layouts --ranks 3              # on 3 ranks alone

To 1e-6, of rows in 64 bits. Each case is a line of JSON; the exit status is 1 where one failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.durability import write
from tests.support.killed_runs import largest_difference, lines_of
from tests.support.lives import Lives
from tests.support.modes import FAST_ROWS, prepare_job

BEGUN_ON, TOLERANCE = 2, 1e-6
LAYOUTS = {
    "one-sided": ["parallel.transport=one_sided"],
    "collective": ["parallel.transport=collective"],
    "pipelined": ["parallel.transport=collective", "pipeline.depth=2", "pipeline.micro_batches=2"],
    "tiered": ["tables.storage=tiered", "tiers.fast_share=0.5"],
    "copies": ["placement.strategy=auto", "placement.extra_memory=0.3"],
    "copies, one-sided": ["placement.strategy=auto", "placement.extra_memory=0.3", "parallel.transport=one_sided"],
    "replicas": ["parallel.replicas=2"],
}


def is_possible(layout: str, ranks: int) -> bool:
    """Whether so many ranks can have it."""
    return ranks % 2 == 0 if layout == "replicas" else ranks > 1 or "copies" not in layout


def options_for(layout: str, ranks: int, run: Path) -> list[str]:
    """Of a run in a layout, on so many ranks."""
    fast_rows = f"tiers.fast_rows={4 * FAST_ROWS[ranks]}"
    common = ["tables.dtype=float64", "checkpoint.every_steps=3", "train.steps=16", f"run.folder={run}"]
    return [*LAYOUTS[layout], fast_rows, *common]


class Layouts:
    """Runs cases; what they have in common is run once.

    Args:
        folder: where runs are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lives = folder, Lives(prepare_job(folder))

    def run(self, begun: str, ended: str, ranks: int) -> dict[str, Any]:
        """What came of a case."""
        untouched, killed = self._folder / f"untouched {begun}", self._folder / f"killed {begun}"
        if not untouched.exists():
            done = self._lives.train(options_for(begun, BEGUN_ON, untouched), ranks=BEGUN_ON)
            assert not any(done.statuses), done
            self._lives.train(options_for(begun, BEGUN_ON, killed), "loop.step@8,rank1=kill", ranks=BEGUN_ON)
        run = shutil.copytree(killed, self._folder / "run")
        try:
            life = self._lives.train([*options_for(ended, ranks, run), "--resume"], ranks=ranks)
            if any(life.statuses):
                return {"problem": f"does not go on: {life}"}
            gap = largest_difference(run, untouched)
            steps = [[line["step"] for line in lines_of(each, "metrics.jsonl")] for each in (run, untouched)]
        finally:
            shutil.rmtree(run)
        problem = "" if gap <= TOLERANCE else "another model"
        return {"largest_difference": gap, "problem": problem or ("" if steps[0] == steps[1] else "other lines")}


def main() -> int:
    """Runs them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="1, 2, 3 and 4 by default")
    parser.add_argument("--out", type=Path, help="a file of lines, to which a later call adds what is not there yet")
    asked, done = parser.parse_args(), dict[str, str]()
    if asked.out and asked.out.exists():
        lines = [json.loads(line) for line in asked.out.read_text().splitlines()]
        done = {line["case"]: line["problem"] for line in lines}
    with tempfile.TemporaryDirectory(prefix="rowmesh-layouts-") as folder:
        layouts = Layouts(Path(folder))
        for begun in LAYOUTS:
            for ended in LAYOUTS:
                for ranks in asked.ranks or (1, 2, 3, 4):
                    case = f"{begun} → {ended} on {ranks}"
                    if case not in done and is_possible(ended, ranks):
                        line = {"case": case, **layouts.run(begun, ended, ranks)}
                        done[case] = line["problem"]
                        write(line, asked.out)
    num_failed = sum(map(bool, done.values()))
    write({"cases": len(done), "failed": num_failed}, None)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
