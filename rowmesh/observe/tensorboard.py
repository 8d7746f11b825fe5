"""Scalars for TensorBoard, an extra: `pip install 'rowmesh[tensorboard]'`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rowmesh.errors import ConfigurationError


def require_tensorboard() -> None:
    """Raises ConfigurationError where the `tensorboard` package is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigurationError(
            "train.tensorboard: the package is not installed; pip install 'rowmesh[tensorboard]', or leave it "
            "off (metrics.jsonl holds the same numbers)"
        )


class TensorBoard:
    """Writes the numbers of a record as scalars under a prefix, into event files of a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, prefix: str, step: int, record: dict[str, float | int | None]) -> None:
        """Writes every number of a record at a step."""
        for name, value in record.items():
            if value is not None:
                self._writer.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> None:
        """Writes out what is buffered."""
        self._writer.close()
