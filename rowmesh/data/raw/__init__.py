"""Raw data: rows as they are in files or a queue, with ids of 64 bits in place of vocabularies."""

from rowmesh.data.raw.data_set import RawData, is_server
from rowmesh.data.raw.files import FileSource
from rowmesh.data.raw.ids import MISSING_TEXT, ids_of
from rowmesh.data.raw.loader import RawLoader
from rowmesh.data.raw.source import Chunk, Source
from rowmesh.data.raw.streams import RedisStream

__all__ = [
    "MISSING_TEXT",
    "Chunk",
    "FileSource",
    "RawData",
    "RawLoader",
    "RedisStream",
    "Source",
    "ids_of",
    "is_server",
]
