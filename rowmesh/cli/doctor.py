"""`rowmesh doctor`."""

from __future__ import annotations

import json as json_module
import os
from typing import Annotated

from cyclopts import Parameter

from rowmesh.errors import ConfigurationError, RowmeshError


def doctor(*, ranks: int = 1, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Time one small training step, and say what is slow on this machine and what to do about it.

    Exit status 0 unless a step fails, whatever is slow.

    Parameters
    ----------
    ranks
        Also run the step on so many ranks of this host, under torchrun.
    json
        Print JSON: all facts, times and findings.
    """
    from rowmesh._support.files.printable import say
    from rowmesh.doctor.advice import findings
    from rowmesh.doctor.facts import read_facts
    from rowmesh.doctor.step import Failed, run_step
    from rowmesh.doctor.text import report_json, report_text

    if ranks < 1:
        raise ConfigurationError(f"--ranks: {ranks} are none; give 1 or more")
    if "RANK" in os.environ:
        raise ConfigurationError("rowmesh doctor starts ranks itself: run it without torchrun, with --ranks N")
    facts = read_facts()
    steps = [run_step(count) for count in dict.fromkeys([1, ranks])]
    found = findings(facts, steps)
    report = report_json(facts, steps, found)
    text = json_module.dumps(report, indent=1) if json else report_text(facts, steps, found)
    say(*text.split("\n"))
    if failed := [step for step in steps if isinstance(step, Failed)]:
        raise RowmeshError(f"the step on {failed[0].ranks} rank(s) failed; the report above has the end of its output")
