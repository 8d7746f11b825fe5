"""`rowmesh env`."""

from __future__ import annotations

import json as json_module
from typing import Annotated

from cyclopts import Parameter


def env(*, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Print versions, processor, memory and communication: what to attach to a bug report.

    Parameters
    ----------
    json
        Print JSON.
    """
    from rowmesh.observe import environment_report, environment_text

    report = environment_report()
    print(json_module.dumps(report, indent=1) if json else environment_text(report))  # noqa: T201
