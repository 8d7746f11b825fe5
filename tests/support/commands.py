"""`rowmesh` commands: under torchrun, and on ranks that are there already."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from unittest import mock

from rowmesh.cli.__main__ import main
from rowmesh.mesh import Mesh
from tests.support.ranks import RankPool


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    status: int
    out: str
    err: str


def launch(arguments: list[str], *, ranks: int, timeout_s: float = 90.0) -> Finished:
    """Runs `rowmesh` under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:  # torchrun leaves a folder for logs
        done = subprocess.run(
            [*command, "-m", "rowmesh.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder},
            check=False,
        )
    return Finished(done.returncode, done.stdout, done.stderr)


def run_on(pool: RankPool, arguments: list[str], *, ranks: int) -> Finished:
    """Runs `rowmesh` on ranks of a pool, as `launch` does after seconds of imports."""
    ends = pool.run(run_command, arguments, world_size=ranks)
    return Finished(max(end.status for end in ends), "".join(end.out for end in ends), "".join(end.err for end in ends))


def run_command(mesh: Mesh, arguments: list[str]) -> Finished:
    """Runs `rowmesh` as one rank of a mesh."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(Mesh, "connect", return_value=mesh),
        mock.patch.dict(os.environ, {"RANK": str(mesh.rank), "WORLD_SIZE": str(mesh.world_size)}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(arguments)
        except SystemExit as stop:
            return Finished(int(stop.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("a command ends by SystemExit")
