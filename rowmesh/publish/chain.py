"""The generations that have a generation's rows, each as it was published."""

from __future__ import annotations

from rowmesh.errors import DamagedFileError, StoreError
from rowmesh.publish.generation import Generation
from rowmesh.publish.target import Target

ADVICE = "publish a whole generation"


def removed(number: int, name: str) -> StoreError:
    """The error of a reader whose generation is gone."""
    return StoreError(f"generation {number} of {name} was removed; refresh")


def read_chain(target: Target, generation: Generation) -> list[Generation]:
    """A generation and those that it changes, the newest first.

    Raises:
        StoreError: one was removed meanwhile.
        DataError: one is damaged, or another than the one that was there.
    """
    found = [generation]
    for number, checksum in zip(generation.chain[1:], generation.sums, strict=True):
        text = target.manifest(number)
        if text is None:
            raise removed(number, target.name)
        other = Generation.read(text, f"generation {number} of {target.name}")
        if (other.number, other.checksum) != (number, checksum):
            raise DamagedFileError(
                f"generation {number} of {target.name} is not the one that generation {generation.number} changes; "
                f"{ADVICE}"
            )
        found.append(other)
    return found
