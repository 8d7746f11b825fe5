"""Facts about a run that follow from neither its configuration nor its plan, for its report."""

from __future__ import annotations

from typing import Any

from rowmesh._support.json_lines import utc_text
from rowmesh.run.job import Job
from rowmesh.run.report import memory_of_every_rank


def about_run(job: Job, total_steps: int | None) -> dict[str, Any]:
    """Ranks, transport, sizes and memory, all of them JSON. Collective: every rank calls it."""
    embeddings, mesh = job.embeddings, job.mesh
    return {
        "started": utc_text(),
        "ranks": mesh.world_size,
        "hosts": len(set(mesh.hosts)),
        "total_steps": total_steps,
        "samples": {name: split.samples for name, split in job.data.splits.items()},
        "device": str(embeddings.device),
        "transport": embeddings.transport,
        "transport_reason": embeddings.transport_reason,
        "placement": job.placement.text,
        "network_parameters": sum(parameter.numel() for parameter in job.network.parameters()),
        "tables": {
            table.name: {"rows": table.num_rows, "dim": table.dim, "storage": table.storage}
            for table in embeddings.tables
        },
        "rare_share": {table.name: dict(table.rare_share) for table in job.data.tables},
        "memory_bytes": memory_of_every_rank(job),
    }
