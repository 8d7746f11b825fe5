"""Pipeline: when rows move, so that they need not be waited for, and every row is the one a synchronous loop reads.

Modules, in the order in which a batch meets them:

- `rows`: which distinct rows of their tables the ids of a batch are;
- `window`: the frozen window. A batch is cut into micro-batches, and rows change after the last of them only; how many
  rows move when, where every micro-batch fetches its own, and where a row is fetched once and pushed once;
- `sizes`: how large the micro-batches should be, small ones at both ends, and how long a window then takes.

Samples are clustered by `rowmesh.ops.cluster` and batches cut by `rowmesh.sparse.micro_batches`.

- `cutter`: which samples are in which micro-batch;
- `schedule`: the stages of a batch, what each uses and waits for; a value that `play` plays and `runner` runs;
- `pipeline`: batches of a loader, one after the other, while the next are on their way;
- `recorder`, `device_recorder`: when the stages were done, by the clock of the host or of a device;
- `auto`: what depth and how many micro-batches the measured stages advise.

Sources: NestPipe §III–VI; EL-Rec §V.
"""

from rowmesh.pipeline.batch_in_flight import BatchInFlight, Part
from rowmesh.pipeline.pipeline import Pipeline

__all__ = ["BatchInFlight", "Part", "Pipeline"]
