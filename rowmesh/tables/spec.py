"""TableSpec: everything that defines one embedding table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.ops.simd import COMPUTE_DTYPE, STORAGE
from rowmesh.tables.bag_config import fields_of
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.initializer import Initializer, Uniform
from rowmesh.tables.tensor_train import TensorTrain, TensorTrainShape
from rowmesh.tables.update_rules import RowWiseAdaGrad, UpdateRule

Pooling = Literal["sum", "mean", "none"]
Storage = Literal["dense", "tiered", "tensor_train", "dynamic"]
Send = Literal["auto", "rows", "sums"]


@dataclass(frozen=True)
class StorageTraits:
    """The answers that callers need about a storage.

    Attributes:
        stores_rows: whether rows are stored, by the ranks that a plan names; otherwise every rank computes them from
            cores, of which it has all.
        takes_any_id: whether any int64 is an id, and gets a row when it is admitted; otherwise ids are rows, whose
            number is known before.
        caches_rows: whether the rows in use are in fast memory, and all rows in a backing store.
    """

    stores_rows: bool = True
    takes_any_id: bool = False
    caches_rows: bool = False


TRAITS: dict[Storage, StorageTraits] = {
    "dense": StorageTraits(),
    "tiered": StorageTraits(caches_rows=True),
    "tensor_train": StorageTraits(stores_rows=False),
    "dynamic": StorageTraits(takes_any_id=True),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MAX_DIM = 1024


@dataclass(frozen=True, kw_only=True, repr=False)
class TableSpec:
    """An embedding table.

    Attributes:
        name: unique among the tables of a model.
        num_rows: ids of this table are 0 … num_rows − 1. Left out for a dynamic table: it is the capacity.
        dim: D, the length of a row, 1 to 1024; need not be a multiple of anything.
        features: the features that look rows up in this table; several may share it. Default: its name.
        pooling: how the rows of a bag become one vector; "none" returns one vector an id. The same for all features of
            the table: pooled and sequence features cannot share one.
        initializer: the distribution rows start from, a function of (seed, table name, row).
        optimizer: the update rule.
        dtype: storage of the rows. bfloat16 rows are pooled in and updated from float32 state.
        out_of_range: what to do with an id below 0 or past the table: "error", or the row to read
            instead; either is counted by feature.
        storage: "dense" rows, spread over the ranks; "tiered": the same, those in use in fast memory and the others in
            a backing store; "tensor_train": every rank computes rows from three small
            cores, which are what is trained; or "dynamic": any int64 is an id, and rows come and go.
        tensor_train: how big the cores may be, where there are any; default: of rank 16.
        dynamic: of a dynamic table: how many ids it holds, which it admits and which it evicts.
        frozen: whether rows begin frozen: looked up, and not trained. Frozen tables fuse with each other alone, so that
            `EmbeddingCollection.unfreeze` and `freeze` can name them apart from others.
        send: what travels in messages: "rows", which are pooled where the sample is; "sums": the table is whole on one
            rank, which gets the ids and answers with one vector a bag; "auto": sums where a plan that is searched for
            finds that they are fewer bytes, else rows. The same model, to the bit. Sums are of dense, pooled tables on
            hosts; where ranks read each other's memory, rows are read in place whatever this says.

    Example:
        >>> TableSpec(name="item", num_rows=1_000_000, dim=64).features
        ('item',)
        >>> rules = Dynamic(capacity=1_000_000)
        >>> TableSpec(name="item", dim=64, storage="dynamic", dynamic=rules, initializer=Uniform(bound=0.01)).num_rows
        1000000
    """

    name: str
    num_rows: int = cast("int", None)  # given, but for dynamic tables
    dim: int
    features: tuple[str, ...] = cast("tuple[str, ...]", None)  # becomes the name
    pooling: Pooling = "sum"
    initializer: Initializer = field(default_factory=Uniform)
    optimizer: UpdateRule = field(default_factory=RowWiseAdaGrad)
    dtype: torch.dtype = torch.float32
    out_of_range: Literal["error"] | int = "error"
    storage: Storage = "dense"
    tensor_train: TensorTrain | None = None
    dynamic: Dynamic | None = None
    frozen: bool = False
    send: Send = "rows"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a table has no name; give it one")
        if not isinstance(self.optimizer, UpdateRule):
            raise ConfigurationError(
                f"table {self.name!r}: the optimizer is {self.optimizer!r}; give an update rule, such as SGD(lr=0.1)"
            )
        if isinstance(self.features, str):
            raise ConfigurationError(
                f"table {self.name!r}: features must be a tuple of names; write ({self.features!r},) for one"
            )
        if self.features is None:
            object.__setattr__(self, "features", (self.name,))
        if not self.features:
            raise ConfigurationError(
                f"table {self.name!r} has no features, so nothing could look it up; name them, leave `features` out "
                "where the only one is called like the table, or leave the table out"
            )
        object.__setattr__(self, "features", tuple(self.features))
        self._check_dynamic()
        if self.num_rows < 1:
            raise ConfigurationError(f"table {self.name!r}: num_rows must be 1 or more, got {self.num_rows}")
        if not 1 <= self.dim <= MAX_DIM:
            raise ConfigurationError(f"table {self.name!r}: dim must be 1 to {MAX_DIM}, got {self.dim}")
        if self.pooling not in ("sum", "mean", "none"):
            raise ConfigurationError(
                f"table {self.name!r}: pooling must be 'sum', 'mean' or 'none', got {self.pooling!r}"
            )
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"table {self.name!r}: dtype must be one of {DTYPES}, got {self.dtype}")
        if len(set(self.features)) != len(self.features):
            raise ConfigurationError(f"table {self.name!r} names a feature twice: {self.features}")
        is_row = isinstance(self.out_of_range, int) and 0 <= self.out_of_range < self.num_rows
        if self.out_of_range != "error" and not is_row:
            raise ConfigurationError(
                f"table {self.name!r}: out_of_range must be 'error' or a row below {self.num_rows}, "
                f"got {self.out_of_range!r}"
            )
        self._check_storage()
        if self.send not in get_args(Send):
            raise ConfigurationError(f"table {self.name!r}: send must be one of {get_args(Send)}, got {self.send!r}")
        if self.send == "sums" and self.why_no_sums:
            raise ConfigurationError(f"table {self.name!r}: send='sums', but {self.why_no_sums}; send 'rows' or 'auto'")

    def _check_dynamic(self) -> None:
        """Says how many rows there are, where that is not given."""
        if self.storage != "dynamic":
            if self.dynamic is not None:
                raise ConfigurationError(
                    f"table {self.name!r} is {self.storage} and has no use for {self.dynamic}; give storage='dynamic' "
                    "too, or leave it out"
                )
            if self.num_rows is None:
                raise ConfigurationError(f"table {self.name!r}: give num_rows; only dynamic tables have none")
            return
        if not isinstance(self.dynamic, Dynamic):
            raise ConfigurationError(
                f"table {self.name!r} is dynamic: give dynamic=Dynamic(capacity=…), got {self.dynamic!r}"
            )
        try:
            object.__setattr__(self, "dynamic", self.dynamic.with_rows_of(self._row_bytes))
        except ConfigurationError as error:
            raise ConfigurationError(f"table {self.name!r}: {error}") from None
        if self.num_rows not in (None, self.dynamic.capacity):
            raise ConfigurationError(
                f"table {self.name!r} is dynamic and has any ids: leave num_rows out, got {self.num_rows}; its "
                f"capacity is {self.dynamic.capacity}"
            )
        object.__setattr__(self, "num_rows", self.dynamic.capacity)
        if isinstance(self.initializer, Uniform) and self.initializer.bound is None:
            raise ConfigurationError(
                f"table {self.name!r} is dynamic, and the bound 1/√num_rows is of a number of rows, which it has not; "
                "give initializer=Uniform(bound=…) or Normal(std=…)"
            )
        if self.out_of_range != "error":
            raise ConfigurationError(
                f"table {self.name!r} is dynamic, and no id is out of its range; leave out_of_range out, or see "
                "Dynamic(missing=…)"
            )

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row and its optimizer state."""
        lengths = {"row": 1, "element": self.dim}
        state = sum(lengths[extent] for extent in self.optimizer.state.values())
        return self.dim * self.dtype.itemsize + state * COMPUTE_DTYPE[STORAGE[self.dtype]].itemsize

    def with_num_frames(self, num_frames: int) -> TableSpec:
        """A dynamic table as the exchange sees it: rows are the frames of all ranks."""
        framed = replace(self)
        object.__setattr__(framed, "num_rows", num_frames)
        return framed

    def _check_storage(self) -> None:
        if self.storage not in TRAITS:
            raise ConfigurationError(f"table {self.name!r}: storage must be one of {(*TRAITS,)}, got {self.storage!r}")
        if self.storage != "tensor_train":
            if self.tensor_train is not None:
                raise ConfigurationError(
                    f"table {self.name!r} is {self.storage} and has no cores for {self.tensor_train}; give "
                    "storage='tensor_train' too, or leave it out"
                )
            return
        if self.dtype == torch.bfloat16:
            raise ConfigurationError(
                f"table {self.name!r}: cores of tensor-train tables are float32 or float64, not bfloat16"
            )
        if strangers := [name for name, extent in self.optimizer.state.items() if extent == "row"]:
            raise ConfigurationError(
                f"table {self.name!r}: {self.optimizer.name} keeps {strangers[0]!r} by row, and a tensor-train table "
                "has no rows of its own, only the cores that they are computed from; take the optimizer adagrad, sgd "
                "or adam, or storage='dense'"
            )
        if self.optimizer.weight_decay:
            raise ConfigurationError(
                f"table {self.name!r}: weight_decay is of the rows that a step touches, and a tensor-train table has "
                "no rows, only cores that all rows share; leave it out, or take storage='dense'"
            )
        _ = self.tensor_train_shape

    def __repr__(self) -> str:
        """The fields that differ from their defaults.

        >>> TableSpec(name="item", num_rows=5, dim=4, features=("item",), pooling="mean")
        TableSpec(name='item', num_rows=5, dim=4, pooling='mean')
        """
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        usual = {each.name: each.default for each in fields(self)}
        usual |= {each.name: each.default_factory() for each in fields(self) if each.default_factory is not MISSING}
        usual["features"] = (self.name,)
        if self.dynamic is not None:
            usual["num_rows"] = self.dynamic.capacity
        return f"TableSpec({', '.join(f'{name}={value!r}' for name, value in given if value != usual[name])})"

    @property
    def stores_rows(self) -> bool:
        """Whether its rows are stored, as a plan says; otherwise they are computed: see `StorageTraits`."""
        return TRAITS[self.storage].stores_rows

    @property
    def takes_any_id(self) -> bool:
        """Whether any int64 is an id; otherwise ids are 0 … num_rows − 1."""
        return TRAITS[self.storage].takes_any_id

    @property
    def caches_rows(self) -> bool:
        """Whether the rows in use are in fast memory, and all rows in a backing store."""
        return TRAITS[self.storage].caches_rows

    @property
    def why_no_sums(self) -> str:
        """Why an owner cannot answer with sums of its bags; "" where it can."""
        if self.storage != "dense":
            return f"the table is {self.storage}, and sums are of dense tables"
        return "it has pooling='none', so that its bags have no sums" if self.pooling == "none" else ""

    @property
    def takes_scores(self) -> bool:
        """Whether ids leave by scores of the caller, which come with batches of training."""
        return self.dynamic is not None and self.dynamic.eviction == "score"

    @property
    def tensor_train_shape(self) -> TensorTrainShape:
        """The shape of the cores, for `storage="tensor_train"`.

        Raises:
            ConfigurationError: the table cannot have cores like that; says what fits.
        """
        try:
            wanted = self.tensor_train or TensorTrain()
            return wanted.shape(self.num_rows, self.dim, self.dtype.itemsize)
        except ConfigurationError as error:
            raise ConfigurationError(f"table {self.name!r}: {error}") from None

    @classmethod
    def from_embedding_bag_config(cls, config: Any, **changes: Any) -> TableSpec:
        """From a TorchRec EmbeddingBagConfig, without importing TorchRec; keyword arguments override.

        Raises:
            ConfigurationError: the config asks for what rowmesh has no equal of (a data_type, an init_fn, …), or has no
                pooling, as an EmbeddingConfig.
        """
        return cls(**fields_of(config, changes, is_pooled=True))

    @classmethod
    def from_embedding_config(cls, config: Any, **changes: Any) -> TableSpec:
        """The same of an EmbeddingConfig, whose rows are not pooled: a look-up gives one vector an id (JaggedRows).

        Raises:
            ConfigurationError: as above, or it has pooling, as an EmbeddingBagConfig.
        """
        return cls(**fields_of(config, changes, is_pooled=False))


