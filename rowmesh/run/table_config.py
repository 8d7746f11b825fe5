"""The section `tables` of a configuration: what holds for all tables, and what differs for some."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rowmesh._support.files.places import local_store
from rowmesh.run.section import AUTO, Auto, Count, Factor, Positive, Rate, Section
from rowmesh.tables.spec import TRAITS, Storage

OptimizerName = Literal["sgd", "adagrad", "row_wise_adagrad", "adam"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]


class UpdateRuleConfig(Section):
    """The update rule of a table.

    Attributes:
        name: the rule.
        lr: its learning rate before the schedule; auto: by the batch size.
        eps: added to the denominator (adagrad, row_wise_adagrad, adam); the rule's own default if not given.
        initial_accumulator: what squared gradients are added to (adagrad, row_wise_adagrad).
        beta1: decay of the first moment (adam).
        beta2: decay of the second moment (adam).
        weight_decay: L2 penalty of the rows that a step touches; of adam decoupled.
        moment_scale: what squared gradients are divided by before their root (adagrad, row_wise_adagrad, adam): above
            0 and at most the number of replicas that are averaged, which is the default; else at most 1.
    """

    name: OptimizerName = "row_wise_adagrad"
    lr: Rate | Auto = AUTO
    eps: Rate | None = None
    initial_accumulator: Rate | None = None
    beta1: Decay | None = None
    beta2: Decay | None = None
    weight_decay: Rate | None = None
    moment_scale: Factor | None = None


class InitializerConfig(Section):
    """The distribution that rows start from.

    Attributes:
        name: the distribution.
        bound: of a uniform distribution; 1/√num_rows if not given.
        mean: of a normal distribution.
        std: of a normal distribution.
        value: of a constant.
    """

    name: Literal["uniform", "normal", "constant"] = "uniform"
    bound: Rate | None = None
    mean: Number | None = None
    std: Rate | None = None
    value: Number | None = None


class TensorTrainConfig(Section):
    """The shape of tensor-train tables: keys of `rowmesh.tables.TensorTrain`, and which tables they are.

    Attributes:
        min_rows: tables at least so large are tensor-train tables, where their `storage` is auto.
        optimizer: the update rule of cores, where not that of the table.
    """

    min_rows: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    rank: Positive | Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None
    memory_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    compression: Factor | None = None
    row_factors: Annotated[list[Positive], Field(min_length=3, max_length=3)] | None = None
    dim_factors: Annotated[list[Positive], Field(min_length=3, max_length=3)] | None = None
    optimizer: UpdateRuleConfig | None = None


class DynamicConfig(Section):
    """The rules by which dynamic tables hold, admit and evict ids: keys of `rowmesh.tables.Dynamic`.

    Attributes:
        eviction: as there; the number of score is that in a column of raw data that the schema names.
        ttl_seconds: as there; the time of events is a column of raw data that the schema names.
        store: as there; it is the run's own, which begins with an empty one.
    """

    capacity: Positive | None = None
    capacity_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    initial_capacity: Positive | None = None
    shards: Positive | None = None
    admit_after: Positive | None = None
    sketch_width: Count | None = None
    sketch_depth: Positive | None = None
    window_steps: Count | None = None
    eviction: Literal["lru", "lfu", "lru_lfu", "ttl", "score"] | None = None
    decay_steps: Count | None = None
    ttl_steps: Count | None = None
    ttl_seconds: Count | None = None
    mode: Literal["drop", "demote"] | None = None
    store: Annotated[str, AfterValidator(local_store)] | None = None
    store_capacity: Positive | None = None
    store_retry_s: Rate | None = None
    missing: Literal["initial", "zero", "error"] | None = None
    spare_frames: Positive | None = None


class TableConfig(Section):
    """The configuration of a table, or the defaults of all tables.

    Attributes:
        dim: length of a row.
        pooling: how the rows of a bag become one vector; none, of sequence models alone: every id keeps its own.
        dtype: storage of the rows.
        out_of_range: "error", or the row that an id below 0 or past the table reads instead.
        optimizer: the update rule.
        initializer: the distribution that rows start from.
        replicas: of this table, where not as many as `parallel.replicas`.
        storage: dense rows, spread over the ranks; tiered: the same, those in use in fast memory and the others as
            `tiers` says; tensor_train, computed on each rank from small cores; or dynamic: any 64-bit id, which comes
            and goes. auto: dense, but for tables of `tensor_train.min_rows` rows or more.
        tensor_train: what the cores are like.
        dynamic: how many ids a dynamic table holds, whom it admits and whom it evicts.
        frozen: whether rows are looked up and not trained.
        send: what travels in messages: rows, pooled where the sample is; sums, of tables that are whole on one rank,
            which pools them; or auto: what is fewer bytes, where a plan is searched for.
    """

    dim: Positive = 16
    pooling: Literal["sum", "mean", "none"] = "sum"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    out_of_range: Literal["error"] | Annotated[int, Field(ge=0, lt=2**63)] = "error"
    optimizer: UpdateRuleConfig = UpdateRuleConfig()
    initializer: InitializerConfig = InitializerConfig()
    replicas: Positive | None = None
    storage: Literal["auto", "dense", "tiered", "tensor_train", "dynamic"] = "auto"
    tensor_train: TensorTrainConfig = TensorTrainConfig()
    dynamic: DynamicConfig = DynamicConfig()
    frozen: bool = False
    send: Literal["auto", "rows", "sums"] = "rows"

    @property
    def takes_any_id(self) -> bool:
        """Whether any int64 is an id; otherwise ids are rows, as many as the data have values."""
        return TRAITS[self.storage_of(0)].takes_any_id

    @property
    def caches_rows(self) -> bool:
        """Whether the rows in use are in fast memory, and all rows where `tiers` says."""
        return TRAITS[self.storage_of(0)].caches_rows

    @property
    def chooses_storage(self) -> bool:
        """Whether the number of rows says how a table is stored."""
        return self.storage not in TRAITS

    def storage_of(self, num_rows: int) -> Storage:
        """How a table of so many rows is stored: where that is auto, as cores from `tensor_train.min_rows` rows on."""
        if (given := self.storage) in TRAITS:
            return given
        least = self.tensor_train.min_rows
        return "dense" if least is None or num_rows < least else "tensor_train"


class TablesConfig(TableConfig):
    """The defaults of all tables; a section of a table's own name changes them: `[tables.C3]`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TableConfig] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, values: Any) -> Any:
        """Fills what a table's section leaves out from the defaults beside it."""
        if not isinstance(values, dict):
            return values
        defaults = {key: value for key, value in values.items() if key in TableConfig.model_fields}
        tables = values.keys() - defaults.keys()
        return {
            key: _merge(defaults, value) if key in tables and isinstance(value, dict) else value
            for key, value in values.items()
        }

    @property
    def overridden(self) -> dict[str, TableConfig]:
        """The tables that have a section of their own."""
        return self.__pydantic_extra__

    @property
    def sections(self) -> tuple[TableConfig, ...]:
        """The defaults, and the sections of tables."""
        return self, *self.overridden.values()

    def of(self, table: str) -> TableConfig:
        """The configuration of one table."""
        return self.overridden.get(table, self)


def _merge(defaults: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `defaults`, section by section; a section with another `name` starts afresh."""
    merged = dict(defaults)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            same = value.get("name", old.get("name")) == old.get("name")
            value = _merge(old, value) if same else value
        merged[key] = value
    return merged
