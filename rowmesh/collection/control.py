"""Control: whether the program or a pipeline changes the rows of a collection and takes its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import NamedTuple

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.tables.update_rules import Rate


class Driver(NamedTuple):
    """A pipeline, as the engine whose rows it moves sees it.

    Attributes:
        squares: the sum of squares of the gradients of the batch that waits for its step, as each rank has it.
        step: takes the learning rates of a step.
        forget: drops the gradients of a batch that waits for its step.
        wait: returns when the steps so far are done and no thread uses the tables.
        pause: takes back what was opened ahead, too, and gives control back until the next batch.
        cancelled: when it is set, waits for rows of other ranks end.
    """

    squares: Callable[[], list[float]]
    step: Callable[[Sequence[Rate]], None]
    forget: Callable[[], None]
    wait: Callable[[], None]
    pause: Callable[[], None]
    cancelled: Event


class Control:
    """Control of rows and steps: the program has it, but while a pipeline does, or while averages replace rows.

    Args:
        rows_mesh: the ranks, as rows travel between them.

    Attributes:
        driver: the pipeline in control, also while a thread of it still sends; None where there is none.
        stand_in: what stands in the place of rows for a while, which no step may change; "" where rows do.
    """

    def __init__(self, rows_mesh: Mesh) -> None:
        self._mesh = rows_mesh
        self.driver: Driver | None = None
        self.stand_in = ""

    def acquire(self, driver: Driver) -> None:
        """Gives a pipeline control.

        Raises:
            RowmeshError: another one has it, or runs on the same mesh; or something stands in the place of rows.
        """
        self.check_not_driven("another one begins")
        self.check("a pipeline begins")
        self._mesh.claim("pipeline")
        self.driver = driver
        self._mesh.cancellation.watch(driver.cancelled)

    def prepare_to_release(self) -> None:
        """Announces that `release` follows as soon as the threads of the pipeline have ended."""
        self._mesh.end_claim("pipeline")

    def release(self) -> None:
        """Gives the program control again."""
        self.driver = None
        self._mesh.cancellation.watch(None)
        self._mesh.unclaim("pipeline")

    def put_in_place(self, stand_in: str) -> None:
        """Says what stands in the place of rows from now on; "" where rows do again."""
        self.stand_in = stand_in

    def check(self, doing: str) -> None:
        """Raises RowmeshError where a pipeline has the rows, or something else stands in their place."""
        self.check_not_driven(doing)
        if self.stand_in:
            raise RowmeshError(
                f"{self.stand_in} stand in the place of rows and would be changed instead; leave the block of "
                f"`AveragedRows.applied()`, or call its restore(), before {doing}"
            )

    def check_not_driven(self, doing: str) -> None:
        """Raises RowmeshError where a pipeline has the rows."""
        if self.driver is not None:
            raise RowmeshError(f"a pipeline runs, and has rows of later batches; leave its loop before {doing}")
