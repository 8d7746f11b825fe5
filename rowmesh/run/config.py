"""The configuration of a training run: every section and key of its TOML file, with their defaults.

Nothing is derived here; `rowmesh.run.resolve` reads files and overrides, and reports mistakes. A key that a class of
the library has, too, is declared there: the section takes its default, and `rowmesh.run.section.shared` hands it on.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from rowmesh._support.suggest import hint
from rowmesh.data.raw import is_server
from rowmesh.mesh.synchronization import Mode, Synchronization
from rowmesh.models.named import NAMED
from rowmesh.models.sequence import KINDS
from rowmesh.models.two_tower import IN_BATCH
from rowmesh.pipeline import Pipeline
from rowmesh.pipeline.cutter import Clustering, Sizes
from rowmesh.placement.request import Objective as PlanObjective
from rowmesh.placement.request import Request
from rowmesh.run.checkpoint_config import CheckpointConfig
from rowmesh.run.publish_config import PublishConfig
from rowmesh.run.section import AUTO, Auto, Count, Factor, Folder, Positive, Rate, Section, Source, default_of
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.run.table_config import TablesConfig
from rowmesh.tables import Tiers

T = TypeVar("T", int, float)
MODELS = ("dlrm", *NAMED, *KINDS)
Objective = Literal["clicks", "retrieval", "next item"]
"""A model is trained for labels of samples, for items among the others of a batch, or for the item after each event."""


def chosen(value: T | Auto) -> T:
    """A value for which `choose_defaults` has put a number where it was auto."""
    assert value != "auto", "choose_defaults comes first"
    return value


def _model_name(name: str) -> str:
    module, colon, attribute = name.partition(":")
    is_file = module.endswith(".py")
    is_module = not is_file and all(part.isidentifier() for part in module.split("."))
    if name in MODELS or (colon and is_module and attribute.isidentifier()):
        return name
    form = f"one of {', '.join(MODELS)}, or a class of your own as 'package.module:Class'"
    raise ValueError(f"should be {form}{', without .py' if is_file else ''}, got {name!r}{hint(name, MODELS)}")


class RunConfig(Section):
    """Where the run writes.

    Attributes:
        folder: the run's folder, made by the run. Empty: `runs/` and the name of the configuration file.
        fallback_folder: where the model goes, in a folder of the run's name, if it cannot be written in `folder`; on
            another disk. Empty: nowhere.
        retry_s: how long writing a model that cannot be written is tried again, until there is room; 0: not at all.
        trackers: where metrics go too: tensorboard, wandb, mlflow (extras), or module:Class, see
            `rowmesh.observe.trackers`.
        prometheus_file: where the latest metrics are written for Prometheus. Empty: nowhere.
    """

    folder: Folder = ""
    fallback_folder: Folder = ""
    retry_s: Annotated[float, Field(ge=0.0, le=1e7, allow_inf_nan=False)] = 3600.0
    trackers: list[str] = Field(default=[])
    prometheus_file: Folder = ""


class DataConfig(Section):
    """The training data.

    Attributes:
        folder: a prepared data set, as `rowmesh data prepare` writes it. For raw data, a folder of files, a file, or
            the URL of a Redis server, in which `$NAME` stands for a variable of the environment.
        source: whether the data are prepared, or raw rows as they come.
        raw_schema: of raw data: criteo, avazu or a TOML file, as `rowmesh data prepare --schema` takes it.
        stream: of raw data on a Redis server: the key of the stream.
        follow: of raw data: whether to wait for more files (until there is one called `_END`), or entries.
        hash_seed: of raw data: the seed of the hash that turns text into ids.
        max_bad_rows: of raw data: how many rows may be unusable, on each rank; a larger number is an error.
        batch_size: samples a step over all ranks together; auto: by the number of training samples.
        shuffle: whether every epoch visits the samples in another (reproducible) order.
        train: the split to train on.
        validation: the split evaluated every `train.eval_every` steps; where there is none of the default name, the
            last samples of the training split are (`train.validation_fraction`).
        test: the split evaluated at the end; of raw data a folder or file of other rows.
    """

    folder: Source
    source: Literal["prepared", "raw"] = "prepared"
    raw_schema: Folder = ""
    stream: str = ""
    follow: bool = False
    hash_seed: Count = 0
    max_bad_rows: Count = 100
    batch_size: Positive | Auto = AUTO
    shuffle: bool = True
    train: str = "train"
    validation: str = "validation"
    test: Source = "test"

    @property
    def is_raw(self) -> bool:
        """Whether rows are read as they come."""
        return self.source == "raw"

    @model_validator(mode="after")
    def _fits_its_source(self) -> Self:
        fields = type(self).model_fields
        if not self.is_raw:
            own = ("raw_schema", "stream", "follow", "hash_seed", "max_bad_rows")
            if given := [key for key in own if getattr(self, key) != fields[key].default]:
                raise ValueError(f'{", ".join(given)}: of raw data alone; give data.source = "raw", or leave it out')
            return self
        if not self.raw_schema:
            raise ValueError('raw_schema: name the columns of raw data: "criteo", "avazu", or a TOML file')
        if is_server(self.folder) != bool(self.stream):
            raise ValueError("stream: the key of a stream goes with the URL of a Redis server in folder")
        if given := [key for key in ("train", "validation") if getattr(self, key) != fields[key].default]:
            raise ValueError(f"{', '.join(given)}: raw data have no splits; leave it out")
        return self

    @property
    def raw_test(self) -> str:
        """The place of raw rows for evaluation; "" for none."""
        return "" if self.test == type(self).model_fields["test"].default else self.test


class ModelConfig(Section):
    """The dense network.

    Attributes:
        name: dlrm, dcn_v2, deep_fm, wide_and_deep, two_tower, shared_bottom, mmoe; sasrec, hstu, fuxi_alpha, fuxi_beta
            of sequences of events; or `package.module:Class`, a user's own; `rowmesh.models.Model` says what it looks
            like.
        bottom: of dlrm: hidden widths of the MLP over the dense features.
        top: of dlrm: hidden widths of the MLP over the interactions.
        options: of all others: keyword arguments of the class; of sequences the keys of
            `rowmesh.run.sequence.options.SequenceOptions`.
    """

    name: Annotated[str, AfterValidator(_model_name)] = "dlrm"
    bottom: list[Positive] = Field(default=[512, 256, 64])
    top: list[Positive] = Field(default=[512, 256])
    options: dict[str, object] = Field(default={})

    @property
    def is_own(self) -> bool:
        """Whether it is a user's class."""
        return ":" in self.name

    @property
    def is_dlrm(self) -> bool:
        """Whether it is DLRM, whose widths are keys of their own."""
        return self.name == "dlrm"

    @property
    def objective(self) -> Objective:
        """It is trained for this."""
        if self.name in KINDS:
            return "next item"
        return "retrieval" if self.name == "two_tower" and self.options.get("loss") == IN_BATCH else "clicks"

    @property
    def is_sequence(self) -> bool:
        """Whether it ranks items after a sequence of events."""
        return self.objective == "next item"

    @property
    def sequence(self) -> SequenceOptions:
        """The options of a sequence model.

        Raises:
            ValueError: one is unknown, or does not fit.
        """
        return SequenceOptions.parse(self.options)

    @model_validator(mode="after")
    def _has_its_own_keys(self) -> Self:
        if self.is_dlrm and self.options:
            raise ValueError(f"options {', '.join(self.options)} are for other models; dlrm has bottom and top")
        fields = type(self).model_fields
        given = [key for key in ("bottom", "top") if getattr(self, key) != fields[key].default]
        if not self.is_dlrm and given:
            raise ValueError(f"{' and '.join(given)}: of dlrm alone; give what {self.name} takes as model.options")
        if self.is_sequence:
            self.sequence  # noqa: B018
        return self


