"""RawTask: labels of raw rows, which are read once, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rowmesh._support.files.places import local_path
from rowmesh.data.quarantine import BadRows, FewBadRows, NoBadRows
from rowmesh.data.raw import RawData, RawLoader, is_server
from rowmesh.errors import ConfigurationError
from rowmesh.mesh.together import summed
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.run.config import chosen
from rowmesh.run.evaluate import evaluate
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.fingerprint import Fingerprint, raw_fingerprint
from rowmesh.run.job import Job
from rowmesh.run.labelled_task import LabelledTask
from rowmesh.run.raw import Following
from rowmesh.run.report import results
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.targets import targets_of
from rowmesh.run.task import StepBatch, TrainingLoader

MAX_BAD_ROWS = "data.max_bad_rows"


@dataclass(frozen=True, eq=False)
class RawTask(LabelledTask[RawData]):
    """The task of models of clicks on raw rows: as on prepared samples, but for splits and all that counts samples."""

    def check(self) -> None:
        """Refuses what is not there to be read, and losses that do not fit the labels."""
        self.data.source()
        if self.tested:
            self.data.source(self.tested)
        targets_of(self.config, self.data)

    def profile(
        self, shapes: Sequence[TableShape], request: Request, world_size: int, *, count_batches: bool = False
    ) -> Profile:
        """Raises ConfigurationError: raw rows have no counts."""
        raise ConfigurationError(
            "a placement by frequency needs prepared data, and data.source is raw; leave it out, or run `rowmesh data "
            "prepare` first"
        )

    @property
    def has_times(self) -> bool:
        """Where the schema names their column."""
        return self.data.schema.time is not None

    @property
    def has_scores(self) -> bool:
        """Where the schema names their column."""
        return self.data.schema.score is not None

    def fingerprint(self) -> Fingerprint:
        """Digests of the hash of ids and of dense features; see `rowmesh.run.fingerprint`."""
        return raw_fingerprint(self.data)

    def check_split(self, key: str, split: str) -> str:
        """A folder or file of raw rows."""
        place = split if key == "--split" else self.tested
        if not place:
            raise ConfigurationError("data.test: name a folder or file of raw rows to evaluate the model on")
        if not is_server(place):
            local_path(place, key)
        self.data.source(place)
        return place

    @property
    def tested(self) -> str:
        """Where other rows are, if anywhere."""
        return self.config.data.raw_test

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """All rows, once. Collective, where they are followed."""
        return self._loader(job, NoBadRows(), agree=Following(job.mesh, is_asked) if self.data.follow else None)

    def _loader(self, job: Job, quarantine: BadRows, location: str = "", agree: Following | None = None) -> RawLoader:
        schema = self.data.schema
        if not any(table.takes_scores for table in job.embeddings.tables):
            schema = schema.model_copy(update={"score": None})
        return RawLoader(
            self.data.source(location),
            schema,
            batch_size=chosen(self.config.data.batch_size),
            quarantine=quarantine,
            rank=job.mesh.rank,
            world_size=job.mesh.world_size,
            seed=self.data.hash_seed,
            agree=agree,
        )

    def global_weight(self, job: Job, batch: StepBatch, step: int) -> float:
        """Σ w over the samples of all ranks: each alone knows which of its rows are of use. Collective."""
        return summed(job.mesh, batch.weight, "summing the sample weights of all ranks")

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """Every row of a folder or file once; bad ones are left out, as many on each rank as in training."""
        return evaluate(job, "test", on_batch, self.rows_of(job, split))

    def rows_of(self, job: Job, split: str) -> RawLoader:
        """The rows of a folder or file on which models are evaluated."""
        return self._loader(job, FewBadRows(self.config.data.max_bad_rows, MAX_BAD_ROWS), split)

    def validate(self, job: Job) -> Evaluation:
        """Never: `check_raw` refuses it."""
        raise NotImplementedError

    def num_evaluation_batches(self, split: str) -> None:
        """None: raw rows are not counted before they are read."""

    def chosen_by(self, loss: float | None) -> dict[str, float | None]:
        """Nothing: the last model is kept."""
        return {}

    def describe(self, job: Job) -> list[tuple[str, str]]:
        """Where rows come from, and how many features they have."""
        data = self.data
        features = f"{data.num_dense} dense, {len(data.tables)} sparse features"
        lines = [("data", f"{data.place}: raw rows{', followed' if data.follow else ''}; {features}")]
        if data.num_dense:
            lines.append(("dense", f"transform {data.schema.dense_transform}; missing values read as 0"))
        return lines

    def describe_steps(self, total_steps: int | None) -> list[tuple[str, str]]:
        """Rows are read once."""
        until = "for ever" if self.data.follow else "until there are no more rows"
        most = until if total_steps is None else f"{total_steps:,} at most"
        return [("steps", f"{most}, of {chosen(self.config.data.batch_size):,} samples each")]

    def results(self, split: str, evaluation: Evaluation) -> list[str]:
        """Beside the base rate."""
        return results(split, evaluation, None)

    def optimum(self, split: str) -> None:
        """Not known."""

    def advice(self, job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
        """None: it compares splits."""
        return []
