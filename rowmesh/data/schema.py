"""Schema: which columns of a data set are the label, dense features and categorical features."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationError, field_validator, model_validator

from rowmesh._support.files.atomic import replacing_file
from rowmesh._support.suggest import hint
from rowmesh.errors import ConfigurationError

DenseTransform = Literal["standardize", "log1p", "none"]
UNIX_TIME = "unix"
Derivation = Literal["hour_of_day", "weekday"]
LabelKind = Literal["binary", "value"]


class Label(BaseModel):
    """A label, which a model predicts.

    Attributes:
        name: its column.
        kind: "binary": 0 or 1, of which a model predicts the probability of 1; or "value": any finite number, such as a
            rating or a time, which a model predicts itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: LabelKind = "binary"


class Categorical(BaseModel):
    """A categorical feature.

    Attributes:
        name: the feature's name in the prepared data.
        column: the column it is read from; default: its name.
        separator: what stands between the ids of a multi-hot text value; None for one id a sample.
            Parquet columns of lists are multi-hot without a separator.
        derive: compute the id from a time: "hour_of_day" (0–23) or "weekday" (0 = Monday).
        time_format: how the time is written, for `derive`: directives of `strptime`, or "unix" for seconds since
            1970, UTC.
        vocabulary: the feature whose ids these are, as in a history of items: both have one vocabulary, over all their
            columns, and one table of that feature's name. Default: its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    column: str = ""
    separator: str | None = None
    derive: Derivation | None = None
    time_format: str = "%y%m%d%H"
    vocabulary: str = ""

    @field_validator("separator")
    @classmethod
    def _check_separator(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("separator is empty; give the text between ids, or leave it out for one id a sample")
        return value

    @model_validator(mode="after")
    def _check(self) -> Categorical:
        if self.derive is not None and self.separator is not None:
            raise ValueError(f"{self.name!r} has both derive and separator; a time is one value")
        if self.time_format != UNIX_TIME:
            check_time_format(self.time_format)
        return self

    @property
    def table(self) -> str:
        """The feature whose vocabulary and table this one has."""
        return self.vocabulary or self.name

    @property
    def source(self) -> str:
        """The column this feature is read from."""
        return self.column or self.name


def _form(value: Any) -> str:
    return "column" if isinstance(value, str) else "labels"


Labels = Annotated[
    Annotated[str, Tag("column")] | Annotated[tuple[Label, ...], Tag("labels")],
    Discriminator(_form),  # so that errors are about one form alone
]


class Schema(BaseModel):
    """The columns of a data set; those not named here are not read.

    Attributes:
        format: "text" (CSV, TSV; gzip, bzip2 and Zstandard are recognised by their content) or "parquet".
        delimiter: between the values of a text line, one character of ASCII.
        quote: what may surround a text value, one character of ASCII; empty where quotes have no meaning.
        columns: names of the text columns in file order; empty where the first line names them.
        label: the column that holds 0 or 1; or several labels, each a column's name or a `Label`. In TOML one label of
            another kind is `label = { name = "rating", kind = "value" }`.
        weight: the column of sample weights, finite and not negative; None: every sample counts alike.
        time: the column of when samples happened, which dynamic tables with `ttl_seconds` need; of raw data.
        time_format: how that is written: directives of `strptime`, UTC, or "unix" for seconds since 1970.
        score: the column of whole numbers of 64 bits that dynamic tables with `eviction = "score"` give all ids of a
            row; of raw data.
        dense: numeric columns; a missing value becomes 0 after the transform.
        dense_transform: "standardize": mean 0 and deviation 1 in training, of the logarithm where a column is
            heavy-tailed; "log1p": log(1 + max(x, 0)), as DLRM does for Criteo; or "none".
        categorical: categorical features; in TOML a plain string names a one-hot column.

    Example:
        >>> schema = Schema(label="clicked", dense=["price"], categorical=["user", "item"])
        >>> [feature.name for feature in schema.categorical]
        ['user', 'item']
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["text", "parquet"] = "text"
    delimiter: str = ","
    quote: str = '"'
    columns: tuple[str, ...] = ()
    label: Labels
    weight: str | None = None
    time: str | None = None
    time_format: str = UNIX_TIME
    score: str | None = None
    dense: tuple[str, ...] = ()
    dense_transform: DenseTransform = "standardize"
    categorical: tuple[Categorical, ...]

    @field_validator("label", mode="before")
    @classmethod
    def _plain_labels(cls, value: Any) -> Any:
        return _named(value if isinstance(value, str | list | tuple) else (value,))

    @field_validator("categorical", mode="before")
    @classmethod
    def _plain_names(cls, value: Any) -> Any:
        return _named(value)

    @model_validator(mode="after")
    def _check(self) -> Schema:
        if not self.categorical:
            raise ValueError("categorical is empty; name at least one categorical feature")
        if not self.labels:
            raise ValueError("label is empty; name at least one column")
        if not _is_punctuation(self.delimiter):
            raise ValueError(f"delimiter must be one character of ASCII, no line break, got {self.delimiter!r}")
        if self.quote and not _is_punctuation(self.quote):
            raise ValueError(f"quote must be one character of ASCII or empty, got {self.quote!r}")
        if self.quote == self.delimiter:
            raise ValueError(f"delimiter and quote are both {self.quote!r}; they must differ")
        weight = [self.weight] if self.weight is not None else []
        names = [*self.label_names, *weight, *self.dense, *(feature.name for feature in self.categorical)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"named more than once: {', '.join(twice)}; give each feature its own name")
        self._check_vocabularies()
        if self.time_format != UNIX_TIME:
            if self.time is None:
                raise ValueError("time_format is that of the column time, which is not named; name it, or leave it out")
            check_time_format(self.time_format)
        if self.columns:
            if twice := sorted({name for name in self.source_columns if self.columns.count(name) > 1}):
                raise ValueError(f"columns: {', '.join(twice)} more than once; give each column its own name")
            for column in self.source_columns:
                if column not in self.columns:
                    raise ValueError(f"column {column!r} is not among columns{hint(column, self.columns)}")
        return self

    def _check_vocabularies(self) -> None:
        owners = [feature.name for feature in self.categorical if feature.table == feature.name]
        for feature in self.categorical:
            if feature.table not in owners:
                raise ValueError(
                    f"{feature.name!r} has vocabulary {feature.vocabulary!r}, which is no categorical feature with a "
                    f"vocabulary of its own{hint(feature.vocabulary, owners)}"
                )
            owner = next(each for each in self.categorical if each.name == feature.table)
            if self.format == "text" and (feature.derive is None) != (owner.derive is None):
                raise ValueError(
                    f"{feature.name!r} shares the vocabulary of {owner.name!r}, and one of them is derived from a "
                    "time: its ids are integers, and those of the other are text"
                )

    def table_of(self, feature: str) -> str:
        """The feature whose vocabulary and table a feature has; itself, unless the schema says otherwise."""
        return next((each.table for each in self.categorical if each.name == feature), feature)

    @property
    def source_columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        sources = (feature.source for feature in self.categorical)
        return tuple(
            dict.fromkeys((*self.target_columns, *self.rule_columns, *self.dense, *sources, *self.copied_columns))
        )

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels, one or several."""
        return (Label(name=self.label),) if isinstance(self.label, str) else self.label

    @property
    def label_names(self) -> tuple[str, ...]:
        """The columns of the labels."""
        return tuple(label.name for label in self.labels)

    @property
    def target_columns(self) -> tuple[str, ...]:
        """The columns of labels and weight that are read; they stand before the features in prepared data."""
        return self._targets if self.is_labelled else ()

    @property
    def rule_columns(self) -> tuple[str, ...]:
        """The columns of time and score that are read; only rules of dynamic tables use them."""
        return tuple(name for name in (self.time, self.score) if name is not None and self.is_labelled)

    @property
    def num_targets(self) -> int:
        """How many columns of prepared data stand before the dense features: labels, and the weight if there is one."""
        return len(self._targets)

    @property
    def _targets(self) -> tuple[str, ...]:
        return (*self.label_names, *((self.weight,) if self.weight is not None else ()))

    @property
    def is_labelled(self) -> bool:
        """Whether labels and weight are read."""
        return True

    @property
    def copied_columns(self) -> tuple[str, ...]:
        """Columns that are read to be copied as they are."""
        return ()

    def for_scoring(self, keep: Sequence[str] = (), *, has_label: bool = True) -> ScoringSchema:
        """The same columns, to be scored: without the labels and the weight, which files may lack.

        Args:
            keep: columns to copy.
            has_label: whether lines of a text file without a header hold labels and weight. Where the first line, or
                Parquet, names the columns, these names say it.

        Raises:
            ConfigurationError: a column of `keep` is not in the file, or the schema does not list the columns that
                `has_label=False` is about.
        """
        if not has_label and not self.columns:
            raise ConfigurationError(
                "only of files without a header must be said that they have no label; this schema reads the names of "
                "columns from the file: leave it out"
            )
        columns = self.columns if has_label else tuple(name for name in self.columns if name not in self._targets)
        try:
            return ScoringSchema.model_validate({**self.model_dump(), "columns": columns, "keep": tuple(keep)})
        except ValidationError as error:
            raise ConfigurationError("; ".join(_explain(item) for item in error.errors())) from None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the categorical features."""
        return tuple(feature.name for feature in self.categorical)

    @property
    def separated(self) -> tuple[bool, ...]:
        """By categorical feature, whether a separator stands between several ids."""
        return tuple(feature.separator is not None for feature in self.categorical)

    @staticmethod
    def load(name_or_path: str | Path) -> Schema:
        """A built-in schema by name ("criteo", "avazu"), or one from a TOML file.

        Raises:
            ConfigurationError: no such schema, or the file does not describe one.
        """
        path = Path(name_or_path)
        if str(name_or_path) in SCHEMAS:
            return SCHEMAS[str(name_or_path)]
        if not path.is_file():
            raise ConfigurationError(
                f"schema {str(name_or_path)!r} is neither built in ({', '.join(SCHEMAS)}) nor a TOML file"
                f"{hint(str(name_or_path), SCHEMAS)}"
            )
        try:
            return Schema.parse(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"schema {path}: not valid TOML: {error}") from error
        except ConfigurationError as error:
            raise ConfigurationError(f"schema {path}: {error}") from error

    @staticmethod
    def parse(values: dict[str, Any]) -> Schema:
        """From plain values, as read from TOML or JSON."""
        try:
            return Schema.model_validate(values)
        except ValidationError as error:
            raise ConfigurationError("; ".join(_explain(item) for item in error.errors())) from error

    def save(self, path: Path) -> None:
        """Writes the schema as TOML; what stood at `path` stays where that fails."""
        values = self.model_dump(exclude_none=True, exclude_defaults=True, mode="json")
        with replacing_file(path) as file:
            file.write(tomli_w.dumps(values).encode())