class OptimizerConfig(Section):
    """The optimizer of the dense network.

    Attributes:
        name: sgd, adagrad or adam, as in torch.optim.
        lr: the learning rate before the schedule; auto: by the batch size.
        weight_decay: L2 penalty.
        momentum: of sgd.
    """

    name: Literal["sgd", "adagrad", "adam"] = "adam"
    lr: Rate | Auto = AUTO
    weight_decay: Rate = 0.0
    momentum: Rate = 0.0

    @model_validator(mode="after")
    def _only_sgd_has_momentum(self) -> Self:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"{self.name} has no momentum; give optimizer.name=sgd, or leave it out")
        return self


class ScheduleConfig(Section):
    """The factor on every learning rate, dense and sparse.

    Attributes:
        name: what follows the warm-up: constant, or a fall along a line or a cosine to `final`.
        warmup_steps: steps over which the factor rises linearly to 1.
        final: the factor at the last step.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    final: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _falls_to_final(self) -> Self:
        if self.final and self.name == "constant":
            raise ValueError(
                f"final={self.final:g}: constant does not fall; give name=linear or cosine, or leave it out"
            )
        return self


class TrainConfig(Section):
    """How long, how often, from which seed.

    Attributes:
        epochs: passes over the training split; auto: at most 20, fewer where there are many samples, with early
            stopping.
        steps: where to stop within them; 0 means at the end of the last epoch.
        patience: how many evaluations in a row may bring no lower loss before training stops; the best model is kept.
            0: none is looked for, and the last model is kept; auto: that, unless epochs are auto too.
        loss: of the labels: binary, the cross entropy, or mse, the squared error; auto: binary for labels of 0 and 1,
            mse for those of kind "value". A model with a loss of its own keeps that.
        loss_weights: label → the factor of its loss in the sum over labels, 1 where it is not named.
        validation_fraction: of the training samples, the last that are for validation where there is no such split.
        seed: of the rows, the dense network and the order of samples.
        start_from: the folder of a finished run, with whose rows, network and optimizer states training begins; steps,
            schedule and evaluations begin anew. Empty: with rows and a network of its own.
        device: where rows and network are: cpu; or cuda, a GPU for each rank (ranks share them where there are fewer).
        cuda_graphs: whether the dense network is recorded as CUDA graphs and replayed for batches of the usual size.
        linear: what multiplies matrices in linear layers on a CPU: torch, onednn (faster on processors of AMD), or
            auto: the faster one for each layer, by a measurement of a second that is kept for later runs.
        precision: what the dense network computes in on a CPU: float32, or bfloat16 (torch's autocast). Rows,
            parameters and optimizer state stay as they are.
        eval_every: steps between evaluations on the validation split; 0 means none; auto: twice an epoch with
            patience, else none.
        progressive_every: steps of a window whose samples have metrics of their own, predicted before they are trained
            on; those after the last whole window have none; 0: none.
        log_every: steps between lines of `metrics.jsonl`.
        clip_grad_norm: what the norm of all gradients of a step, those of rows too, may be; 0: any.
    """

    epochs: Positive | Auto = AUTO
    steps: Count = 0
    patience: Count | Auto = AUTO
    loss: Literal["auto", "binary", "mse"] = AUTO
    loss_weights: dict[str, Rate] = Field(default={})
    validation_fraction: Annotated[float, Field(ge=0.0, le=0.5, allow_inf_nan=False)] = 0.1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    start_from: Folder = ""
    device: Literal["cpu", "cuda"] = "cpu"
    cuda_graphs: Literal["off", "on"] = "off"
    linear: Literal["auto", "torch", "onednn"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    eval_every: Count | Auto = AUTO
    progressive_every: Count = 0
    log_every: Positive = 50
    clip_grad_norm: Rate = 0.0


class ParallelConfig(Section):
    """How ranks work together.

    Attributes:
        transport: how rows and gradients travel; auto takes one-sided where all ranks share a host, on GPUs not yet.
        timeout_s: how long a rank waits for a peer, in seconds.
        replicas: how many replicas of every table to keep, each on a group of ranks of its own; auto: as many as make
            the predicted step shortest. A table's own `replicas` changes it.
        synchronization: how replicas are kept together: exact (gradients are summed, the same model as with one) or
            average (groups update for themselves, then rows and moments are averaged).
        sync_every: steps between two averages.
        together: which ranks of replicated tables share hosts: the shards of a replica, or the replicas of a shard;
            auto: whichever makes the predicted step shorter.
        wire_dtype: how rows and gradients travel in messages between ranks; bfloat16 rounds them, which halves their
            bytes and changes the model. Rows, their state and sums stay as they are. One-sided nothing travels, and
            nothing is rounded: transport "auto" then trains one model on a host and another on two.
    """

    transport: Literal["auto", "collective", "one_sided"] = "auto"
    timeout_s: Annotated[float, Field(ge=1.0, le=1e7, allow_inf_nan=False)] = 300.0
    replicas: Positive | Literal["auto"] = 1
    synchronization: Mode = Synchronization.mode
    sync_every: Positive = Synchronization.every
    together: Literal["auto", "shards", "replicas"] = "auto"
    wire_dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.synchronization == "exact" and self.sync_every != 1:
            raise ValueError(f"sync_every={self.sync_every} is for synchronization='average'; exact is of every step")
        return self


class TiersConfig(Section):
    """Where tiered tables keep their rows: keys of `rowmesh.tables.Tiers`.

    Attributes:
        folder: as there, on each host; empty: in memory.
    """

    fast_share: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = Tiers.fast_share
    fast_rows: Positive = Tiers.fast_rows
    folder: Folder = ""
    threads: Positive = Tiers.threads
    direct: bool = Tiers.direct


class PipelineConfig(Section):
    """Work that overlaps with the computation of a batch, by `rowmesh.Pipeline`. Every choice trains the same model.

    Attributes:
        depth: batches that are read, routed and requested from the owners of their rows ahead; auto: chosen by measured
            first steps. 0, and not the pipeline's 1, by default: a run has no pipeline where none is asked for.
        micro_batches: parts in which a batch is computed while rows come and gradients go; auto: likewise.
        exchange, final_rows, verify: see `rowmesh.Pipeline`. naive is for a CPU; in messages it adds gradients up in
            another order, so that transports agree to 1e-6 and not to the bit.
        sizes: of micro-batches: even, or light_ends (small where nothing hides the exchange).
        communication_share: what light_ends suppose communication to take of a step done in turn; or auto: what it
            takes of measured first steps.
        clustering: of samples into micro-batches: off, greedy (those that share rows meet) or light_ends (and those
            whose rows most others have are in the first and the last).
        trace: whether the run's folder gets a `trace.json` of the last steps, for Perfetto; what a device does by its
            own clock.
    """

    depth: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = 0
    micro_batches: Annotated[int, Field(ge=1, le=31)] | Literal["auto"] = default_of(Pipeline, "micro_batches")
    exchange: Literal["delta", "naive", "unsplit"] = default_of(Pipeline, "exchange")
    final_rows: bool | None = default_of(Pipeline, "final_rows")
    sizes: Sizes = default_of(Pipeline, "sizes")
    communication_share: Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["auto"] = 0.4
    clustering: Clustering = default_of(Pipeline, "clustering")
    verify: bool = default_of(Pipeline, "verify")
    trace: bool = default_of(Pipeline, "trace")

    @model_validator(mode="after")
    def _cuts_batches(self) -> Self:
        fields = type(self).model_fields
        given = [key for key in ("sizes", "clustering") if getattr(self, key) != fields[key].default]
        if given and self.micro_batches == 1:
            raise ValueError(
                f"{', '.join(given)}: of micro-batches, and micro_batches=1 leaves batches whole; give micro_batches, "
                "or leave it out"
            )
        return self

    @property
    def is_off(self) -> bool:
        """Whether steps are done in turn, whole."""
        return self.depth == 0 and self.micro_batches == 1 and not (self.verify or self.trace)

    @property
    def is_measured(self) -> bool:
        """Whether something follows from measured first steps."""
        asks_share = self.sizes == "light_ends" and self.communication_share == "auto"
        return "auto" in (self.depth, self.micro_batches) or (asks_share and self.micro_batches != 1)


class DriftConfig(Section):
    """When a plan that recent traffic does not fit any more is replaced.

    Attributes:
        enabled: whether traffic is measured; auto: where the plan copies rows.
        check_every: steps between checks.
        sample_every: steps between batches that the planner sees.
        min_coverage: share of the planned coverage of accesses by copies below which a new plan is made.
        min_balance: share of the planned balance over ranks below which a new plan is made.
    """

    enabled: Literal["auto", "on", "off"] = "auto"
    check_every: Positive = 1000
    sample_every: Positive = 8
    min_coverage: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.9
    min_balance: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.9


class PlacementConfig(Section):
    """Which rank holds each row; without a plan or a strategy every table is cyclic over all ranks.

    Attributes:
        plan: a file that `rowmesh plan` made for these tables and as many ranks.
        strategy: makes a plan at the start of a run, and is the default of `rowmesh plan`.
        topology: a shipped topology or a file; empty: the ranks of the run, links between hosts dearer than within.
        extra_memory, objective, fetch_weight: of a strategy; see `rowmesh.placement.request.Request`.
        drift: when a new plan is made while training.
    """

    plan: Folder = ""
    strategy: str = ""
    topology: Folder = ""
    extra_memory: Rate = Request.extra_memory
    objective: PlanObjective = Request.objective
    fetch_weight: Factor = Request.fetch_weight
    drift: DriftConfig = DriftConfig()

    @model_validator(mode="after")
    def _plan_or_strategy(self) -> Self:
        if self.plan and self.strategy:
            raise ValueError(f"give plan={self.plan!r} or strategy={self.strategy!r}, not both")
        return self


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    data: DataConfig
    model: ModelConfig = ModelConfig()
    tables: TablesConfig = TablesConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()
    pipeline: PipelineConfig = PipelineConfig()
    tiers: TiersConfig = TiersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    publish: PublishConfig = PublishConfig()

    @model_validator(mode="after")
    def _has_tiers(self) -> Self:
        if self.tiers.folder and not any(table.caches_rows for table in self.tables.sections):
            raise ValueError(
                f"tiers.folder={self.tiers.folder!r} is of tiered tables, and there are none; give "
                "tables.storage=tiered, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _can_clip(self) -> Self:
        if self.train.clip_grad_norm and self.parallel.synchronization == "average":
            raise ValueError(
                "train.clip_grad_norm and parallel.synchronization = 'average' do not go together: replicas step on "
                "their own gradients; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _pools(self) -> Self:
        for name, table in (("", self.tables), *self.tables.overridden.items()):
            key = f"tables.{name}.pooling".replace("..", ".")
            if self.model.is_sequence and table.pooling != "none" and "pooling" in table.model_fields_set:
                raise ValueError(f"{key}={table.pooling!r}: {self.model.name} reads a vector an event; leave it out")
            if not self.model.is_sequence and table.pooling == "none":
                raise ValueError(f"{key}='none' is for sequence models ({', '.join(KINDS)}); give sum or mean")
        return self
