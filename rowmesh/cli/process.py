"""The process of a command that trains: what its memory keeps, and what slows it down before it has begun."""

from __future__ import annotations

import os


def prepare_process() -> None:
    """Has the allocator keep freed memory for the next step, and oneDNN few operators.

    Rank 0 prints what is slow on its host, and what to do.
    """
    from rowmesh._support.files.printable import say
    from rowmesh.observe.allocator import keep_memory
    from rowmesh.ops.linear.caches import bound_caches

    keep_memory()
    bound_caches()
    if os.environ.get("RANK", "0") == "0" and (lines := slow_lines(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))):
        say(*lines)


def slow_lines(ranks: int) -> list[str]:
    """Lines on what slows so many ranks on this host, one a finding; threads count where a variable sets them."""
    import torch

    from rowmesh.doctor.advice import standing
    from rowmesh.doctor.facts import read_facts
    from rowmesh.mesh.threads import VARIABLES

    threads = torch.get_num_threads() if any(name in os.environ for name in VARIABLES) else 1
    found = standing(read_facts(network=False), ranks, threads)
    return [f"slow      {finding.name}: {finding.text}; {finding.advice}" for finding in found]
