"""Generation: what one published version is, as JSON that the pointer to the newest one has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.manifest import OWN_SUM, own_sum
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.tables.dynamic.spec import Missing
from rowmesh.tables.initializer import INITIALIZERS, Initializer

_FORMAT = 2
Part = Mapping[str, Any]
"""Lists, in plain values of its target, what one rank wrote of a generation, so that readers miss nothing."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table as who serves needs to know it.

    Attributes:
        dim: D.
        initializer: of rows; with a bound of its own where it is uniform.
        seed: of initial values.
        missing: what an unknown id reads: its initial row, zeros, or an error.
    """

    dim: int
    initializer: Initializer
    seed: int = 0
    missing: Missing = "initial"

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigurationError(f"dim of a published table must be 1 or more, got {self.dim}")
        if self.missing not in get_args(Missing):
            raise ConfigurationError(f"missing must be one of {', '.join(get_args(Missing))}, got {self.missing!r}")
        if getattr(self.initializer, "bound", 0.0) is None:
            raise ConfigurationError("a published table needs a uniform initializer with a bound")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A version: tables and network of one step.

    Attributes:
        number: from 1.
        step: of training.
        chain: the generations that have its rows, the newest first: itself, and what it changes down to a whole one.
        sums: of the other generations of the chain, the checksums of what they say: `checksum`.
        parts: by rank, what each wrote of this generation.
        network: what the network is to be.
        tables: by name.
        run: which published it; "" where it has no name.
    """

    number: int
    step: int
    chain: tuple[int, ...]
    sums: tuple[str, ...]
    parts: tuple[Part, ...]
    network: Checksums
    tables: dict[str, PublishedTable]
    run: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it changes no other."""
        return len(self.chain) == 1

    @property
    def checksum(self) -> str:
        """The checksum of all values but itself."""
        return own_sum(self._values())

    def to_json(self) -> bytes:
        """What `read` takes."""
        values = self._values()
        return json.dumps({**values, OWN_SUM: own_sum(values)}, indent=1).encode()

    def _values(self) -> dict[str, Any]:
        tables = {
            name: {
                "dim": table.dim,
                "initializer": {"name": table.initializer.name, **asdict(table.initializer)},
                "seed": table.seed,
                "missing": table.missing,
            }
            for name, table in self.tables.items()
        }
        return {
            "format": _FORMAT,
            "run": self.run,
            "number": self.number,
            "step": self.step,
            "chain": self.chain,
            "sums": self.sums,
            "tables": tables,
            "network": self.network.to_json(),
            "parts": self.parts,
        }

    @classmethod
    def read(cls, text: bytes, name: str) -> Generation:
        """From JSON.

        Args:
            text: what `to_json` returned.
            name: of the place, for errors.

        Raises:
            DataError: it is something else, damaged, or of another version of rowmesh.
        """
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise DataError(
                    f"{name} has generations of format {values['format']}, and this rowmesh reads {_FORMAT}; publish "
                    "to another place"
                )
            if values.pop(OWN_SUM) != own_sum(values):
                raise DataError(f"{name} has a damaged generation: {OWN_SUM} is not that of what it says")
            tables = {table: _table(own) for table, own in values["tables"].items()}
            generation = cls(
                number=int(values["number"]),
                step=int(values["step"]),
                chain=tuple(map(int, values["chain"])),
                sums=tuple(map(str, values["sums"])),
                parts=tuple(map(dict, values["parts"])),
                network=Checksums.from_json(values["network"]),
                tables=tables,
                run=str(values["run"]),
            )
            if len(generation.sums) != len(generation.chain) - 1:
                raise ValueError(f"{len(generation.sums)} checksums of a chain of {len(generation.chain)}")
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise DataError(f"{name} has something that is no generation: {what}; publish to another place") from error
        return generation


def _table(values: dict) -> PublishedTable:
    options = dict(values["initializer"])
    initializer = INITIALIZERS[options.pop("name")](**options)
    return PublishedTable(dim=values["dim"], initializer=initializer, seed=values["seed"], missing=values["missing"])
