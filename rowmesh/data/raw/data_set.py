"""RawData: what a run knows of raw rows before it reads any."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import xxhash

from rowmesh._support.suggest import hint
from rowmesh.data.parquet import KnownForms
from rowmesh.data.prepared import Split, Table
from rowmesh.data.raw.files import FileSource
from rowmesh.data.raw.source import Source
from rowmesh.data.raw.streams import RedisStream
from rowmesh.data.scales import DenseScale
from rowmesh.data.schema import Schema
from rowmesh.errors import ConfigurationError, DataError

_SERVERS = ("redis://", "rediss://", "unix://")


def is_server(location: str) -> bool:
    """Whether rows come from a server, and not from files.

    >>> is_server("redis://localhost:6379/0"), is_server("data/clicks")
    (True, False)
    """
    return location.startswith(_SERVERS)


@dataclass(frozen=True, kw_only=True)
class RawData:
    """Rows of a folder, a file or a stream: how to read them, and nothing of what they hold.

    Attributes:
        location: a folder of files, a file, or the URL of a server, in which `$NAME` stands for what the environment
            has (a password, say).
        schema: how to read rows.
        stream: the key of a stream on the server.
        hash_seed: of the ids of text.
        follow: whether to wait for more rows at the end.
    """

    location: str
    schema: Schema
    stream: str = ""
    hash_seed: int = 0
    follow: bool = False

    @property
    def splits(self) -> Mapping[str, Split]:
        """None: rows are read once, in their order."""
        return {}

    @property
    def dense_scales(self) -> tuple[DenseScale, ...] | None:
        """None: the means of dense columns are not known."""
        return None

    @property
    def tables(self) -> tuple[Table, ...]:
        """A table for each categorical feature; its rows are not counted."""
        return tuple(
            Table(name=name, num_rows=0, multi_hot=is_list, num_distinct=0, rare_share={})
            for name, is_list in zip(self.features, self.multi_hot, strict=True)
        )

    @property
    def multi_hot(self) -> tuple[bool, ...]:
        """By categorical feature, whether rows have lists: where the schema has a separator, or `forms` say so."""
        known = self.forms.multi_hot
        return tuple(has_separator or known[i] for i, has_separator in enumerate(self.schema.separated))

    @cached_property
    def forms(self) -> KnownForms:
        """The forms of the columns in all Parquet files that sources have read so far; the files must agree."""
        return KnownForms(self.schema)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the categorical features."""
        return self.schema.features

    @property
    def num_dense(self) -> int:
        """The number of dense features."""
        return len(self.schema.dense)

    @property
    def folder(self) -> Path:
        """Where the rows are, as a path; see `place`."""
        return Path(self.place)

    @property
    def place(self) -> str:
        """Where the rows are, without a password."""
        if not is_server(self.location):
            return str(Path(self.location).absolute())
        parts = urlsplit(self.location)
        return f"{urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2]))} stream {self.stream}"

    @property
    def identity(self) -> str:
        """A digest of how rows become samples. Which rows they are, a position says by itself."""
        facts = [self.schema.model_dump(mode="json"), self.hash_seed]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())

    @property
    def verification(self) -> str:
        """Raw data have no checksums."""
        return "raw, not verified"

    def table(self, name: str) -> Table:
        """The table of a feature."""
        for table in self.tables:
            if table.name == name:
                return table
        raise DataError(f"the schema has no feature {name!r}{hint(name, self.features)}")

    def table_of(self, feature: str) -> str:
        """The feature after which the table of a feature is named: itself, unless it shares another's."""
        return self.schema.table_of(feature)

    def source(self, location: str = "") -> Source:
        """The rows, from their start: these, or those at another place, which are not followed.

        Raises:
            ConfigurationError: there is nothing there, or the server's package is not installed.
        """
        where, follow = location or self.location, self.follow and not location
        if not is_server(where):
            return FileSource([where], self.schema, follow=follow, forms=self.forms)
        if not self.stream:
            raise ConfigurationError(f"data.stream: {self.place}: name the stream to read")
        return RedisStream(os.path.expandvars(where), self.stream, self.schema, follow=follow)
