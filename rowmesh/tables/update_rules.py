"""Update rules: what the optimizer of a table is, as a value.

A rule says which state a row carries and with which numbers it is updated; the arithmetic itself
is in `rowmesh.ops.merge_update`, one reference and one kernel for each backend.

In all formulas g is the gradient of a row summed over every id of the global batch that names it,
of the loss averaged over the global batch. Rows that no id names do not change.

[Note: moment scaling]
Where replica groups take their steps on their own gradients and average rows and states afterwards, the mean of the
groups' g² is larger than the square of the mean g, by the variance of the groups' gradients: v grows faster, and steps
shrink. `moment_scale` c undoes that. It divides v where a step is computed, √(v / c), never where v is kept, so that c
may change between two runs of a model. It is in (0, M] for M groups, nearer to M the noisier the gradients; 1 is the
plain optimizer, to the bit. None leaves it to the collection, which knows the groups, and is 1 elsewhere.

Source: Two-dimensional sparse parallelism, §3.2, Algorithm 1 line 6 and Scaling Rule 1. Differs: AdaGrad element by
element has it too, as well as Adam, which the paper only mentions.

[Note: weight decay]
`weight_decay` λ draws rows towards 0. It is lazy: a row decays in the steps that touch it, once a step however many ids
name it, and not in between. 0 is no decay, with kernels of its own, to the bit those without.

    SGD and both AdaGrads, L2:  g ← g + λw, before all else, so that squares have it too
    Adam, decoupled:            w ← w − lr · λ · w, then the step, whose moments know nothing of it

g is as it was clipped and unscaled: clipping does not see the decay.

Source: torch.optim.SGD, Adagrad and AdamW, on the rows that a step touches (those of torch refuse `weight_decay` with
sparse gradients); FBGEMM's exact row-wise AdaGrad with WeightDecayMode.L2, and its Adam, which decays decoupled.
Differs: tensor-train tables, which have no rows, refuse it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from rowmesh.errors import ConfigurationError

MOMENT_SCALES = (1e-30, 1e30)  # within them c^-½ and its products with float32 roots neither overflow nor vanish


class Rate(NamedTuple):
    """How fast a group learns.

    Attributes:
        lr: the learning rate.
        factor: what its gradients are multiplied by first, beside the mean over ranks: undoes the scaling of a loss.
    """

    lr: float
    factor: float = 1.0


class Update(NamedTuple):
    """The numbers of one group's update.

    Attributes:
        lr: the learning rate.
        scaling: what summed gradients are multiplied by.
        step: which update this is, from 1.
    """

    lr: float
    scaling: float
    step: int


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Base of the update rules.

    Attributes:
        lr: the learning rate a table starts with; schedules change it in the optimizer, not here.
        weight_decay: λ of [Note: weight decay], for the rows that a step touches.
        name: the rule's name in configuration, counters and checkpoints.
        state: name → whether the state has one value a row ("row") or one an element ("element").
    """

    lr: float = 0.01
    weight_decay: float = 0.0
    name: ClassVar[str]
    state: ClassVar[dict[str, str]]

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps", "initial_accumulator"):
            value = getattr(self, name, 0.0)
            if not 0.0 <= value < math.inf:
                raise ConfigurationError(f"{self.name}: {name} must be 0 or more and finite, got {value}")
        moment_scale = getattr(self, "moment_scale", None)
        least, most = MOMENT_SCALES
        if moment_scale is not None and not least <= moment_scale <= most:
            raise ConfigurationError(
                f"{self.name}: moment_scale must be above 0 and finite ({least:g} to {most:g}), got {moment_scale}; "
                "1 is the plain optimizer, the number of replica groups the most that averaging calls for"
            )

    @cached_property
    def hyperparameters(self) -> tuple[float, float, float]:
        """The three numbers the kernels take beside lr; unused ones are 0."""
        return (0.0, 0.0, 0.0)

    @cached_property
    def root_factor(self) -> float:
        """The factor of √v in kernels: c^-½; 1 without moment scaling."""
        return (getattr(self, "moment_scale", None) or 1.0) ** -0.5

    def numbers(self, lr: float, scaling: float, step: int) -> tuple[float, ...]:
        """The arguments of kernels: learning rate, factor of gradients, eps, β₁, β₂ and factor of √v.

        A rule that decays has one more: λ, or for Adam 1 − lr · λ.

        Args:
            lr: the learning rate now.
            scaling: what gradients are multiplied by.
            step: which update this is, from 1 (for bias corrections).

        Example:
            >>> AdaGrad().numbers(lr=0.1, scaling=0.5, step=1)
            (0.1, 0.5, 1e-10, 0.0, 0.0, 1.0)
            >>> SGD(weight_decay=0.01).numbers(lr=0.1, scaling=0.5, step=1)
            (0.1, 0.5, 0.0, 0.0, 0.0, 1.0, 0.01)
        """
        decay = (self.weight_decay,) if self.weight_decay else ()
        return lr, scaling, *self.hyperparameters, self.root_factor, *decay

    @property
    def initial_state(self) -> dict[str, float]:
        """The value every state tensor starts with."""
        return dict.fromkeys(self.state, 0.0)


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """w −= lr · g, where g has λw in it too, see [Note: weight decay]."""

    name: ClassVar[str] = "sgd"
    state: ClassVar[dict[str, str]] = {}


