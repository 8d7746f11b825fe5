"""Digests of what the numbers of a data set mean: a model understands only the meaning that it was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rowmesh.data import Prepared
from rowmesh.data.raw import RawData
from rowmesh.errors import RowmeshError

CHUNK_VALUES = 1 << 20  # bounds the temporaries
MOST_NAMED = 3
Fingerprint = dict[str, str]


def fingerprint(data: Prepared) -> Fingerprint:
    """Digests of every table's vocabulary, in the order of its rows, and of the dense features.

    And of the labels, where there are several, or one that is not of 0 and 1. Reads all vocabularies: about a second
    for 500 MB. Equal values give equal digests, whatever version of pyarrow wrote them.
    """
    scales = [[scale.log1p, scale.mean, scale.std] for scale in data.dense_scales or ()]
    facts = [data.schema.dense, data.schema.dense_transform, *([scales] if scales else [])]
    dense = _digest(json.dumps(facts).encode())
    tables = {f"vocabulary of {name}": digest_values(data.vocabulary(name)) for name in data.features}
    labels = [[label.name, label.kind] for label in data.schema.labels]
    is_plain = len(labels) == 1 and data.schema.labels[0].kind == "binary"  # whatever it is called
    return {"dense features": dense, **tables, **({} if is_plain else {"labels": _digest(json.dumps(labels).encode())})}


def raw_fingerprint(data: RawData) -> Fingerprint:
    """Digests of the hash that makes ids of raw values, of the dense features, and of the order of all others.

    The order, since a network knows features by their place; with them from what each is derived, whose table it has,
    and the labels, where there are several or one that is not of 0 and 1.
    """
    dense = _digest(json.dumps([data.schema.dense, data.schema.dense_transform]).encode())
    features = [[each.name, each.table, each.derive] for each in data.schema.categorical]
    labels = [[label.name, label.kind] for label in data.schema.labels]
    is_plain = len(labels) == 1 and data.schema.labels[0].kind == "binary"
    return {
        "dense features": dense,
        "features and labels": _digest(json.dumps([features, [] if is_plain else labels]).encode()),
        **{f"ids of {name}": _digest(str(data.hash_seed).encode()) for name in data.features},
    }


def differences(trained: Fingerprint, given: Fingerprint) -> list[str]:
    """The tables and features that have another meaning in the given data than in those of the training.

    >>> differences({"a": "1", "b": "2"}, {"b": "3", "a": "1"})
    ['b']
    """
    return [part for part in {**trained, **given} if trained.get(part) != given.get(part)]


def mismatch(metadata: Mapping[str, Any], given: Callable[[], Fingerprint], model: Path) -> str:
    """In what data differ from those of the training, in words; "" where in nothing.

    Args:
        metadata: of the model.
        given: the digests of the data to be evaluated on, or to name rows.
        model: its folder, for the message.

    Raises:
        RowmeshError: the model does not say what it was trained on.
    """
    trained = metadata.get("fingerprint")
    if not isinstance(trained, dict) or "data" not in metadata:
        raise RowmeshError(
            f"{model} does not say what it was trained on: its manifest has no fingerprint of the data, which rowmesh "
            "train writes; train again"
        )
    differing = differences(trained, given())
    more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
    return ", ".join(differing[:MOST_NAMED]) + more


def _digest(*texts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text)
    return digest.hexdigest()


def digest_values(values: pa.Array) -> str:
    """The digest of the values of an array; null, which stands for missing, differs from all others."""
    is_integer = pa.types.is_integer(values.type)
    kind = b"unsigned" if pa.types.is_uint64(values.type) else b"integers" if is_integer else b"text"
    digest = hashlib.blake2b(kind, digest_size=16)
    for start in range(0, len(values), CHUNK_VALUES):
        for part in (_integers if is_integer else _texts)(values.slice(start, CHUNK_VALUES)):
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _integers(values: Any) -> tuple[Any, Any]:
    bits = values.view(pa.int64()) if pa.types.is_uint64(values.type) else values.cast(pa.int64())
    numbers = bits.fill_null(0).to_numpy()
    return values.is_null().to_numpy(zero_copy_only=False), numbers


def _texts(values: Any) -> tuple[Any, Any, Any]:
    binary = values.cast(pa.large_binary()).fill_null(b"")
    _, offsets, data = binary.buffers()
    bounds = np.frombuffer(offsets, np.int64)[binary.offset : binary.offset + len(binary) + 1]
    heap = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    return values.is_null().to_numpy(zero_copy_only=False), np.diff(bounds), heap[bounds[0] : bounds[-1]]
