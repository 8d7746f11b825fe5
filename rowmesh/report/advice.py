"""Advice about a run: rules with numbers that find what was slow, overfits, or is not right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from rowmesh.placement.text import share_text
from rowmesh.report.run_record import RunRecord, thinned
from rowmesh.report.run_tables import Tables
from rowmesh.report.traffic import hit_rate

WAITS_FOR_DATA, WAITS_FOR_ROWS, WAITS_FOR_SUMS = 0.10, 0.30, 0.25
OVERFITS, STILL_FALLS, MISCALIBRATED, SLOWS_DOWN = 0.005, 0.005, 0.10, 0.80
FOUND_IN_TIER, UNEVEN_MEMORY, RARE, OFF_PREDICTION, BELOW_OPTIMUM = 0.80, 1.3, 0.5, 0.20, 0.01
FEWEST_LINES = 10
_NAMED = 4


@dataclass(frozen=True)
class Advice:
    """Something to do.

    Attributes:
        title: what is the matter.
        evidence: the numbers that show it.
        action: what to try.
    """

    title: str
    evidence: str
    action: str


Rule = Callable[[RunRecord, Tables], Iterator[Advice]]


def advise(record: RunRecord, tables: Tables) -> list[Advice]:
    """Everything that a rule finds, what costs most first."""
    return [advice for rule in RULES for advice in rule(record, tables)]


def _overfits(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    """The log-loss of the validation split rose after its least, and the model is not that of then."""
    patience = record.setting("train.patience", 0)
    if not (isinstance(patience, int) and patience > 0):
        yield from _rose(record)


def _rose(record: RunRecord) -> Iterator[Advice]:
    """The log-loss of the validation split rose after its least."""
    split = str(record.setting("data.validation", "validation"))
    points = record.series("log_loss", split)
    if len(points) < 3:
        return
    (step, least), (end, last) = min(points, key=lambda point: point[1]), points[-1]
    if last > least * (1 + OVERFITS):
        yield Advice(
            "The model overfits",
            f"the log-loss on {split} was least after step {step:,.0f} ({least:.5f}) and is {last:.5f} after step "
            f"{end:,.0f}, {share_text(last / least - 1)} more",
            f"Stop there (train.steps={step:.0f}), lower tables.optimizer.lr, or add optimizer.weight_decay",
        )


def _still_falls(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    """The training loss of the last tenth is below that of the tenth before, and nothing says that it overfits."""
    losses = [loss for _, loss in record.series("loss")]
    tenth = len(losses) // 10
    if len(losses) < 2 * FEWEST_LINES or next(_rose(record), None) is not None:
        return
    last, before = fmean(losses[-tenth:]), fmean(losses[-2 * tenth : -tenth])
    if last < before * (1 - STILL_FALLS):
        yield Advice(
            "The loss still falls",
            f"its mean over the last tenth of the steps is {last:.4f}, over the tenth before {before:.4f}",
            "Train longer (train.epochs), or at a higher learning rate at the end (schedule.final)",
        )


def _waits_for_data(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    # In a pipeline the step waits for more than data, and another thread waits for data without harm: both must.
    found = (_share(record, "data"), record.mean("waited_for_data_share"))
    share = min((each for each in found if each is not None), default=0.0)
    if share > WAITS_FOR_DATA:
        yield Advice(
            "Steps wait for data",
            f"{share_text(share)} of the time no batch was ready",
            "Keep the data on a local disk that is fast enough, and leave each rank a core for the thread that reads; "
            "fewer ranks a host read less at once",
        )


def _waits_for_pipeline(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    """Batches whose data are there are not ready: they are routed, or their rows prefetched, too late."""
    depth = record.setting("pipeline.depth", 0)
    share, for_data = _share(record, "data"), record.mean("waited_for_data_share") or 0.0
    if isinstance(depth, int) and depth > 0 and share is not None and share - for_data > WAITS_FOR_DATA:
        yield Advice(
            "The pipeline is not far enough ahead",
            f"{share_text(share)} of a step waits for a batch to be ready, {share_text(for_data)} for its data",
            f"Set pipeline.depth={depth + 1}, and leave each rank cores for the threads of its pipeline",
        )


def _waits_for_rows(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    rows, update = _share(record, "rows"), _share(record, "update")
    if rows is None or update is None or rows + update <= WAITS_FOR_ROWS:
        return
    shares = f"{share_text(rows)} of a step goes to looking rows up and {share_text(update)} to updating them"
    off = record.setting("pipeline.depth", 0) == 0 and record.setting("pipeline.micro_batches", 1) == 1
    many = (record.ranks or 1) > 1
    if off and many:
        yield Advice(
            "Rows take long, and nothing hides it",
            shares,
            "Set pipeline.depth=auto and pipeline.micro_batches=auto: rows are fetched while another batch is "
            "computed, and the model is the same",
        )
    elif many and not (record.setting("placement.plan") or record.setting("placement.strategy")):
        yield Advice(
            "Rows take long",
            shares,
            "Set placement.strategy=auto: every rank gets copies of the rows read most; rowmesh plan says what that "
            "saves",
        )


def _waits_for_sums(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    share = _share(record, "all_reduce")
    if share is not None and share > WAITS_FOR_SUMS and (record.ranks or 1) > 1:
        parameters = record.about.get("network_parameters")
        of = f" of {parameters:,} parameters" if isinstance(parameters, int) else ""
        yield Advice(
            "Ranks wait for each other's gradients",
            f"{share_text(share)} of a step goes to averaging the gradients{of} of the network",
            "Larger batches (data.batch_size) need it less often; ranks with unlike numbers of cores wait for the "
            "slowest",
        )


def _idle_cores(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    """The network dominates, and cores of one host are left."""
    share = _share(record, "network")
    threads = (record.environment.get("torch") or {}).get("threads")
    cores = (record.environment.get("hardware") or {}).get("usable threads")
    if share is None or not isinstance(threads, int) or not isinstance(cores, int) or record.about.get("hosts") != 1:
        return
    busy = threads * (record.ranks or 1)
    if share > 0.5 and 2 * busy <= cores:
        yield Advice(
            "Cores are idle while the network computes",
            f"{share_text(share)} of a step goes to the network, and {record.ranks} rank(s) with {threads} thread(s) "
            f"leave {cores - busy} of {cores} hardware threads idle",
            f"Start {2 * busy} ranks with a thread each; or, where there can be no more ranks, give each "
            f"OMP_NUM_THREADS={2 * threads}",
        )


def _slows_down(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    rates = [rate for _, rate in thinned([(line["step"], line["samples_per_s"]) for line in record.steady], most=8)]
    if len(record.steady) < FEWEST_LINES:
        return
    first, last = fmean(rates[:2]), fmean(rates[-2:])
    if last < SLOWS_DOWN * first:
        yield Advice(
            "Training became slower",
            f"{first:,.0f} samples/s in the first quarter, {last:,.0f} in the last",
            "Look for other programs on the hosts, and for memory that grows (below)",
        )


def _misses_fast_memory(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    for group, counts in record.traffic.tiers.items():
        rate = hit_rate(counts)
        if rate is not None and rate < FOUND_IN_TIER:
            yield Advice(
                f"Fast memory is too small for {group}",
                f"{share_text(rate)} of the rows that batches want are found there, and {counts['rows_read']:,} were "
                "read from the tier below",
                f"Raise tiers.fast_share (now {record.setting('tiers.fast_share', 0.25):g}); set pipeline.depth=2 "
                "to prefetch what is to be read",
            )


def _uneven_memory(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    used = record.memory_by_rank
    if len(used) > 1 and max(used) > UNEVEN_MEMORY * min(used):
        most, least = used.index(max(used)), used.index(min(used))
        yield Advice(
            "Ranks use unlike amounts of memory",
            f"rank {most} uses {max(used) / 1e9:.2f} GB, rank {least} {min(used) / 1e9:.2f} GB",
            "Set placement.strategy=auto, which spreads rows evenly; rowmesh plan shows what each rank holds",
        )


def _unlike_prediction(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    counted, predicted = record.traffic.bytes_per_step, tables.predicted_bytes
    if not counted or not predicted or abs(counted / predicted - 1) <= OFF_PREDICTION:
        return
    yield Advice(
        "The traffic is not what the plan expects",
        f"{counted / 1e6:,.2f} MB a step were counted between ranks, {predicted / 1e6:,.2f} MB are predicted "
        f"({counted / predicted:.2f} ×)",
        "Plan with rowmesh plan --count-batches, which counts batches instead of supposing independent draws; prepare "
        "data again whose counts are of another time",
    )


def _miscalibrated(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    for result in record.results[:1]:
        calibration = result.numbers.get("calibration")
        if calibration is not None and abs(calibration - 1) > MISCALIBRATED:
            too = "high" if calibration > 1 else "low"
            yield Advice(
                f"Predictions are too {too}",
                f"on {result.split} their sum is {calibration:.3f} times that of the labels",
                "Train longer or at a lower learning rate; compare the base rates of the splits",
            )


def _below_optimum(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    for result in record.results[:1]:
        best, reached = result.optimum.get("auc"), result.numbers.get("auc")
        if best is not None and reached is not None and best - reached > BELOW_OPTIMUM:
            yield Advice(
                "Better is possible",
                f"AUC {reached:.5f} on {result.split}, where {best:.5f} can be reached with these data",
                "Try more samples or epochs, a larger tables.dim, or another tables.optimizer.lr",
            )


def _rare_ids(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    found = [(table.rare_share.get("test", 0.0), table.name) for table in tables.tables]
    rare = sorted((each for each in found if each[0] > RARE), reverse=True)
    if rare:
        named = ", ".join(f"{name} ({share_text(share)})" for share, name in rare[:_NAMED])
        more = f" and {len(rare) - _NAMED} more" if len(rare) > _NAMED else ""
        yield Advice(
            "Most ids of some tables are rare",
            f"ids of the test split that share the row of rare ids: {named}{more}",
            "Give rowmesh data prepare a lower --min-count: more ids get rows of their own, and tables become larger",
        )


def _no_validation(record: RunRecord, tables: Tables) -> Iterator[Advice]:
    if record.train and not record.evaluations and "validation" in (record.about.get("samples") or {}):
        every = max(record.steps // 10, 1)
        yield Advice(
            "Nothing shows whether it overfits",
            f"no evaluation in {record.steps:,} steps",
            f"Set train.eval_every={every} to evaluate the validation split ten times",
        )


def _share(record: RunRecord, stage: str) -> float | None:
    """The share of a stage in the time of a step; None where it was not recorded."""
    stages = record.step_ms
    total = sum(stages.values())
    return stages[stage] / total if stage in stages and total else None


RULES: tuple[Rule, ...] = (
    _overfits,
    _still_falls,
    _miscalibrated,
    _below_optimum,
    _waits_for_data,
    _waits_for_pipeline,
    _waits_for_rows,
    _waits_for_sums,
    _idle_cores,
    _slows_down,
    _misses_fast_memory,
    _uneven_memory,
    _unlike_prediction,
    _rare_ids,
    _no_validation,
)
