"""Which splits a run reads: checked before anything is started, on every rank alike."""

from __future__ import annotations

import pyarrow as pa

from rowmesh.data import Prepared
from rowmesh.data.prepared import METADATA, arrow_schema
from rowmesh.errors import DataError
from rowmesh.suggest import hint
from rowmesh.train.config import Config, DataConfig


def check_split(data: Prepared, key: str, split: str) -> str:
    """The split itself.

    Args:
        data: where it should be.
        key: what names it, for the message.
        split: its name.

    Raises:
        DataError: the data have no such split, or it holds no samples.
    """
    if split not in data.splits:
        known = ", ".join(data.splits)
        raise DataError(f"{key}: {data.folder} has no split {split!r}, only: {known}{hint(split, data.splits)}")
    if not data.splits[split].samples:
        raise DataError(f"{key}: split {split!r} of {data.folder} has no samples; prepare the data with a larger share")
    return split


def check_training_splits(config: Config, data: Prepared) -> None:
    """Raises DataError where a split that the configuration names does not exist, or the run cannot read it in the end.

    Only the default names of the validation split and the test split may be absent, where nothing needs them:
    data prepared without them can be trained on.
    """
    check_file(data, check_split(data, "data.train", config.data.train))
    needed = {"validation": config.train.eval_every > 0, "test": False}
    read = {"validation": config.train.eval_every > 0, "test": True}
    for role, is_needed in needed.items():
        split = getattr(config.data, role)
        is_default = split == DataConfig.model_fields[role].default
        if is_needed or split in data.splits or not is_default:
            check_split(data, f"data.{role}", split)
            if read[role]:
                check_file(data, split)


def check_file(data: Prepared, split: str) -> None:
    """Compares head and foot of a split's file with the metadata; reads no more, however large it is.

    Raises:
        DataError: it is missing, cut or of other data.
    """
    path = data.split_path(split)
    try:
        with pa.memory_map(str(path)) as file:
            problem = _mismatch(pa.ipc.open_file(file), data, data.splits[split].samples)
    except (OSError, pa.ArrowException) as error:
        problem = f"cannot be read as Arrow ({error})"
    if problem:
        raise DataError(f"{path}: {problem}; prepare the data again")


def _mismatch(reader: pa.ipc.RecordBatchFileReader, data: Prepared, samples: int) -> str | None:
    """What is not as the metadata say: columns, number of blocks, sizes of the first and the last."""
    expected = arrow_schema(data.schema, [table.multi_hot for table in data.tables])
    if not reader.schema.equals(expected):
        odd = sorted({field.name for field in set(expected) ^ set(reader.schema)})
        return f"has other columns than {METADATA} says ({', '.join(odd) or 'in another order'})"
    blocks = -(-samples // data.block_samples)
    sizes = {0: min(samples, data.block_samples), blocks - 1: samples - (blocks - 1) * data.block_samples}
    if reader.num_record_batches != blocks or any(reader.get_batch(at).num_rows != size for at, size in sizes.items()):
        return f"does not hold the {samples:,} samples that {METADATA} says"
    return None
