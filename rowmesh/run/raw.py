"""Runs on raw data: what they take where the configuration says auto, and how ranks follow a source together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rowmesh.data.raw import RawData
from rowmesh.data.raw.loader import LOOK_S, Readiness
from rowmesh.data.schema import Schema
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.run.config import Config
from rowmesh.run.section import AUTO

DOING = "waiting for rows"


def open_raw(config: Config, trained: Mapping[str, Any] | None = None) -> RawData:
    """The raw data of a run.

    Args:
        config: of the run.
        trained: the metadata of its model, where it has one. Rows are read by the schema that they keep, whatever
            became of the file, and columns of Parquet files hold what they held in training. Models of prepared data
            keep no schema.

    Raises:
        ConfigurationError: their schema cannot be read.
    """
    section, kept = config.data, (trained or {}).get(SCHEMA)
    data = RawData(
        location=section.folder,
        schema=Schema.load(section.raw_schema) if kept is None else Schema.parse(kept),
        stream=section.stream,
        hash_seed=section.hash_seed,
        follow=section.follow,
    )
    remember_forms(data, trained or {})
    return data


SCHEMA = "raw_schema"
"""Where the metadata of a model have the schema by which its raw rows were read."""
FORMS = "forms"
"""Where the metadata of a model say what the columns of its Parquet files hold."""


def raw_metadata(data: object) -> dict[str, Any]:
    """The metadata of a model about its raw rows: their schema, and what the columns of Parquet files hold."""
    if not isinstance(data, RawData):
        return {}
    forms = {name: list(form) for name, form in zip(data.features, data.forms.forms, strict=True)}
    kept = {SCHEMA: data.schema.model_dump(mode="json")}
    return kept | ({FORMS: forms} if data.schema.format == "parquet" else {})


def remember_forms(data: object, metadata: Mapping[str, Any]) -> None:
    """Raw data that are read hold in their columns what those of a model's training held.

    Only models of Parquet files say it.

    Raises:
        DataError: they are known to hold something else.
    """
    if isinstance(data, RawData) and (trained := metadata.get(FORMS)):
        data.forms.add("the training", [tuple(trained.get(name, (None, None))) for name in data.features])


def check_raw(values: dict[str, Any]) -> None:
    """Chooses what goes with raw data for what is auto, and refuses what does not.

    Args:
        values: of the configuration; changed.

    Raises:
        ConfigurationError: a key needs to know how many samples there are, or another pass over them.
    """
    train, schedule = values["train"], values["schedule"]
    for key, only in (("epochs", 1), ("patience", 0), ("eval_every", 0)):
        if train[key] == AUTO:
            train[key] = only
        elif train[key] != only:
            raise ConfigurationError(
                f"train.{key} = {train[key]}: raw data are read once, in their order, and have no split to validate "
                "on; leave it out. train.progressive_every gives metrics of samples before they are trained on"
            )
    if schedule["name"] != "constant" and not train["steps"]:
        raise ConfigurationError(
            f'schedule.name = "{schedule["name"]}" ends with the run, and nobody knows how many steps raw data have; '
            "give train.steps, or leave it out"
        )


class Following:
    """Lets ranks that follow a source take a batch when all have it, and end together when any rank is asked to.

    Args:
        mesh: the ranks.
        is_asked: whether this rank was asked to end the run.
    """

    def __init__(self, mesh: Mesh, is_asked: Callable[[], bool]) -> None:
        self._mesh, self._is_asked = mesh.with_process_group("following"), is_asked

    def __call__(self, mine: Readiness) -> Readiness:
        """The state of all ranks together; sleeps where they wait. Collective: every rank calls it for every batch."""
        everyone = gather_objects(self._mesh, [mine, bool(self._is_asked())], DOING)
        states = {state for state, _ in everyone}
        if states == {"ready"}:
            return "ready"
        if states == {"over"} or any(asked for _, asked in everyone):
            return "over"
        time.sleep(LOOK_S)
        return "waiting"