class ScoringSchema(Schema):
    """The schema of rows that get scores: no label, and columns to copy beside the scores; see `for_scoring`.

    Attributes:
        keep: the columns to copy.

    Example:
        >>> schema = Schema(label="clicked", dense=["price"], categorical=["user"])
        >>> schema.for_scoring(["request"]).source_columns
        ('price', 'user', 'request')
    """

    keep: tuple[str, ...] = ()

    @property
    def is_labelled(self) -> bool:
        """Labels and weight are not read, but where it is to be copied."""
        return False

    @property
    def copied_columns(self) -> tuple[str, ...]:
        """As asked for."""
        return self.keep


def _named(value: Any) -> Any:
    """The items of a list, of which a plain string is a name."""
    if not isinstance(value, list | tuple):
        return value
    return [{"name": item} if isinstance(item, str) else item for item in value]


def check_time_format(time_format: str) -> None:
    """Raises ValueError where `strptime` has no such format."""
    try:
        datetime.datetime.strptime("", time_format)
    except re.error:  # strptime makes a pattern of it
        raise ValueError(f"time_format: {time_format!r} has a directive twice") from None
    except (ValueError, IndexError) as error:  # also raised because "" is no such time
        if "does not match" not in str(error):
            raise ValueError(f"time_format: {error}; for seconds since 1970 write {UNIX_TIME!r}") from error


