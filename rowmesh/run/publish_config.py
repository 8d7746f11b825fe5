"""The section `[publish]`: when a run publishes versions of what it trains, and where."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rowmesh.publish.opening import split_url
from rowmesh.publish.publisher import Publisher
from rowmesh.run.section import Count, Positive, Section, default_of
from rowmesh.tables.dynamic.stores import Retry


def _target(url: str) -> str:
    if url:
        split_url(url)
    return url


class PublishConfig(Section):
    """Versions of tables and network for who serves; without `to` there are none.

    Attributes:
        to: `parquet:FOLDER`, `rocksdb:FOLDER`, or the URL of a Redis server, in which `$NAME` stands for a variable of
            the environment.
        every_steps: steps between two versions; 0: none by steps.
        every_minutes: minutes between two versions, by the clock of rank 0; 0: none by time.
        whole_every, keep_last: see `rowmesh.publish.Publisher`.
        on_failure: what a version that cannot be published does: a line, and training goes on (continue), or the run
            ends (stop).
        retry_s: seconds for which a server that does not answer is asked again; training waits.
    """

    to: Annotated[str, AfterValidator(_target)] = ""
    every_steps: Count = 0
    every_minutes: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)] = 0.0
    whole_every: Positive = default_of(Publisher, "whole_every")
    keep_last: Positive = default_of(Publisher, "keep_last")
    on_failure: Literal["continue", "stop"] = "continue"
    retry_s: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)] = Retry.for_s

    @property
    def is_on(self) -> bool:
        """Whether there are any."""
        return bool(self.to)

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if (self.every_steps or self.every_minutes) and not self.to:
            raise ValueError(
                "every_steps, every_minutes: say where to with publish.to: parquet:FOLDER, rocksdb:FOLDER or redis://…"
            )
        return self
