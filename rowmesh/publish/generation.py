"""Generation: what one published version is, as JSON that the pointer to the newest one has."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import get_args

from rowmesh.errors import ConfigurationError, DataError
from rowmesh.tables.dynamic import Missing
from rowmesh.tables.initializer import INITIALIZERS, Initializer

_FORMAT = 1


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
        num_parts: of each generation of the chain: how many ranks wrote it.
        tables: by name.
        run: which published it; "" where it has no name.
    """

    number: int
    step: int
    chain: tuple[int, ...]
    num_parts: tuple[int, ...]
    tables: dict[str, PublishedTable]
    run: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it changes no other."""
        return len(self.chain) == 1

    def to_json(self) -> bytes:
        """What `read` takes."""
        tables = {
            name: {
                "dim": table.dim,
                "initializer": {"name": table.initializer.name, **asdict(table.initializer)},
                "seed": table.seed,
                "missing": table.missing,
            }
            for name, table in self.tables.items()
        }
        own = {
            "run": self.run,
            "number": self.number,
            "step": self.step,
            "chain": self.chain,
            "num_parts": self.num_parts,
        }
        return json.dumps({"format": _FORMAT, **own, "tables": tables}, indent=1).encode()

    @classmethod
    def read(cls, text: bytes, name: str) -> Generation:
        """From JSON.

        Args:
            text: what `to_json` returned.
            name: of the place, for errors.

        Raises:
            DataError: it is something else, or of a later version of rowmesh.
        """
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise DataError(
                    f"{name} has generations of format {values['format']}, and this rowmesh reads {_FORMAT}"
                )
            tables = {table: _table(own) for table, own in values["tables"].items()}
            return cls(
                number=int(values["number"]),
                step=int(values["step"]),
                chain=tuple(map(int, values["chain"])),
                num_parts=tuple(map(int, values["num_parts"])),
                tables=tables,
                run=str(values.get("run", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{name} has something that is no generation: {error}; publish to another place") from error


def _table(values: dict) -> PublishedTable:
    options = dict(values["initializer"])
    initializer = INITIALIZERS[options.pop("name")](**options)
    return PublishedTable(dim=values["dim"], initializer=initializer, seed=values["seed"], missing=values["missing"])
