"""Findings as people read them, at most 80 columns wide, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rowmesh.doctor.advice import Finding
from rowmesh.doctor.facts import Facts
from rowmesh.doctor.step import Failed, StepTimes
from rowmesh.placement.text import bytes_text

WIDTH = 80
_LEVEL, _NAME = 8, 12
_PACKAGES = ("rowmesh", "torch", "numba", "triton", "pyarrow", "numpy", "python")


def report_text(facts: Facts, steps: Sequence[StepTimes | Failed], found: Sequence[Finding]) -> str:
    """Versions, times of steps, what is slow and what to do, and last the verdict."""
    versions = ", ".join(f"{name} {facts.versions.get(name) or '(none)'}" for name in _PACKAGES)
    lines = [*textwrap.wrap(versions, WIDTH), *textwrap.wrap(str(facts.versions.get("system")), WIDTH), ""]
    for step in steps:
        if isinstance(step, StepTimes):
            lines += _step(step)
    lines.append("")
    for finding in found:
        lines += _finding(finding)
    bad = [finding.name for finding in found if finding.level in ("slow", "failed")]
    verdict = f"{len(bad)} to look at: {', '.join(dict.fromkeys(bad))}" if bad else "nothing is slow here"
    return "\n".join([*lines, "", *textwrap.wrap(verdict, WIDTH)])


def report_json(facts: Facts, steps: Sequence[StepTimes | Failed], found: Sequence[Finding]) -> dict[str, Any]:
    """The same, and all facts."""
    return {
        "facts": asdict(facts),
        "steps": [asdict(step) for step in steps],
        "findings": [asdict(finding) for finding in found],
    }


def _step(step: StepTimes) -> Iterator[str]:
    ranks, rate = f"{step.ranks} rank{'s'[: step.ranks > 1]}", f"{step.samples_per_s:,.0f} a second"
    yield f"{ranks:<10}{step.step_s * 1e3:.1f} ms a step of {step.samples:,} samples, {rate}"
    yield f"{'':10}tables {step.sparse_s * 1e3:.1f} ms ({step.transport}), {step.threads} thread(s) a rank"
    if step.threads > 1:
        yield f"{'':10}{step.one_thread_s * 1e3:.1f} ms a step with one thread"
    yield f"{'':10}{bytes_text(step.window_bytes)} for each batch in flight of a pipeline (pipeline.depth + 1)"
    yield f"{'':10}first step {step.first_s:.2f} s, imports {step.import_s:.2f} s"


def _finding(finding: Finding) -> Iterator[str]:
    indent = " " * (_LEVEL + _NAME)
    label = f"{finding.level:<{_LEVEL}}{finding.name:<{_NAME}}"
    for number, line in enumerate(finding.text.splitlines() or [""]):
        first = label if number == 0 else indent
        yield from textwrap.wrap(line, WIDTH, initial_indent=first, subsequent_indent=indent) or [first.rstrip()]
    if finding.advice:  # paths and commands are not broken
        yield from textwrap.wrap(
            f"→ {finding.advice}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