def check_tables(tables: Sequence[TableSpec]) -> None:
    """Raises ConfigurationError where names or features clash, or where there is no table at all."""
    if not tables:
        raise ConfigurationError("no tables: an embedding collection needs at least one")
    seen: dict[str, str] = {}
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            raise ConfigurationError(f"two tables are named {table.name!r}; names must be unique")
        names.add(table.name)
        for feature in table.features:
            if feature in seen:
                raise ConfigurationError(
                    f"feature {feature!r} is looked up in tables {seen[feature]!r} and {table.name!r}; "
                    "a feature has one table: name the second look-up otherwise, and give the batch as "
                    f"batch.with_aliases({{'{feature}@{table.name}': {feature!r}}})"
                )
            seen[feature] = table.name


def stored_tables(tables: Iterable[TableSpec]) -> list[TableSpec]:
    """The tables whose rows are stored, in their order: plans are for them.

    >>> from rowmesh.tables.update_rules import SGD
    >>> cored = TableSpec(name="item", num_rows=64, dim=8, storage="tensor_train", optimizer=SGD(lr=0.1))
    >>> [table.name for table in stored_tables([cored, TableSpec(name="user", num_rows=9, dim=8)])]
    ['user']
    """
    return [table for table in tables if table.stores_rows]


def names_of(tables: Iterable[TableSpec], *storages: Storage) -> list[str]:
    """The names of the tables that are stored in one of these ways, in their order."""
    return [table.name for table in tables if table.storage in storages]


def with_moment_scale(table: TableSpec, num_averaged: int) -> TableSpec:
    """A table whose update rule scales moments for so many replicas that are averaged, where it says nothing else.

    Source: two-dimensional sparse parallelism, Scaling Rule 1: c in (0, M], and M where nothing is known of the noise.

    Raises:
        ConfigurationError: it says more than the number of replicas.

    Example:
        >>> with_moment_scale(TableSpec(name="item", num_rows=5, dim=4), 2).optimizer.moment_scale
        2.0
    """
    scale = getattr(table.optimizer, "moment_scale", None)
    if scale is not None and scale > num_averaged:
        of = f"{num_averaged} replicas are averaged" if num_averaged > 1 else "its replicas are not averaged"
        raise ConfigurationError(
            f"table {table.name!r}: moment_scale must be above 0 and at most {num_averaged}, as {of}; got {scale:g}"
        )
    if scale is not None or num_averaged == 1 or not hasattr(table.optimizer, "moment_scale"):
        return table
    return replace(table, optimizer=replace(table.optimizer, moment_scale=float(num_averaged)))  # pyright: ignore[reportCallIssue]
