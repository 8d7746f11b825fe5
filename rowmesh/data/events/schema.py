"""EventSchema: the columns of an event table, and which of its events are kept, in which order, in which split."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rowmesh._support.suggest import hint
from rowmesh.data.schema import UNIX_TIME, ScoringSchema, check_time_format
from rowmesh.errors import ConfigurationError

_NO_LABEL = "(no label)"


class Positive(BaseModel):
    """Which events count: those whose column is `minimum` or more; the others are left out and counted.

    Attributes:
        column: holds numbers.
        minimum: 1 keeps the ones of a column of 0 and 1; 4 keeps ratings of 4 and 5.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str
    minimum: float = 1


class EventSplit(BaseModel):
    """Which events are held out.

    Attributes:
        by: "last": the last event of every user is the test's, the one before it the validation's, where the user has 3
            events or more; else all are training. "time": one moment for all users, so that training knows nothing of
            later events.
        validation: share of all events between the two moments; of "time".
        test: share of all events after the later moment; of "time".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Literal["last", "time"] = "last"
    validation: float = Field(default=0.1, ge=0, lt=1)
    test: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> EventSplit:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation {self.validation} and test {self.test} must leave something for training")
        return self


class EventSchema(BaseModel):
    """The columns of an event table: a row is one event, of one user and one item, at one time.

    Attributes:
        format: "text" or "parquet".
        delimiter: between the values of a text line, one character of ASCII.
        quote: what may surround a text value; empty where quotes have no meaning.
        columns: names of the text columns in file order; empty where the first line names them.
        user, item, time: the columns that hold them.
        time_format: "unix": a number since 1970 in `time_unit`; else directives of `strptime`, UTC. Dates and
            timestamps of Parquet are taken as they are.
        time_unit: of numbers. Sequences hold whole seconds; events are ordered by what the file says.
        positive: which events count; None: all.
        k_core: users and items with fewer events are left out, again and again until all have as many; 1: none is.
        ties: how events of one user at one time are ordered: "file": as in the files; "item": the more frequent
            item first.
        side: columns of what else is known of an event once it happened, such as what the user did, or the item's
            category; each distinct value gets a row, one that is missing too.
        split: which events are held out.

    Example:
        >>> EventSchema(user="u", item="i", time="t", positive={"column": "rating", "minimum": 4}).k_core
        1
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["text", "parquet"] = "text"
    delimiter: str = ","
    quote: str = '"'
    columns: tuple[str, ...] = ()
    user: str
    item: str
    time: str
    time_format: str = UNIX_TIME
    time_unit: Literal["s", "ms", "us"] = "s"
    positive: Positive | None = None
    k_core: int = Field(default=1, ge=1)
    ties: Literal["file", "item"] = "file"
    side: tuple[str, ...] = ()
    split: EventSplit = EventSplit()

    @model_validator(mode="after")
    def _check(self) -> EventSchema:
        if self.time_format != UNIX_TIME:
            check_time_format(self.time_format)
        for name in self.side:
            if name in (self.user, self.item, self.time):
                raise ValueError(f"side names {name!r}, which is the user, the item or the time; leave it out")
            if self.side.count(name) > 1:
                raise ValueError(f"side names {name!r} twice; leave one out")
        return self

    def reading(self) -> ScoringSchema:
        """How the files are read: users, items and side columns are ids, others come as they are.

        Raises:
            ConfigurationError: columns that cannot be.
        """
        positive = (self.positive.column,) if self.positive else ()
        try:
            return ScoringSchema.model_validate(
                {
                    "format": self.format,
                    "delimiter": self.delimiter,
                    "quote": self.quote,
                    "columns": self.columns,
                    "label": _NO_LABEL,
                    "categorical": (self.user, self.item, *self.side),
                    "keep": tuple(dict.fromkeys((self.time, *positive))),
                }
            )
        except ValidationError as error:
            raise ConfigurationError(_explain(error)) from None

    @staticmethod
    def load(name_or_path: str | Path) -> EventSchema:
        """A layout by name (see `LAYOUTS`), or a schema from a TOML file.

        Raises:
            ConfigurationError: no such layout or file, or it does not describe an event table.
        """
        path = Path(name_or_path)
        if str(name_or_path) in LAYOUTS:
            return LAYOUTS[str(name_or_path)]
        if not path.is_file():
            raise ConfigurationError(
                f"schema {str(name_or_path)!r} is neither a layout of events ({', '.join(LAYOUTS)}) nor a TOML file"
                f"{hint(str(name_or_path), LAYOUTS)}"
            )
        try:
            return EventSchema.parse(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ConfigurationError) as error:
            raise ConfigurationError(f"schema {path}: {error}") from error

    @staticmethod
    def parse(values: dict[str, Any]) -> EventSchema:
        """From plain values, as read from TOML or JSON.

        Raises:
            ConfigurationError: names the key and what is wrong with it.
        """
        try:
            schema = EventSchema.model_validate(values)
        except ValidationError as error:
            raise ConfigurationError(_explain(error)) from None
        schema.reading()
        return schema


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {where!r}{hint(str(item['loc'][-1]), EventSchema.model_fields)}")
        else:
            parts.append(f"{where}: {item['msg'].removeprefix('Value error, ')}" if where else item["msg"])
    return "; ".join(parts)


_RATINGS = EventSchema(user="user_id", item="item_id", time="timestamp", quote="", k_core=5)


def _ratings(delimiter: str, *columns: str) -> EventSchema:
    return _RATINGS.model_copy(update={"delimiter": delimiter, "columns": columns})


LAYOUTS: dict[str, EventSchema] = {
    "movielens-100k": _ratings("\t", "user_id", "item_id", "rating", "timestamp"),
    # ratings.dat separates by two colons: every second column is empty.
    "movielens-1m": _ratings(":", "user_id", "empty_1", "item_id", "empty_2", "rating", "empty_3", "timestamp"),
    "movielens-csv": EventSchema(user="userId", item="movieId", time="timestamp", k_core=5),
    "amazon-2014": _ratings(",", "user_id", "item_id", "rating", "timestamp"),
    "amazon-2018": _ratings(",", "item_id", "user_id", "rating", "timestamp"),
    "kuairand": EventSchema(
        user="user_id", item="video_id", time="time_ms", time_unit="ms", positive=Positive(column="is_click"), k_core=5
    ),
}
"""Public data sets: u.data, ratings.dat and ratings.csv of MovieLens, ratings of Amazon, logs of KuaiRand."""


def find_event_schema(schema: str | None) -> EventSchema | None:
    """The event schema that a `--schema` names; None where it names no event schema, or nothing is given.

    A TOML file is an event schema if it has the keys `user`, `item` and `time`; schemas of clicks have none of them.

    Raises:
        ConfigurationError: it is an event schema, but not a valid one.
    """
    if schema is None:
        return None
    if schema not in LAYOUTS:
        if not Path(schema).is_file():
            return None
        try:
            values = tomllib.loads(Path(schema).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError):
            return None  # the schema of clicks says what is wrong with it
        if not {"user", "item", "time"} & set(values):
            return None
    return EventSchema.load(schema)
