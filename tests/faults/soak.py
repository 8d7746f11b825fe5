"""A soak: random configurations of one-sided transport, replicas and pipelines on fewer cores than ranks.

    python -m tests.faults.soak --configurations 100 --ranks 4 --cores 0,1 --busy 2
    python -m tests.faults.soak --configurations 100 --ranks 8 --cores 0,1 --busy 4 --seed 7

Each configuration is trained through a pipeline and once more in turn, to the same bits. A rank that is waited for in
vain, or a mesh on which nothing runs any more, is a failure; so is a configuration that takes longer than the ranks
wait. Prints a line for each failure, for every hundred configurations, and at the end; the exit status is 1 if anything
failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, seed, settings

from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import valid_replicas
from tests.support.jobs import pipelined_jobs
from tests.support.pipelines import same
from tests.support.plans import in_groups
from tests.support.ranks import RankError, RankPool
from tests.support.scenario import Scenario
from tests.support.training import train

_AT_A_TIME = 100  # configurations that are drawn, and reported


def options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=100, help="how many")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cores", default="0,1", help="their numbers, separated by commas")
    parser.add_argument("--busy", type=int, default=2, help="busy programs beside the ranks, on the same cores")
    parser.add_argument("--seed", type=int, default=0, help="of the configurations")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long ranks wait for each other")
    return parser.parse_args()


@st.composite
def jobs(draw: st.DrawFn, world_size: int) -> Scenario:
    """Jobs through a pipeline, most of them with replicas of some tables."""
    scenario: Scenario = draw(pipelined_jobs(world_size))
    if draw(st.integers(0, 4)) == 0:
        return scenario
    sizes = st.sampled_from(valid_replicas(world_size))
    replicas = {spec.name: draw(sizes) for spec in scenario.tables}
    together, mode = draw(st.sampled_from(["shards", "replicas"])), draw(st.sampled_from(["exact", "average"]))
    return in_groups(scenario, replicas, together, mode)


def drawn(world_size: int, count: int, number: int) -> Iterator[Scenario]:
    """So many different jobs, the same ones for the same seed."""
    while count > 0:
        found = _draw(world_size, number)
        yield from found[:count]
        count -= len(found)
        number += 1


def _draw(world_size: int, number: int) -> list[Scenario]:
    found: list[Scenario] = []

    @settings(
        max_examples=_AT_A_TIME,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(jobs(world_size))
    def collect(scenario: Scenario) -> None:
        found.append(scenario)

    collect()
    return found


def train_twice(mesh: Mesh, scenario: Scenario) -> bool:
    """Whether a pipeline trains what is trained in turn."""
    in_turn = (scenario.pipeline or {}) | {"depth": 0, "overlap": False}
    expected = train(mesh, replace(scenario, pipeline=in_turn), "one_sided")
    return same(train(mesh, scenario, "one_sided"), expected)


def be_busy() -> None:
    """Another program: in a session of its own, among which some systems divide the processor."""
    os.setsid()
    parent = os.getppid()
    while os.getppid() == parent:  # however that one ends
        sum(range(100_000))


def main() -> int:
    """Runs it."""
    asked = options()
    os.sched_setaffinity(0, {int(core) for core in asked.cores.split(",")})
    busy = [multiprocessing.get_context("fork").Process(target=be_busy, daemon=True) for _ in range(asked.busy)]
    for process in busy:
        process.start()
    pool, began, slowest_s, num_failed, count = RankPool(asked.timeout_s, asked.ranks), time.monotonic(), 0.0, 0, 0
    pool.run(rank_of, world_size=asked.ranks)
    try:
        for count, scenario in enumerate(drawn(asked.ranks, asked.configurations, asked.seed), 1):
            start_s = time.monotonic()
            if problem := problem_of(pool, scenario, asked):
                num_failed += 1
                write(configuration=count, scenario=repr(scenario), problem=problem)
            slowest_s = max(slowest_s, time.monotonic() - start_s)
            if count % _AT_A_TIME == 0:
                write(done=count, failed=num_failed)
    finally:
        pool.close()
        for process in busy:
            process.kill()
            process.join()
        elapsed_s = round(time.monotonic() - began, 1)
        write(done=count, failed=num_failed, elapsed_s=elapsed_s, slowest_s=round(slowest_s, 1), **vars(asked))
    return int(num_failed > 0)


def rank_of(mesh: Mesh) -> int:
    """Has the ranks start."""
    return mesh.rank


def problem_of(pool: RankPool, scenario: Scenario, asked: argparse.Namespace) -> str:
    """What went wrong with a configuration."""
    try:
        are_same = pool.run(train_twice, scenario, world_size=asked.ranks, timeout_s=4 * asked.timeout_s)
    except RankError as error:
        return str(error)
    return "" if all(are_same) else f"trained something else; equal on the ranks: {are_same}"


def write(**line: object) -> None:
    """Prints a line."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
