"""The page of a run, or of two side by side, as one HTML file that needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import rowmesh
from rowmesh._support.files.atomic import replacing_file
from rowmesh.placement.text import bytes_text
from rowmesh.report.advice import Advice, advise
from rowmesh.report.html import data_table, fact_list, page, section, sentence
from rowmesh.report.run_costs import memory_section, time_section, traffic_section
from rowmesh.report.run_curves import RANKING_KEYS, curves_section, quality_section
from rowmesh.report.run_record import DAMAGED, RANKING, RunRecord, damaged_text, read_run
from rowmesh.report.run_settings import settings_section, tables_section
from rowmesh.report.run_tables import Tables, tables_of
from rowmesh.report.shown import STYLES, Shown, heading_of, side_by_side


def write_run_report(folders: Sequence[Path], out: Path) -> None:
    """Writes the page of one or two runs; what stood at `out` stays where that fails.

    Args:
        folders: of the runs.
        out: the HTML file.

    Raises:
        RowmeshError: a folder is no run.
        OSError: the page cannot be written.
    """
    text = run_report([read_run(folder) for folder in folders])
    with replacing_file(out) as file:
        file.write(text.encode())


def run_report(records: Sequence[RunRecord]) -> str:
    """The page of one or two runs as HTML."""
    names = _names(records)
    runs = [
        Shown(record, _tables_of(record), name, style)
        for record, name, style in zip(records, names, STYLES, strict=False)
    ]
    return page(" and ".join(names), [part for part in _parts(runs) if part])


def _tables_of(record: RunRecord) -> Tables:
    try:
        return tables_of(record)
    except DAMAGED as error:
        return Tables([], None, f"a file of the run {damaged_text(error)}")


def _names(records: Sequence[RunRecord]) -> list[str]:
    """The names of the runs' folders, with the folder above where names are equal."""
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = [f"{record.folder.path.resolve().parent.name}/{record.name}" for record in records]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _parts(runs: Sequence[Shown]) -> Iterator[str]:
    yield f"<h1>{escape(' and '.join(run.name for run in runs))}</h1>"
    for run in runs:
        dot = f'<span class="dot {run.style}"></span>' if len(runs) > 1 else ""
        yield f'<p class="why">{dot}{_shown("Summary", lambda run=run: _summary_text(run, runs))}</p>'
    for title, part in _SECTIONS:
        yield _shown(title, lambda part=part: part(runs))
    yield (
        "<footer><p>Means leave out the first tenth of the steps, in which kernels are compiled and buffers grow. "
        f"</p><p>rowmesh {rowmesh.__version__}</p></footer>"
    )


def _shown(title: str, part: Callable[[], str]) -> str:
    """A part of the page; where files of a run hold what no run writes, a line that says so in its place."""
    try:
        return part()
    except DAMAGED as error:
        return section(title, f"cannot be shown: a file of the run {damaged_text(error)}", " ")


def _summary_text(run: Shown, runs: Sequence[Shown]) -> str:
    return escape(_summary(run, named=len(runs) > 1))


def _numbers(runs: Sequence[Shown]) -> str:
    return fact_list(_facts(runs[0].record)) if len(runs) == 1 else _compared(runs)


def _summary(run: Shown, *, named: bool) -> str:
    """The outcome of a run, in a sentence."""
    record = run.record
    ranks = f" on {record.ranks} rank{'s'[: record.ranks != 1]}" if record.ranks else ""
    speed = record.mean("samples_per_s")
    rate = f", {speed:,.0f} samples a second{ranks}" if speed is not None else ranks
    done = f"{record.steps:,} of {total:,}" if (total := record.about.get("total_steps")) else f"{record.steps:,}"
    text = f"{done} steps{rate}"
    if record.results:
        result = record.results[0]
        best = result.optimum.get("auc")
        auc = result.numbers.get("auc")
        if auc is not None:
            best_text = f", of {best:.5f} that can be reached" if best is not None else ""
            text = f"AUC {auc:.5f} on {result.split}{best_text}; {text}"
        elif result.is_ranking:
            best = result.optimum.get(RANKING)
            best_text = f", of {best:.5f} that can be reached" if best is not None else ""
            text = f"NDCG@10 {result.numbers[RANKING]:.5f} on {result.split}{best_text}; {text}"
        elif (rmse := result.numbers.get("rmse")) is not None:
            text = f"RMSE {rmse:.5f} on {result.split}; {text}"
    return sentence(f"{run.name}: {text}" if named else text)


