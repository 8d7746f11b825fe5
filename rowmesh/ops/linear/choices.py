"""Choices: which linear layers compute which of their matrix products by oneDNN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from torch import nn


class Passes(NamedTuple):
    """The three products of a layer, and whether each is by oneDNN."""

    forward: bool
    input: bool
    weight: bool


NONE, ALL = Passes(False, False, False), Passes(True, True, True)
Shape = tuple[int, int]
"""A layer's `[N, K]`: outputs and inputs."""


@dataclass(frozen=True)
class Choices:
    """How linear layers are computed, by their shape; layers of other shapes are torch's own.

    Attributes:
        passes: of each shape.
    """

    passes: Mapping[Shape, Passes] = field(default_factory=dict)

    @classmethod
    def everything(cls, shapes: Iterable[Shape]) -> Self:
        """All products by oneDNN."""
        return cls(dict.fromkeys(shapes, ALL))

    def to_plain(self) -> list[list[Any]]:
        """Plain values, for other ranks and for checkpoints."""
        return [[*shape, *passes] for shape, passes in self.passes.items()]

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what `to_plain` returned.

        Raises:
            ValueError, TypeError: it is something else.
        """
        return cls({(int(n), int(k)): Passes(bool(f), bool(i), bool(w)) for n, k, f, i, w in values})

    def __bool__(self) -> bool:
        """Whether any product is by oneDNN."""
        return any(any(passes) for passes in self.passes.values())


def linear_shapes(network: nn.Module) -> list[Shape]:
    """The distinct shapes of the linear layers of a network, in their order."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return list(dict.fromkeys((layer.out_features, layer.in_features) for layer in layers))