@dataclass(frozen=True, kw_only=True)
class _Accumulating(UpdateRule):
    """The base of the AdaGrad rules: one sum of squares that only grows."""

    eps: float
    initial_accumulator: float = 0.0
    moment_scale: float | None = None

    @cached_property
    def hyperparameters(self) -> tuple[float, float, float]:
        """Eps."""
        return (self.eps, 0.0, 0.0)

    @property
    def initial_state(self) -> dict[str, float]:
        """The accumulator's first value."""
        return {"sum": self.initial_accumulator}


@dataclass(frozen=True, kw_only=True)
class AdaGrad(_Accumulating):
    """v += g²;  w −= lr · g / (√(v / c) + eps), element by element, c = `moment_scale` or 1.

    With c = 1 torch.optim.Adagrad on sparse gradients; c is explained in [Note: moment scaling]. g has λw in it too,
    see [Note: weight decay].
    """

    eps: float = 1e-10
    name: ClassVar[str] = "adagrad"
    state: ClassVar[dict[str, str]] = {"sum": "element"}


@dataclass(frozen=True, kw_only=True)
class RowWiseAdaGrad(_Accumulating):
    """v += mean(g²);  w −= lr · g / (√(v / c) + eps), one v a row, c = `moment_scale` or 1.

    Source: FBGEMM's exact row-wise AdaGrad for c = 1; Two-dimensional sparse parallelism, Algorithm 1 lines 5 and 6 for
    the rest. Differs: the paper writes the sum of squares, D times our mean; and where its text (not its Algorithm 1)
    has eps under the root, ours is added to it. c is explained in [Note: moment scaling]. g has λw in it too, see
    [Note: weight decay].
    """

    eps: float = 1e-8
    name: ClassVar[str] = "row_wise_adagrad"
    state: ClassVar[dict[str, str]] = {"sum": "row"}


@dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """Lazy Adam: m and v of a row move only in steps that touch the row.

    m = β₁m + (1−β₁)g;  v = β₂v + (1−β₂)g²;  w −= lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ) / c) + eps)

    Before that w *= 1 − lr · λ, as torch.optim.AdamW has it, see [Note: weight decay].
    c = `moment_scale` or 1, applied to the bias-corrected v; it is explained in [Note: moment scaling].
    t counts the steps of the optimizer, not the touches of the row: the semantics of
    torch.optim.SparseAdam, whose eps is added to √(v) before its bias correction is applied; ours
    follows torch.optim.Adam and adds it after, to the root that c has scaled.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moment_scale: float | None = None
    name: ClassVar[str] = "adam"
    state: ClassVar[dict[str, str]] = {"m": "element", "v": "element"}

    @cached_property
    def hyperparameters(self) -> tuple[float, float, float]:
        """eps, β₁, β₂."""
        return (self.eps, self.beta1, self.beta2)

    def numbers(self, lr: float, scaling: float, step: int) -> tuple[float, ...]:
        """With the bias corrections of both moments."""
        corrected = lr / (1.0 - self.beta1**step), scaling, *self.hyperparameters
        decay = (1.0 - lr * self.weight_decay,) if self.weight_decay else ()
        return *corrected, self.root_factor * (1.0 - self.beta2**step) ** -0.5, *decay

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ConfigurationError(f"adam: {name} must be in [0, 1), got {beta}")


RULES: dict[str, type[UpdateRule]] = {rule.name: rule for rule in (SGD, AdaGrad, RowWiseAdaGrad, Adam)}