def _facts(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    if record.results:
        result = record.results[0]
        auc, loss = result.numbers.get("auc"), result.numbers.get("log_loss")
        if auc is not None:
            best = result.optimum.get("auc")
            yield f"AUC, {result.split}", f"{auc:.5f}", f"best {best:.5f}" if best else "0.5 is chance"
        for key in (RANKING, "hr@10") if result.is_ranking else ():
            floor = f"popularity {result.floor[key]:.5f}" if key in result.floor else ""
            yield f"{RANKING_KEYS[key]}, {result.split}", f"{result.numbers[key]:.5f}", floor
        if (rmse := result.numbers.get("rmse")) is not None:
            yield f"RMSE, {result.split}", f"{rmse:.5f}", f"mean of training {result.numbers['baseline_rmse']:.5f}"
        if loss is not None:
            entropy = result.numbers.get("normalized_entropy")
            of = f"{entropy:.4f} of the base rate's" if entropy is not None else ""
            yield f"Log-loss, {result.split}", f"{loss:.5f}", of
    elif record.train:
        yield "Loss", f"{record.train[-1]['loss']:.5f}", "of training, at last"
    if (speed := record.mean("samples_per_s")) is not None:
        yield "Samples a second", f"{speed:,.0f}", _ranks_text(record)
    if record.step_ms:
        total, network = sum(record.step_ms.values()), record.step_ms["network"]
        yield "A step", f"{total:.3g} ms", f"{network / total:.0%} of it the network".replace("%", " %")
    if record.elapsed_s is not None:
        yield "Time", _duration(record.elapsed_s), f"{record.steps:,} steps"
    if used := record.series("memory_bytes"):
        yield "Memory", bytes_text(max(value for _, value in used)), "most, over all ranks"


def _ranks_text(record: RunRecord) -> str:
    hosts = record.about.get("hosts")
    if not record.ranks or not isinstance(hosts, int):
        return ""
    return f"{record.ranks} rank{'s'[: record.ranks != 1]} on {hosts} host{'s'[: hosts != 1]}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _compared(runs: Sequence[Shown]) -> str:
    """Both runs' numbers, and what the second has more, or how many times as much."""
    rows = []
    for name, number, text, is_ratio in _NUMBERS:
        found = [number(run.record) for run in runs]
        if any(value is not None for value in found):
            texts = ["" if value is None else text(value) for value in found]
            rows.append([name, *texts, _difference(found, is_ratio)])
    return data_table(["", *(run.name for run in runs), "difference"], rows)


def _difference(found: Sequence[float | None], is_ratio: bool) -> str:
    first, second = found
    if first is None or second is None:
        return ""
    if is_ratio:
        return f"{second / first:.2f} ×" if first else ""
    return f"{second - first:+.5f}".replace("-", "−")


def _of_result(key: str) -> Callable[[RunRecord], float | None]:
    return lambda record: record.results[0].numbers.get(key) if record.results else None


def _most_memory(record: RunRecord) -> float | None:
    return max((value for _, value in record.series("memory_bytes")), default=None)


# Name, the number, its text, and whether the difference is a ratio.
_NUMBERS: Sequence[tuple[str, Callable[[RunRecord], float | None], Callable[[float], str], bool]] = (
    ("AUC", _of_result("auc"), "{:.5f}".format, False),
    ("log-loss", _of_result("log_loss"), "{:.5f}".format, False),
    ("normalized entropy", _of_result("normalized_entropy"), "{:.5f}".format, False),
    ("calibration", _of_result("calibration"), "{:.5f}".format, False),
    ("RMSE", _of_result("rmse"), "{:.5f}".format, False),
    ("MAE", _of_result("mae"), "{:.5f}".format, False),
    ("NDCG@10", _of_result(RANKING), "{:.5f}".format, False),
    ("HR@10", _of_result("hr@10"), "{:.5f}".format, False),
    ("samples a second", lambda record: record.mean("samples_per_s"), "{:,.0f}".format, True),
    ("a step", lambda record: sum(record.step_ms.values()) or None, "{:.3g} ms".format, True),
    ("bytes between ranks, a step", lambda record: record.traffic.bytes_per_step, bytes_text, True),
    ("memory, most", _most_memory, bytes_text, True),
    ("steps", lambda record: record.steps, "{:,}".format, True),
    ("time", lambda record: record.elapsed_s, _duration, True),
)


_KEY = re.compile(r"(--[a-z-]+|rowmesh (?:plan|data prepare|evaluate)|[A-Z_]{4,}=\d+|[a-z_]+\.[a-z_.]+[a-z](?:=\w+)?)")


def _advice(runs: Sequence[Shown]) -> str:
    cards = [
        f'<div class="next">{heading_of(run, runs)}{"".join(map(_advice_card, found))}</div>'
        for run in runs
        if (found := advise(run.record, run.tables))
    ]
    if not cards:
        return section("What to do next", "No rule found anything slow, overfitted or wrong.", " ")
    return section("What to do next", "", side_by_side(cards))


def _advice_card(advice: Advice) -> str:
    return (
        f'<div class="card advice"><h3>{escape(advice.title)}</h3>'
        f'<p class="note">{escape(sentence(advice.evidence[0].upper() + advice.evidence[1:]))}</p>'
        f"<p>{_with_keys(sentence(advice.action))}</p></div>"
    )


def _with_keys(text: str) -> str:
    """With keys of the configuration, options and commands set apart."""
    return _KEY.sub(r"<code>\1</code>", escape(text))


def _missing(runs: Sequence[Shown]) -> str:
    cards = [f"<div>{heading_of(run, runs)}{_list(found)}</div>" for run in runs if (found := _missing_of(run))]
    return section("What is missing here", "", side_by_side(cards)) if cards else ""


def _missing_of(run: Shown) -> list[str]:
    why_not = run.tables.why_not
    return [*run.record.missing, *([f"no prediction of the bytes between ranks: {why_not}"] if why_not else [])]


def _list(texts: Sequence[str]) -> str:
    return f'<ul class="note">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


_SECTIONS: Sequence[tuple[str, Callable[[Sequence[Shown]], str]]] = (
    ("Numbers", _numbers),
    ("What to do next", _advice),
    ("Curves", curves_section),
    ("Quality", quality_section),
    ("Time", time_section),
    ("Traffic", traffic_section),
    ("Memory", memory_section),
    ("Tables", tables_section),
    ("Settings", settings_section),
    ("What is missing here", _missing),
)
