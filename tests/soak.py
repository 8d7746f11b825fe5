"""A soak: a long run that is killed at drawn moments and changes its number of ranks ends as one that nothing disturbs.

    python -m tests.soak                          # 5,000 steps, ten kills, 2 → 3 → 2 ranks
    python -m tests.soak --same-ranks             # ten kills, 2 ranks all along: the same model to the bit
    python -m tests.soak --steps 500 --kills 3    # a short one

Every kill is a SIGKILL of one rank at a named point, drawn with its count: amid steps, while a checkpoint is written or
while the run resumes. Checkpoints are written every so many steps. A line of JSON for each life, and one at the end,
with the largest relative difference of any row; the exit status is 1 where that is not 0 on the same ranks, or above
1e-6 on others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rowmesh.checkpoint.series import Series, verify
from rowmesh.data import PlantedConfig
from tests.support.clicks import prepare_clicks, write_config
from tests.support.killed_runs import largest_difference, lines_of, model_of
from tests.support.lives import Lives

BATCH_SIZE, STEPS_PER_EPOCH = 64, 100
OTHER_RANKS = 3
TOLERANCE = 1e-6
POINTS = ["loop.step", "engine.fetched", "engine.push", "checkpoint.write_rows", "checkpoint.publish", "resume.loaded"]


def options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=int, default=40, help="steps between two checkpoints")
    parser.add_argument("--ranks", type=int, default=2, help=f"at first and at last; {OTHER_RANKS} between")
    parser.add_argument("--same-ranks", action="store_true", help="no change of the number of ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("options", nargs="*", help="of the run: parallel.transport=collective, say")
    return parser.parse_args()


def prepare(folder: Path, steps: int) -> Path:
    """Draws the data; returns the configuration, in 64 bits, so that rounding stays far from the tolerance."""
    planted = PlantedConfig(num_rows=(50, 7, 3000, 40, 3), head=10, bag_sizes={2: 3})
    data = prepare_clicks(folder, {"train": BATCH_SIZE * STEPS_PER_EPOCH - 1, "test": 500}, planted)
    epochs = -(-steps // STEPS_PER_EPOCH)
    lines = ('dtype = "float64"', "[train]", f"epochs = {epochs}", f"steps = {steps}", "log_every = 25")
    return write_config(folder / "clicks.toml", folder / "run", data.folder, *lines, batch_size=BATCH_SIZE)


def drawn_kills(asked: argparse.Namespace) -> list[tuple[str, int, int]]:
    """A fault, how many ranks there are by then, and after which step the life that it ends should begin at most."""
    draw, length = random.Random(asked.seed), asked.steps // (asked.kills + 1)
    kills = []
    for number in range(asked.kills):
        is_between = not asked.same_ranks and asked.kills // 3 <= number < 2 * asked.kills // 3
        ranks = OTHER_RANKS if is_between else asked.ranks
        point = POINTS[number] if number < len(POINTS) - 1 else draw.choice(POINTS[: 5 if number == 0 else 6])
        count = draw.randrange(length // 2, length)
        if point.startswith("checkpoint"):
            count = max(1, count // asked.every)
        victim = 0 if point == "checkpoint.publish" else draw.randrange(ranks)
        at = 1 if point == "resume.loaded" else count
        kills.append((f"{point}@{at},rank{victim}=kill", ranks, number))
    return kills


def check(life: Any, victim_killed: bool) -> None:
    """Raises AssertionError where a life did not end as it should."""
    assert (-9 in life.statuses) if victim_killed else not any(life.statuses), life


def main() -> int:
    """Runs it."""
    asked, began_s = options(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rowmesh-soak-") as name:
        folder = Path(name)
        lives, run, untouched = Lives(prepare(folder, asked.steps)), folder / "run", folder / "untouched"
        every = f"checkpoint.every_steps={asked.every}"
        first = lives.train([every, *asked.options, f"run.folder={untouched}"], ranks=asked.ranks, limit_s=3600)
        check(first, victim_killed=False)
        write(life="untouched", ranks=asked.ranks, elapsed_s=round(time.monotonic() - began_s, 1))
        words = [every, *asked.options, f"run.folder={run}", "--resume", "auto"]
        for fault, ranks, number in drawn_kills(asked):
            life = lives.train(words, fault, ranks=ranks, limit_s=3600)
            check(life, victim_killed=True)
            steps = Series(run / "checkpoints").steps()
            for step in steps:
                verify(Series(run / "checkpoints").at(step))
            write(life=number, ranks=ranks, fault=fault, checkpoints=steps)
        check(lives.train(words, ranks=asked.ranks, limit_s=3600), victim_killed=False)
        gap = largest_difference(run, untouched)
        logs = [line["step"] for line in lines_of(run, "metrics.jsonl")]
        is_same_log = logs == [line["step"] for line in lines_of(untouched, "metrics.jsonl")]
        is_equal = model_of(run) == model_of(untouched) if asked.same_ranks else gap <= TOLERANCE
        elapsed_s = round(time.monotonic() - began_s, 1)
        write(ok=is_equal and is_same_log, largest_difference=gap, same_log=is_same_log, elapsed_s=elapsed_s)
    return int(not (is_equal and is_same_log))


def write(**line: Any) -> None:
    """Prints a line."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
