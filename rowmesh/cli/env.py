"""`rowmesh env`."""

from __future__ import annotations

import json as json_module
from typing import Annotated

from cyclopts import Parameter


def env(*, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Print versions, processor, memory and communication, for a bug report, and what is slow here.

    Parameters
    ----------
    json
        Print JSON.
    """
    from rowmesh._support.files.printable import say
    from rowmesh.cli.process import slow_lines
    from rowmesh.observe.environment import environment_report, environment_text

    report = environment_report()
    if json:
        say(*json_module.dumps(report, indent=1).splitlines())
        return
    say(*environment_text(report).splitlines(), *slow_lines(ranks=1))
