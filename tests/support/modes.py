"""The modes of training that a run which is killed is tried in, and the data that it trains on."""

from __future__ import annotations

from pathlib import Path

from rowmesh.data import PlantedConfig
from tests.support.clicks import prepare_clicks, write_config

BATCH_SIZE = 256
FAST_ROWS = {1: 170, 2: 100, 3: 80, 4: 60}  # of 381, 191, 130 and 96 that a rank has
_TIERED = ["tables.storage=tiered", "tiers.fast_share=0.01", "data.batch_size=64"]
_PIPELINED = "pipeline.depth=2"
_DYNAMIC = [
    "tables.storage=dynamic",
    "tables.dynamic.capacity=64",  # ids of one table come and go: it has 300
    "tables.dynamic.shards=2",
    "tables.initializer.bound=0.1",
    "data.batch_size=16",
]
_AVERAGED = ["parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=4"]
_BESIDE_STEPS = ["checkpoint.incremental=3", "checkpoint.asynchronous=true"]
MODES = {
    "plain": [],
    "pipelined, depth 1": ["pipeline.depth=1"],
    "pipelined, depth 2": [_PIPELINED],
    "micro-batches": ["pipeline.micro_batches=3"],
    "pipelined, micro-batches": [_PIPELINED, "pipeline.micro_batches=2"],
    "tiered": _TIERED,
    "tiered in files": [*_TIERED, "tiers.folder={run}-rows"],
    "tiered, pipelined": [*_TIERED, "pipeline.depth=1"],
    "copies": ["placement.strategy=auto", "placement.extra_memory=0.3", "placement.drift.check_every=4"],
    "exact replicas": ["parallel.replicas=2"],
    "averaged replicas": _AVERAGED,
    "averaged replicas, incremental, asynchronous": [*_AVERAGED, *_BESIDE_STEPS],
    "tensor-train": [
        "tables.tensor_train.min_rows=40",
        'tables.tensor_train.optimizer.name="adagrad"',
        "tables.tensor_train.rank=2",
    ],
    "dynamic": _DYNAMIC,
    "dynamic, pipelined, asynchronous": [*_DYNAMIC, _PIPELINED, "checkpoint.asynchronous=true"],
    "dynamic, incremental, asynchronous": [*_DYNAMIC, *_BESIDE_STEPS],
    "dynamic, averaged replicas, incremental, asynchronous": [*_DYNAMIC, *_AVERAGED, *_BESIDE_STEPS],
    "dynamic, incremental, sketch": [
        *_DYNAMIC,
        "checkpoint.incremental=3",
        "tables.dynamic.admit_after=2",
        "tables.dynamic.sketch_width=8",
        "tables.dynamic.eviction=lfu",
    ],
    "dynamic, demoting": [*_DYNAMIC, "tables.dynamic.mode=demote", "tables.dynamic.store=memory"],
    "dynamic, demoting, pipelined, incremental, asynchronous": [
        *_DYNAMIC,
        _PIPELINED,
        "tables.dynamic.mode=demote",
        "tables.dynamic.store=memory",
        "tables.dynamic.store_capacity=90",
        *_BESIDE_STEPS,
    ],
    "dynamic, averaged replicas, demoting, incremental, asynchronous": [
        *_DYNAMIC,
        *_AVERAGED,
        "tables.dynamic.mode=demote",
        "tables.dynamic.store=memory",
        *_BESIDE_STEPS,
    ],
    "asynchronous": ["checkpoint.asynchronous=true"],
    "incremental, asynchronous": _BESIDE_STEPS,
    "adam": ['tables.optimizer.name="adam"', 'schedule.name="cosine"', "schedule.warmup_steps=4"],
    "dropout": [
        "model.name=tests.support.own_models:Dropping",
        "model.bottom=[512, 256, 64]",  # the default: none is given
        "model.top=[512, 256]",
    ],
}
NEED_RANKS = ("copies", *(mode for mode in MODES if "replicas" in mode))
TRANSPORTS = ("one_sided", "collective")


def options_of(mode: str, ranks: int, run: Path, transport: str = "") -> list[str]:
    """The options of a run in a mode, into a folder; makes one for rows in files."""
    sight = 1.4 if "pipelined" in mode or "micro" in mode else 1.0  # two batches are in sight
    options = [option.format(run=run) for option in MODES[mode]]
    if "files" in mode:
        Path(f"{run}-rows").mkdir(parents=True, exist_ok=True)
    options += [f"tiers.fast_rows={int(FAST_ROWS[ranks] * sight)}", f"run.folder={run}"]
    return [*options, f"parallel.transport={transport}"] if transport and ranks > 1 else options


def counts_depend_on_life(mode: str) -> bool:
    """Whether numbers of bytes and hits depend on where a run was resumed: its fast memory begins empty."""
    return "pipelined" in mode or "micro" in mode or "tiered" in mode


def prepare_job(folder: Path) -> Path:
    """Draws data of five tables, one multi-hot, whose last batch has one sample; returns a configuration."""
    samples = {"train": 7 * BATCH_SIZE + 1, "validation": 300, "test": 501}
    planted = PlantedConfig(num_rows=(50, 7, 300, 40, 3), head=10, bag_sizes={2: 3})
    data = prepare_clicks(folder, samples, planted)
    more = ("optimizer.lr = 0.05", "[train]", "epochs = 4", "steps = 30", "log_every = 5")
    return write_config(folder / "clicks.toml", folder / "run", data.folder, *more, batch_size=BATCH_SIZE)
