"""TensorTrainEmbeddingBag: nn.EmbeddingBag, its table stored as the product of three small cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rowmesh._support.faults import reach
from rowmesh._support.gate import Gate
from rowmesh.errors import ConfigurationError
from rowmesh.ops.gpu import require_triton
from rowmesh.ops.pool.one_feature import Bags, pool_of
from rowmesh.ops.prefixes import Workspace, sort_ids
from rowmesh.ops.tensor_train import SPARSE_OBSTACLE, Lookup, reference
from rowmesh.ops.untraced import untraced
from rowmesh.tables.cores import draw_cores
from rowmesh.tables.initializer import Initializer, Normal
from rowmesh.tables.spec import MAX_DIM
from rowmesh.tables.tensor_train import TensorTrainShape
from rowmesh.tensor_train import bags as arguments
from rowmesh.tensor_train.bags import MODES, LateBagCheck, check_arguments, check_ids
from rowmesh.tensor_train.decompose import tt_svd
from rowmesh.tensor_train.functions import LookedUp, Pending

DTYPES = (torch.float32, torch.float64)
DEVICES = ("cpu", "cuda")
_NUM_ROWS = "num_embeddings"  # in the metadata of a state


class TensorTrainEmbeddingBag(nn.Module):
    """`nn.EmbeddingBag` in a fraction of the memory: the table is a product of cores that are trained themselves.

    row(id)[j₁, j₂, j₃] = Σ over r₁, r₂ of G₁[i₁, j₁, r₁] · G₂[i₂, r₁, j₂, r₂] · G₃[i₃, j₃, r₂]

    Arguments, inputs and results are those of `nn.EmbeddingBag`. The work of a step follows its distinct ids. Any torch
    optimizer trains the parameters; `rowmesh.TensorTrainOptimizer` touches only the slices that were read, and fuses
    the update with the gradients.

    Any number of threads may look up at once under `torch.no_grad()`, also while another one steps a
    TensorTrainOptimizer: they find the cores as they are between two steps. Under torch's own optimizers, which know of
    no reader, threads that look up meanwhile may find a part of a step, as with `nn.EmbeddingBag`.

    Differs from `nn.EmbeddingBag`: there is no `weight` (`dense()` makes it); rows share cores, so that a step for one
    id changes others too, and the row of `padding_idx`, never read nor trained itself, is not fixed; `max_norm` cannot
    be kept.

    Args:
        num_embeddings: rows of the table; any number, padded to a product of three.
        embedding_dim: D, 1 to 1024.
        max_norm: not supported; must be None.
        norm_type: not supported; must be 2.
        scale_grad_by_freq: divide the gradient of an id by how often it occurs in the batch.
        mode: "sum", "mean" or "max" of the rows of a bag.
        sparse: gradients of the cores are sparse tensors of the touched slices, for optimizers that take them.
        _weight: a table to start from, `[num_embeddings, embedding_dim]`; see `from_pretrained`.
        include_last_offset: offsets end with the number of ids.
        padding_idx: an id that is left out of every bag.
        device: the CPU, or a GPU ("cuda"); the first values are drawn on the CPU.
        dtype: float32 or float64; default: torch's.
        rank: of both bonds or of each; default 16, or the largest that the table can have.
        memory_bytes: instead of a rank: the largest at which the cores fit into so much.
        compression: instead of a rank: the largest at which the table is so many times smaller.
        row_factors: three numbers whose product has room for all rows; default: even ones.
        dim_factors: three numbers whose product is D; default: even ones.
        initializer: the distribution of the rows, of mean 0; default: normal, standard deviation 1, like torch.
        seed: of the first values, which are a function of (seed, name); default: drawn from torch's generator.
        name: of the table; sets tables of one seed apart.

    Raises:
        ConfigurationError: the table cannot be represented as asked; says what fits.

    Source: EL-Rec (SC'22) §II-B, §III. Differs: see `rowmesh.ops.tensor_train`.

    Example:
        >>> bag = TensorTrainEmbeddingBag(1_000_000, 64, mode="sum", rank=16, seed=0)
        >>> bag(torch.tensor([3, 999_999, 3]), torch.tensor([0, 2])).shape
        torch.Size([2, 64])
        >>> round(bag.shape.compression)
        556
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | tuple[int, int] | None = None,
        memory_bytes: int | None = None,
        compression: float | None = None,
        row_factors: Sequence[int] | None = None,
        dim_factors: Sequence[int] | None = None,
        initializer: Initializer | None = None,
        seed: int | None = None,
        name: str = "tensor_train",
    ) -> None:
        super().__init__()
        if embedding_dim > MAX_DIM:
            raise ConfigurationError(f"embedding_dim must be 1 to {MAX_DIM}, got {embedding_dim}")
        dtype = dtype or (torch.get_default_dtype() if _weight is None else _weight.dtype)
        if device is None:  # 0 is a GPU
            device = "cpu" if _weight is None else _weight.device
        device = torch.device(device)
        _check_norm(max_norm, norm_type)
        _check_mode(mode, sparse, scale_grad_by_freq)
        _check_kind(device, dtype)
        size = {"rank": rank, "memory_bytes": memory_bytes, "compression": compression}
        factors = {"row_factors": row_factors, "dim_factors": dim_factors, "element_bytes": dtype.itemsize}
        self.shape = TensorTrainShape.choose(num_embeddings, embedding_dim, **size, **factors)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.sparse, self.scale_grad_by_freq = mode, sparse, scale_grad_by_freq
        self.include_last_offset = include_last_offset
        self.padding_idx = _padding_row(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.initializer, self.seed, self.name = initializer or Normal(std=1.0), seed, name
        if _weight is None:
            cores = draw_cores(self.shape, self.initializer, _seed(seed), name, dtype)
        else:
            cores = [core.to(dtype) for core in tt_svd(_weight.cpu(), self.shape)]
        self.cores = nn.ParameterList(nn.Parameter(core.to(device)) for core in cores)
        self._pending: Pending | None = None
        self._workspace = Workspace()
        self._unread: LateBagCheck | None = None
        self.gate = Gate()  # look-ups of several threads, and updates that this library makes

    def reset_parameters(self) -> None:
        """Draws the first values again, in place: those of the seed, or new ones where none was given."""
        drawn = draw_cores(self.shape, self.initializer, _seed(self.seed), self.name, self.cores[0].dtype)
        with torch.no_grad():
            for core, values in zip(self.cores, drawn, strict=True):
                core.copy_(values)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **shape: Any,
    ) -> TensorTrainEmbeddingBag:
        """From a table, by rank-truncated TT-SVD (`rowmesh.tensor_train.decompose.tt_svd`).

        Args:
            embeddings: `[num_embeddings, embedding_dim]`.
            freeze: the cores are not trained.
            shape: `rank`, `memory_bytes`, `compression`, `row_factors`, `dim_factors`.

        Example:
            >>> table = torch.arange(24.0).view(8, 3)
            >>> bag = TensorTrainEmbeddingBag.from_pretrained(table, mode="sum", rank=(2, 2))
            >>> bool((bag.dense() - table).abs().max() < 1e-5)
            True
        """
        if embeddings.dim() != 2:
            raise ConfigurationError(f"embeddings must be [rows, dim], got {tuple(embeddings.shape)}")
        num_rows, dim = embeddings.shape
        how = (max_norm, norm_type, scale_grad_by_freq, mode, sparse)
        bag = cls(num_rows, dim, *how, embeddings, include_last_offset, padding_idx, **shape)
        return bag.requires_grad_(not freeze)

    @untraced
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pools the rows of each bag into one vector.

        Args:
            input: ids, int64 or int32: `[N]` with offsets, or `[B, L]`, whose lines are the bags.
            offsets: `[B]`, where each bag begins; with `include_last_offset` `[B + 1]`.
            per_sample_weights: a factor for each id, of input's shape; with mode "sum" only.

        Returns:
            `[B, D]`; an empty bag is zero.

        On a GPU, where input, offsets and weights must be too, the host does not wait for results: ids outside the
        table, and offsets in disorder, are refused by `backward`, before gradients are made, or by the next look-up;
        at once, for which it waits, where the cores get no gradients, as those that are frozen.

        Raises:
            ValueError, TypeError, NotImplementedError: where `nn.EmbeddingBag` refuses.
            IdRangeError: ids are outside the table; says which.
            ConfigurationError: cores are on a GPU, and the mode is "max" or gradients are to be sparse.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(f"per_sample_weights are for mode='sum' only, this is mode={self.mode!r}")
        cores = tuple(self.cores)
        with self._gate_of(cores):
            return self._forward(cores, input, offsets, per_sample_weights)

    def _gate_of(self, cores: Sequence[Tensor]) -> Any:
        """On a device look-ups take turns: the host only launches them, and keeps what it checks later once."""
        return self.gate.writing if is_on_device(cores[0]) else self.gate.reading

    def _forward(
        self, cores: tuple[Tensor, ...], input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        self._check_usable(cores)
        keep, how = self._has_backward(cores), (self.sparse, self.scale_grad_by_freq, self._pending)
        check_arguments(input, offsets, weights, self.include_last_offset, cores[0].device)
        bags, lookup = self._look_up_bags(is_on_device(cores[0]), input, offsets, weights)
        if not keep:
            lookup.check()  # no backward comes that would
        reach("tensor_train.looked_up")
        weights = bags.weights
        if bags.ids.numel() and (self.mode == "max" or (weights is not None and weights.requires_grad)):
            rows: Any = LookedUp.apply(lookup, None, keep, how, *cores)
            # On a device ids past the last bag are not cut off: they are a bag of their own.
            bounds = torch.cat([bags.bounds, torch.full_like(bags.bounds[:1], bags.ids.numel())])
            weights = None if weights is None else weights.to(rows.dtype)
            inverse, options = lookup.prefixes.inverse_ids(), {"mode": self.mode, "include_last_offset": True}
            return F.embedding_bag(inverse, rows, bounds, per_sample_weights=weights, **options)[: bags.count]
        pool = pool_of(bags, lookup.prefixes, self.shape.dim, cores[0].dtype, is_mean=self.mode == "mean")
        pooled: Any = LookedUp.apply(lookup, pool, keep, how, *cores)
        return pooled

    def _look_up_bags(
        self, on_device: bool, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Bags, Lookup]:
        """Checked arguments as bags, without the ids that only pad, and the distinct ids."""
        given = (input, offsets, weights, self.include_last_offset)
        if not on_device:
            bags = arguments.without(arguments.bags_of(*given), self.padding_idx)
            return bags, self._sorted(bags.ids)
        bags, disorder = arguments.device_bags_of(*given)
        bags = arguments.padding_last(bags, self.padding_idx)
        ids, outside = arguments.bounded(bags, self.num_embeddings)
        return bags, self._sorted(ids, LateBagCheck(bags.ids, outside, disorder, self.num_embeddings))

    def _sorted(self, ids: Tensor, late_check: LateBagCheck | None = None) -> Lookup:
        """The distinct ids: on a device with a check, which first raises what was wrong with the look-up before."""
        workspace = self._workspace
        if late_check is not None:
            unread, self._unread, workspace = self._unread, None, None
            if unread is not None and not unread.was_raised:
                unread()
            self._unread = late_check
        return Lookup(sort_ids(ids, self.num_embeddings, self.shape.row_factors, workspace), late_check)

    @untraced
    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ids of any shape, `[…, D]`; differentiable.

        Example:
            >>> bag = TensorTrainEmbeddingBag(10, 4, seed=0)
            >>> bag.rows(torch.tensor([[3, 7]])).shape
            torch.Size([1, 2, 4])
        """
        cores = tuple(self.cores)
        check_ids("ids", ids, cores[0].device)
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        with self._gate_of(cores):
            lookup, keep = self.look_up(flat), self._has_backward(cores)
            if not keep:
                lookup.check()  # no backward comes that would
            unique: Any = LookedUp.apply(lookup, None, keep, (self.sparse, False, self._pending), *cores)
        return unique[lookup.prefixes.inverse_ids()].view(*ids.shape, self.embedding_dim)

    def dense(self) -> Tensor:
        """The whole table, `[num_embeddings, embedding_dim]`; differentiable, and as big as it sounds."""
        return reference.dense(list(self.cores))[: self.num_embeddings]

    def extra_repr(self) -> str:
        """The table, its shape, and what differs from the defaults."""
        shape = self.shape
        text = f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, ranks={shape.ranks}"
        text += f", row_factors={shape.row_factors}, dim_factors={shape.dim_factors}"
        text += "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{text}, {shape.compression:.3g} times smaller"

    def send_gradients_to(self, pending: Pending | None) -> None:
        """From the next look-up on, gradients of rows go there instead of into the cores' `grad`; None undoes it."""
        self._pending = pending

    @property
    def pending(self) -> Pending | None:
        """Where gradients of rows go."""
        return self._pending

    def look_up(self, ids: Tensor) -> Lookup:
        """The distinct ids of int64 `[N]`, arranged for the kernels.

        Raises:
            IdRangeError: an id is outside the table; on a GPU that is learned later, by `Lookup.check`.
            ConfigurationError: the kernels cannot read the cores.
        """
        cores, num_rows = tuple(self.cores), self.num_embeddings
        self._check_usable(cores)
        if not is_on_device(cores[0]):
            return self._sorted(ids)
        late_check = LateBagCheck(ids, (ids < 0) | (ids >= num_rows), None, num_rows)
        return self._sorted(ids.clamp(0, num_rows - 1), late_check)

    def _check_usable(self, cores: Sequence[Tensor]) -> None:
        """Raises ConfigurationError where kernels cannot do what is asked where the cores are."""
        _check_cores(cores, self.shape)
        if not is_on_device(cores[0]):
            return
        if self._unread is None:
            require_triton(cores[0].device)
        if self.mode == "max":
            raise ConfigurationError(
                "mode = 'max' is for tables on the CPU: on a GPU torch adds its gradients in no fixed order; take "
                "'sum' or 'mean', or leave the table on the CPU"
            )
        if self.sparse:
            raise ConfigurationError(SPARSE_OBSTACLE)

    def _has_backward(self, cores: Sequence[Tensor]) -> bool:
        """Whether a backward may come, which DistributedDataParallel must be able to sum."""
        has_backward = torch.is_grad_enabled() and any(core.requires_grad for core in cores)
        if has_backward and getattr(DistributedDataParallel, "_active_ddp_module", None):
            self._check_data_parallel()
        return has_backward

    def _check_data_parallel(self) -> None:
        """Raises ConfigurationError where DistributedDataParallel cannot sum the gradients."""
        table = f"tensor-train table {self.name!r}"
        if self._pending is not None:
            raise ConfigurationError(
                f"{table} is trained by a TensorTrainOptimizer under DistributedDataParallel, which cannot sum "
                "gradients that the cores do not get: ranks would drift apart. Train its parameters by a torch "
                'optimizer, or make it a table of an EmbeddingCollection, TableSpec(…, storage="tensor_train")'
            )
        if self.sparse:
            raise ConfigurationError(
                f"{table} has sparse = True, and DistributedDataParallel sums sparse gradients of torch's own modules "
                "only; make it with sparse = False"
            )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Notes how many rows there are where torch notes versions: cores of some more may have the same shapes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata.setdefault(prefix[:-1], {})[_NUM_ROWS] = self.num_embeddings

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *more: Any, **named: Any
    ) -> None:
        """Raises ConfigurationError, before cores are loaded, where the state is known to be of other rows."""
        saved = local_metadata.get(_NUM_ROWS, self.num_embeddings)
        if saved != self.num_embeddings:
            raise ConfigurationError(
                f"{prefix + 'cores'!r} of the state is of a table of {saved} rows, and tensor-train table "
                f"{self.name!r} has {self.num_embeddings}; make it with num_embeddings = {saved}"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more, **named)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles train on their own: an optimizer of this module is not theirs."""
        return self.__dict__ | {"_pending": None, "_unread": None}


def is_on_device(core: Tensor) -> bool:
    """Whether a core is looked up by kernels of a device."""
    return core.device.type == "cuda"


def _check_norm(max_norm: float | None, norm_type: float) -> None:
    if max_norm is not None or norm_type != 2.0:
        raise ConfigurationError(
            f"max_norm = {max_norm} (norm_type = {norm_type}) rescales single rows in place, and rows of a product of "
            "cores are not there to be rescaled; leave it out, or use nn.EmbeddingBag"
        )


def _check_mode(mode: str, sparse: bool, by_frequency: bool) -> None:
    if mode not in MODES:
        raise ConfigurationError(f"mode must be one of {MODES}, got {mode!r}")
    if sparse + by_frequency + (mode == "max") > 1:
        raise ConfigurationError(
            f"sparse = {sparse}, scale_grad_by_freq = {by_frequency} and mode = {mode!r} do not go together, as in "
            "nn.EmbeddingBag: take one of sparse gradients, scaling by frequency and the mode 'max'"
        )


def _check_kind(device: torch.device, dtype: torch.dtype) -> None:
    if device.type not in DEVICES:
        raise ConfigurationError(f"tensor-train tables are on the CPU or on a GPU ('cuda'), got device = {device}")
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be float32 or float64, got {dtype}")


def _check_cores(cores: Sequence[Tensor], shape: TensorTrainShape) -> None:
    """Raises ConfigurationError where kernels, which read by address, would read something else."""
    kinds = {(core.dtype, core.device) for core in cores}
    dtype, device = next(iter(kinds))
    contiguous = all(core.is_contiguous() for core in cores)
    if len(kinds) > 1 or dtype not in DTYPES or device.type not in DEVICES or not contiguous:
        raise ConfigurationError(
            "cores must be contiguous tensors on the CPU or on a GPU, all float32 or all float64, got "
            + ", ".join(f"{core.dtype} on {core.device}" for core in cores)
        )
    if (found := tuple(tuple(core.shape) for core in cores)) != shape.core_shapes:
        raise ConfigurationError(
            f"the cores are {found}, and {shape.core_shapes} for {shape.num_rows} rows of {shape.dim} at ranks "
            f"{shape.ranks}; share cores between tables of one shape only"
        )


def _padding_row(padding_idx: int | None, num_rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ConfigurationError(f"padding_idx must be -{num_rows} to {num_rows - 1}, got {padding_idx}")
    return padding_idx % num_rows


def _seed(seed: int | None) -> int:
    return int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