def _is_punctuation(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text not in "\r\n\0"


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if part not in ("column", "labels"))
    if error["type"] == "extra_forbidden":
        model = Schema if len(error["loc"]) == 1 else Label if error["loc"][0] == "label" else Categorical
        return f"unknown key {where!r}{hint(str(error['loc'][-1]), model.model_fields)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def criteo_schema(num_categorical: int = 26, file_format: Literal["text", "parquet"] = "text") -> Schema:
    """Criteo's columns: label, I1 … I13, C1 … C26; as tab-separated lines without a header, or Parquet.

    Dense features are transformed as DLRM does, so that results stay comparable with published ones.
    """
    dense = [f"I{i}" for i in range(1, 14)]
    categorical = [f"C{i}" for i in range(1, num_categorical + 1)]
    text = {"delimiter": "\t", "quote": "", "columns": ["label", *dense, *categorical]}
    return Schema.parse(
        {
            "format": file_format,
            "label": "label",
            "dense": dense,
            "dense_transform": "log1p",
            "categorical": categorical,
        }
        | (text if file_format == "text" else {})
    )


CRITEO = criteo_schema()

_AVAZU_CATEGORICAL = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *("C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21"),
)

AVAZU = Schema.parse(
    {
        "label": "click",
        "categorical": [
            {"name": "hour_of_day", "column": "hour", "derive": "hour_of_day"},
            {"name": "weekday", "column": "hour", "derive": "weekday"},
            *_AVAZU_CATEGORICAL,
        ],
    }
)

SCHEMAS: dict[str, Schema] = {"criteo": CRITEO, "avazu": AVAZU}
