"""Pairs and triples of options, which change when and where things happen, train the model of the plain loop.

    python -m tests.options                                # 200 cases of seed 0
    python -m tests.options --seed 3 --count 2000 --out options.jsonl    # goes on where it was stopped
    python -m tests.options --seed 3 --case 17             # one of them

Every case draws two or three of the options below, and leaves the others as they are by default. It is compared with
plain torch in one process, to 1e-6, or 1e-12 of rows in 64 bits. Where the promise is that of equal bits, it is
compared with a plain loop over dense rows on as many ranks too. What rowmesh refuses has to be refused on all ranks,
by an error that names one of the options. Each case is a line of JSON; the exit status is 1 where one failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from rowmesh.errors import PeerError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.tables import Dynamic, TableSpec, TensorTrain, Tiers, Uniform
from rowmesh.tables.update_rules import RowWiseAdaGrad
from tests.collection.test_equivalence import assert_close
from tests.durability import write
from tests.support.plans import RULES, make_plan
from tests.support.ranks import RankPool
from tests.support.scenario import Scenario
from tests.support.tables import OPTIMIZERS, table
from tests.support.training import Trained, merged, train, train_reference

NUM_STEPS, TIMEOUT_S = 5, 90.0
BATCH_SIZES = {1: (7,), 2: (4, 3), 3: (3, 0, 4), 4: (2, 3, 1, 2)}
SHARDS = 3  # of dynamic tables
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
RULES_OF_UPDATES = {
    **OPTIMIZERS,
    "row_wise_adagrad, decay": RowWiseAdaGrad(lr=0.1, eps=0.1, initial_accumulator=0.01, weight_decay=0.1),
    "adam, decay": replace(OPTIMIZERS["adam"], weight_decay=0.1),
}
FORGETTING: list[dict[str, Any]] = [
    {},
    {"eviction": "lfu", "decay_steps": 2},
    {"ttl_steps": 2},
    {"admit_after": 2, "window_steps": 3},
    {"admit_after": 3, "eviction": "lru_lfu"},
]
Options = dict[str, Any]
Draw = random.Random


def _plan(draw: Draw) -> Options:
    """Rules of the thirds of every table, on one host or two."""
    rules = [draw.choice(RULES) for _ in range(3)]
    return {"rules": rules, "shift": draw.randrange(4), "hops": draw.random() < 0.5, "hosts": draw.choice([1, 1, 2])}


def _pipeline(draw: Draw) -> Options:
    return {
        "depth": draw.randrange(5),
        "micro_batches": draw.choice([1, 1, 2, 3, 4]),
        "exchange": draw.choice(["delta", "delta", "unsplit", "naive"]),
        "final_rows": draw.random() < 0.7,
        "sizes": draw.choice(["even", "light_ends"]),
        "clustering": draw.choice(["off", "off", "greedy", "light_ends"]),
        "overlap": draw.random() < 0.7,
    }


def _storage(draw: Draw) -> Options:
    kind = draw.choice(["tiered", "tensor_train", "dynamic", "demoting"])
    found = {"kind": kind, "tables": draw.choice([["user", "item"], ["user", "item", "day"], ["item"]])}
    return {**found, "rules": draw.choice(FORGETTING)} if kind == "dynamic" else found


def _one_of(*choices: Any) -> Callable[[Draw], Any]:
    return lambda draw: draw.choice(choices)


@dataclass(frozen=True)
class Option:
    """What may be drawn.

    Attributes:
        draw: one of its values, as JSON.
        words: of errors that refuse it; none: nothing may be refused for its sake alone.
    """

    draw: Callable[[Draw], Any]
    words: tuple[str, ...] = ()


OPTIONS = {
    "storage": Option(_storage, ("tiered", "tensor-train", "tensor_train", "dynamic", "cores", "fast memory")),
    "transport": Option(_one_of("collective", "one_sided"), ("transport", "one_sided", "one-sided", "collective")),
    "ranks": Option(_one_of(1, 3, 4), ("ranks",)),
    "plan": Option(_plan, ("plan",)),
    "replicas": Option(_one_of(2, 2, 4), ("replica",)),
    "pipeline": Option(_pipeline, ("pipeline", "micro-batch", "depth")),
    "accumulate": Option(_one_of(2, 3), ("accumulat",)),
    "evaluate": Option(_one_of(True)),
    "averages": Option(_one_of(True), ("averag",)),
    "clip": Option(_one_of(0.01, 0.3, 10.0), ("clip", "norm")),
    "scaler": Option(_one_of(True), ("scaler", "scaled")),
    "frozen": Option(_one_of(["user"], ["item"], ["day", "item"], ["user", "item", "day"]), ("frozen",)),
    "pooling": Option(_one_of("mean", "none", "mixed"), ("pool",)),
    "bags": Option(_one_of([1, 1], [2, 2], [0, 6], [0, 0])),
    "weights": Option(_one_of("given", "given", "trained"), ("weight",)),
    "optimizer": Option(_one_of(*(name for name in RULES_OF_UPDATES if name != "adagrad")), ("optimizer", "decay")),
    "dtype": Option(_one_of("float32", "bfloat16"), ("float32", "bfloat16", "dtype")),
    "checkpoint": Option(_one_of(1, 2, 3)),
    "migration": Option(lambda draw: {"before": draw.randrange(1, 4), **_plan(draw)}),
    "break": Option(_one_of([1], [2], [1, 2], [3, 4])),
    "pause": Option(_one_of([1], [2, 3], [1, 2, 3])),
}


PAIRS = list(combinations(OPTIONS, 2))


def drawn(seed: int, number: int) -> Options:
    """The options of a case: pairs and triples in turns; the first 200 have every pair.

    Example:
        >>> drawn(0, 3) == drawn(0, 3), len(drawn(0, 4)), len(drawn(0, 5))
        (True, 2, 3)
    """
    around, place = divmod(number, 2 * len(PAIRS))
    draw = random.Random(f"{seed} {number}")
    return {name: OPTIONS[name].draw(draw) for name in _names(seed, around)[place]}


@functools.cache
def _names(seed: int, around: int) -> list[tuple[str, ...]]:
    """Each pair once, and between them as many triples: first those with most pairs that no triple has had."""
    draw = random.Random(f"{seed} of {around}")
    pairs, triples = draw.sample(PAIRS, len(PAIRS)), list(combinations(OPTIONS, 3))
    draw.shuffle(triples)
    chosen, missing = list[tuple[str, ...]](), set(PAIRS)
    while len(chosen) < len(pairs):
        best = max(triples, key=lambda triple: len(missing.intersection(combinations(triple, 2))))
        triples.remove(best)
        missing -= {*combinations(best, 2)}
        chosen.append(best)
    return [names for both in zip(pairs, chosen, strict=True) for names in both]


def scenario_of(options: Options, seed: int, folder: Path) -> Scenario:
    """The job with these options.

    Raises:
        ConfigurationError: they do not go together.
    """
    ranks = options.get("ranks", 4 if options.get("replicas") == 4 or seed % 3 == 0 else 2)
    fewest, most = options.get("bags", [0, 2])
    scenario = Scenario(
        tables=_tables(options),
        batch_sizes=BATCH_SIZES[ranks],
        bag_sizes=(fewest, most),
        skew=2.0,
        is_weighted=options.get("weights") == "given",
        trains_weights=options.get("weights") == "trained",
        num_steps=NUM_STEPS,
        accumulate=options.get("accumulate", 1),
        decay=0.9,
        max_norm=options.get("clip"),
        is_scaled=options.get("scaler", False),
        evaluates=options.get("evaluate", False),
        averages=options.get("averages", False),
        pipeline=_pipelined(options),
        breaks=tuple(options.get("break", ())),
        pauses=tuple(options.get("pause", ())),
        reloads=(options["checkpoint"],) if "checkpoint" in options else (),
        folder=folder,
        seed=seed,
    )
    scenario = _stored(scenario, options.get("storage"))
    plans = [options[name] for name in ("plan", "migration") if name in options]
    if any(plan["hosts"] == 2 for plan in plans) and ranks % 2 == 0:
        scenario = replace(scenario, ranks_per_node=ranks // 2)
    replicas = options.get("replicas", 1)
    if "plan" in options:
        scenario = replace(scenario, plan=_plan_of(scenario, options["plan"], replicas))
    else:
        scenario = replace(scenario, replicas=replicas)
    if migration := options.get("migration"):
        scenario = replace(scenario, migrations=((migration["before"], _plan_of(scenario, migration, replicas)),))
    return scenario


def _tables(options: Options) -> tuple[TableSpec, ...]:
    pooling = options.get("pooling", "sum")
    poolings = ("mean", "none", "sum") if pooling == "mixed" else (pooling,) * 3
    frozen, rule = options.get("frozen", []), options.get("optimizer", "adagrad")
    more = {"dtype": DTYPES[options.get("dtype", "float64")], "optimizer": RULES_OF_UPDATES[rule]}
    sizes = {"user": (60, 3), "item": (300, 16), "day": (2, 3)}  # fewer days than ranks
    return tuple(
        replace(
            table(name, rows, dim, features=("user", "friend") if name == "user" else (name,), pooling=of_bag),
            frozen=name in frozen,
            initializer=Uniform(bound=1.0),
            **more,
        )
        for (name, (rows, dim)), of_bag in zip(sizes.items(), poolings, strict=True)
    )


def _pipelined(options: Options) -> Options | None:
    """Options of the pipeline; one that is left early, or pauses, needs one."""
    if not options.keys() & {"pipeline", "break", "pause"}:
        return None
    return {"verify": True, **options.get("pipeline", {"depth": 2})}


def _stored(scenario: Scenario, storage: Options | None) -> Scenario:
    """The job with tables that are stored otherwise."""
    if storage is None:
        return scenario
    names, kind = storage["tables"], storage["kind"]
    if kind in ("dynamic", "demoting"):
        rules: Options = storage["rules"] if kind == "dynamic" else {"mode": "demote", "store": "memory"}
        # Each shard has room for the ids of one step, however they are spread, and not for many more.
        capacities = {name: SHARDS * _most_ids(scenario, name) for name in names}
        dynamic = {name: Dynamic(capacity=capacities[name], shards=SHARDS, **rules) for name in names}
        return replace(scenario, dynamic=tuple(dynamic.items()))
    tables = tuple(_stored_as(kind, each) if each.name in names else each for each in scenario.tables)
    fast_rows = 60 * scenario.accumulate * max(1, scenario.bag_sizes[1] // 2)
    tiers = Tiers(fast_share=0.01, fast_rows=fast_rows, verify=True, poison=True, timeout_s=20.0)
    return replace(scenario, tables=tables, tiers=tiers if kind == "tiered" else None)


def _stored_as(kind: Any, spec: TableSpec) -> TableSpec:
    cores = TensorTrain(rank=1 if spec.num_rows < 10 else 2) if kind == "tensor_train" else None
    return replace(spec, storage=kind, tensor_train=cores)


def _most_ids(scenario: Scenario, name: str) -> int:
    """Distinct ids of a table that one step of all ranks has, at most, and at least one."""
    parts = range(scenario.accumulate)
    steps = [{i for part in parts for i in scenario.ids_of(name, step, part)} for step in range(scenario.num_steps)]
    return max(1, *map(len, steps))


def _plan_of(scenario: Scenario, drawn_plan: Options, replicas: int) -> Plan:
    """Of the tables that have rows which a plan may place."""
    ranks, rules, shift = scenario.world_size, drawn_plan["rules"], drawn_plan["shift"]
    per_node = scenario.ranks_per_node or ranks
    tables = [each for each in scenario.stored if each.storage in ("dense", "tiered")]
    shards = ranks // replicas if ranks % replicas == 0 else ranks

    def choose(number: int) -> tuple[str, int, int, bool]:
        return rules[number % 3], shift + number, shift + number, drawn_plan["hops"]

    plan = make_plan(tables, shards, min(per_node, shards), choose)
    copied = tuple(replace(each, replicas=replicas) for each in plan.tables)
    return Plan(copied, ranks, per_node)


def twin_of(scenario: Scenario, options: Options) -> Scenario | None:
    """The job on as many ranks that has to be equal to the bit; None where there is none besides itself."""
    if "clip" in options:  # norms are summed in the order of the rows' owners
        return None
    # Gradients that come with every micro-batch are added up in another order than those that travel whole.
    if options.get("pipeline", {}).get("exchange") == "naive" and options.keys() & {"plan", "storage"}:
        return None
    twin = replace(
        scenario,
        averages=scenario.averages and not options.keys() & {"checkpoint", "migration"},  # begin anew there
        tables=tuple(replace(each, storage="dense") if each.storage == "tiered" else each for each in scenario.tables),
        dynamic=tuple(
            (name, rules) for name, rules in scenario.dynamic if rules.mode == "drop"
        ),  # what is forgotten is
        tiers=None,
        reloads=(),
        breaks=(),
        pauses=(),
        is_scaled=False,
        migrations=(),
    )
    if scenario.replicas == 1 and "replicas" not in options:
        twin = replace(twin, plan=None)
    if (pipeline := scenario.pipeline) is not None:
        is_whole = pipeline.get("micro_batches", 1) == scenario.accumulate == 1
        is_whole = is_whole and pipeline.get("clustering", "off") == "off"
        twin = replace(twin, pipeline=None if is_whole else {**pipeline, "depth": 0, "overlap": False})
    return twin


# Runs


@dataclass(frozen=True)
class Refusal:
    """What a rank was told in place of a model."""

    kind: str
    text: str


def attempt(mesh: Mesh, scenario: Scenario, transport: str) -> Trained | Refusal:
    """Trains, or says how that was refused."""
    try:
        return train(mesh, scenario, transport)
    except PeerError:
        raise
    except RowmeshError as error:
        return Refusal(type(error).__name__, str(error))


def run_case(ranks: RankPool, options: Options, seed: int) -> Options:
    """What came of a case: "equal", "equal to the bit", "refused" or, where "problem" says why, "failed"."""
    line, began_s = {"options": options}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rowmesh-options-") as folder:
        try:
            line |= _outcome(ranks, options, seed, Path(folder))
        except Exception as error:  # of a rank, or of what it is compared with
            line |= {"outcome": "failed", "problem": f"{type(error).__name__}: {error}"[-4000:]}
    return {**line, "elapsed_s": round(time.monotonic() - began_s, 2)}


def _outcome(ranks: RankPool, options: Options, seed: int, folder: Path) -> Options:
    try:
        scenario = scenario_of(options, seed, folder)
    except RowmeshError as error:
        return _refused([Refusal(type(error).__name__, str(error))], options)
    transport = options.get("transport", "auto")
    found = _run(ranks, scenario, transport)
    if any(isinstance(each, Refusal) for each in found):
        return _refused(found, options)
    whole = merged(scenario, found)
    assert_close(scenario, whole, train_reference(scenario))
    if (twin := twin_of(scenario, options)) is None:
        return {"outcome": "equal", "problem": ""}
    # Where gradients come with every micro-batch, transports add them up in other orders.
    is_naive = (scenario.pipeline or {}).get("exchange") == "naive"
    theirs = merged(twin, _run(ranks, twin, transport if is_naive else "collective"))
    assert_same(whole, theirs)
    return {"outcome": "equal to the bit", "problem": ""}


def _run(ranks: RankPool, scenario: Scenario, transport: str) -> list[Any]:
    return ranks.run(attempt, scenario, transport, world_size=scenario.world_size, timeout_s=TIMEOUT_S)


def _refused(found: list[Any], options: Options) -> Options:
    """Checks that all ranks were refused alike, for something that was drawn."""
    refusals = [each for each in found if isinstance(each, Refusal)]
    assert len(refusals) == len(found), f"some ranks were refused, others trained: {refusals}"
    text = refusals[0].text
    assert {each.kind for each in refusals} == {refusals[0].kind}, f"ranks raise different errors: {refusals}"
    named = [name for name in options if any(word in text.lower() for word in OPTIONS[name].words)]
    assert named, f"refused by an error that names none of the options: {refusals[0]}"
    return {"outcome": "refused", "problem": "", "error": f"{refusals[0].kind}: {text}"}


def assert_same(mine: Trained, theirs: Trained) -> None:
    """To the bit; states of rows where both have them."""
    assert mine.losses == theirs.losses, "losses differ from those of the plain loop on as many ranks"
    pairs = [("vectors", *pair) for pair in zip(mine.outputs, theirs.outputs, strict=True)]
    pairs += [("network", *pair) for pair in zip(mine.head, theirs.head, strict=True)]
    if len(mine.averaged) == len(theirs.averaged):
        pairs += [("averages", *pair) for pair in zip(mine.averaged, theirs.averaged, strict=True)]
    for name, rows in mine.rows.items():
        pairs.append((f"rows of {name}", rows, theirs.rows[name]))
        pairs += [(f"{kind} of {name}", each, theirs.state[name][kind]) for kind, each in mine.state[name].items()]
    for what, one, other in pairs:
        assert torch.equal(one, other), f"{what} differ in their bits from those of the plain loop on as many ranks"


def options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="how many cases")
    parser.add_argument("--case", type=int, action="append", help="these alone")
    parser.add_argument("--out", type=Path, help="a file of lines, to which a later call adds what is not there yet")
    return parser.parse_args()


def main() -> int:
    """Runs them."""
    asked, outcomes = options(), dict[int, str]()
    if asked.out and asked.out.exists():
        lines = [json.loads(line) for line in asked.out.read_text().splitlines()]
        outcomes = {line["case"]: line["outcome"] for line in lines if line["seed"] == asked.seed}
    torch.set_num_threads(1)
    ranks = RankPool()
    try:
        for number in asked.case or range(asked.count):
            if number not in outcomes:
                line = {"case": number, "seed": asked.seed, **run_case(ranks, drawn(asked.seed, number), number)}
                outcomes[number] = line["outcome"]
                write(line, asked.out)
    finally:
        ranks.close()
    counts = Counter(outcomes.values())
    write({"cases": len(outcomes), **counts, "failed": counts["failed"]}, None)
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
