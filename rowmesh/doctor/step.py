"""Times a small training step; `run_step` starts the processes, and `python -m rowmesh.doctor.step` is one of them."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

RESULT, ERROR = "rowmesh doctor: ", "rowmesh doctor: error: "
COMMAND = ["-m", "rowmesh.doctor.step"]
WARM_UP, STEPS, STEPS_OF_ONE_THREAD = 3, 10, 5
LAST_LINES = 6
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """How long a step took, on rank 0.

    Attributes:
        ranks: how many there were.
        threads: of torch, on each.
        said: what was done about threads, if anything.
        transport: how rows travelled.
        import_s: until torch and rowmesh were imported.
        first_s: the first step, with all that is compiled or read for it.
        compiled: kernels that were compiled, not read.
        step_s: the median of later steps.
        sparse_s: of it, look-up and update of embedding tables.
        one_thread_s: as step_s, with one thread of torch on each rank.
        faults: page faults of a step; None where they are not counted.
        samples: of a step, over all ranks.
        window_bytes: memory of a rank for each batch that a pipeline has in flight.
    """

    ranks: int
    threads: int
    said: str | None
    transport: str
    import_s: float
    first_s: float
    compiled: int
    step_s: float
    sparse_s: float
    one_thread_s: float
    faults: float | None
    samples: int
    window_bytes: int

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.samples / self.step_s


@dataclass(frozen=True)
class Failed:
    """A step that failed.

    Attributes:
        ranks: how many there were.
        reason: the end of what they wrote.
    """

    ranks: int
    reason: str


def run_step(ranks: int, timeout_s: float = TIMEOUT_S) -> StepTimes | Failed:
    """Runs the step on one rank, or on several under torchrun, as training is started."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, *COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            _, err = process.communicate()
            return Failed(ranks, f"no step within {timeout_s:.0f} s\n{_end_of(err)}".strip())
        except BaseException:  # Ctrl-C
            process.terminate()
            raise
    results = [line.removeprefix(RESULT) for line in out.splitlines() if line.startswith(RESULT)]
    if process.returncode or not results:
        said = [line.removeprefix(ERROR) for line in err.splitlines() if line.startswith(ERROR)]  # not torchrun
        reason = "\n".join(said[:LAST_LINES]) or _end_of(err)
        return Failed(ranks, reason or f"ended with status {process.returncode}")
    return StepTimes(**json.loads(results[0]))


def _end_of(text: str) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-LAST_LINES:])


def measure(began_s: float) -> StepTimes:
    """Trains for some steps on the ranks that were started; the times are this rank's. Collective.

    Args:
        began_s: when this process did, by `time.perf_counter`.
    """
    import torch
    from numba.core import event

    from rowmesh import Mesh
    from rowmesh.doctor.training import Training
    from rowmesh.mesh.threads import fit_threads
    from rowmesh.observe.allocator import keep_memory

    import_s = time.perf_counter() - began_s
    keep_memory()  # as `rowmesh train` does
    with Mesh.connect(60.0) as mesh, event.install_recorder("numba:compile") as compilations:
        said = fit_threads(mesh)
        with Training(mesh) as training:
            first, *_ = [training.step() for _ in range(WARM_UP)]
            faults = _faults()
            steps = [training.step() for _ in range(STEPS)]
            faults = _faults() - faults
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            alone = [training.step() for _ in range(STEPS_OF_ONE_THREAD)]
            torch.set_num_threads(threads)
            window_bytes = training.window_bytes()
        return StepTimes(
            ranks=mesh.world_size,
            threads=threads,
            said=said,
            transport=training.transport,
            import_s=import_s,
            first_s=first.whole_s,
            compiled=len(compilations.buffer) // 2,  # a beginning and an end each
            step_s=statistics.median(step.whole_s for step in steps),
            sparse_s=statistics.median(step.sparse_s for step in steps),
            one_thread_s=statistics.median(step.whole_s for step in alone),
            faults=faults / STEPS if faults else None,
            samples=training.local_batch * mesh.world_size,
            window_bytes=window_bytes,
        )


def _faults() -> int:
    """Page faults of this process until now that needed no disk; 0 where they are not counted."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    rank = os.environ.get("RANK", "0")
    try:
        times = measure(time.perf_counter())
    except Exception as error:
        os.write(2, f"{ERROR}rank {rank}: {type(error).__name__}: {error}\n".encode())
        sys.exit(1)
    if rank == "0":
        os.write(1, f"{RESULT}{json.dumps(asdict(times))}\n".encode())
