"""A finished run: its model, and the data that say what the model's ids mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rowmesh import checkpoint
from rowmesh.data import Prepared
from rowmesh.data.raw import RawData
from rowmesh.errors import DataError, RowmeshError
from rowmesh.run.config import Config
from rowmesh.run.fingerprint import Fingerprint, fingerprint, mismatch, raw_fingerprint
from rowmesh.run.raw import open_raw
from rowmesh.run.report import model_text
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a run that has a model, and the model's manifest."""

    folder: RunFolder
    manifest: checkpoint.Manifest

    @cached_property
    def config(self) -> Config:
        """It was trained with this, every auto decided."""
        return resolve(self.folder.config)

    @staticmethod
    def open(run: Path) -> FinishedRun:
        """Reads the manifest.

        Raises:
            RowmeshError: the folder is no run, or has no model.
        """
        folder = RunFolder(run)
        if not folder.config.exists():
            raise RowmeshError(f"{run} is no run: {folder.config.name} is missing; give the folder of a finished run")
        return FinishedRun(folder, checkpoint.read_manifest(folder.model))

    def data(self, moved_to: Path | None = None, *, verify: bool = True) -> Prepared:
        """The prepared data of the training, whose vocabularies name ids.

        Args:
            moved_to: where they are, if no longer where the run was trained on them.
            verify: compare what is read with the checksums.

        Raises:
            RowmeshError: they are not there, damaged, or raw.
        """
        data = self.scored_data(moved_to, verify=verify)
        if isinstance(data, Prepared):
            return data
        raise RowmeshError(
            f"{self.folder.path} was trained on raw data: there is no vocabulary to name its ids with; `publish.to` "
            "gives their rows by id, and `rowmesh predict` scores raw rows"
        )

    def scored_data(self, moved_to: Path | None = None, *, verify: bool = True) -> Prepared | RawData:
        """The data of the training, as far as they say how raw rows become samples. See `data`."""
        config = self.config
        if config.model.is_sequence:
            raise RowmeshError(
                f"{self.folder.path} is a run of {config.model.name}, which ranks items after events and scores no "
                "samples; rowmesh recommend reads it"
            )
        if config.data.is_raw:
            if moved_to is not None:
                raise RowmeshError(
                    f"{self.folder.path} was trained on raw data, of which nothing but the schema is read; leave out "
                    "--data"
                )
            return open_raw(config, self.manifest.metadata)
        if moved_to is not None:
            return Prepared.open(moved_to, verify=verify)
        try:
            return Prepared.open(config.data.folder, verify=verify)
        except DataError as error:
            raise RowmeshError(
                f"{error}; where the data of the training were moved, say where to with --data"
            ) from None

    def remarks(self, data: Prepared | RawData) -> Iterator[str]:
        """Lines on which model it is where the run chose one of several, and on data that are not verified."""
        if "is_best" in self.manifest.metadata:
            yield f"model     {self.folder.model}, {model_text(self.manifest.metadata)}"
        if data.verification and isinstance(data, Prepared):
            yield f"data      {data.folder}: {data.verification}"

    def check_meaning(self, data: Prepared | RawData, otherwise: str) -> None:
        """Raises RowmeshError where ids or dense features of the data mean something else than in training.

        Reads all vocabularies.

        Args:
            data: what is given as the data of the training.
            otherwise: what would happen then, for the message.
        """

        def given() -> Fingerprint:
            return raw_fingerprint(data) if isinstance(data, RawData) else fingerprint(data)

        if what := mismatch(self.manifest.metadata, given, self.folder.model):
            raise RowmeshError(
                f"the model in {self.folder.path} was trained on {self.manifest.metadata['data']}, and "
                f"{data.folder.absolute()} differs from it in {what}: {otherwise}. Give the prepared data of the "
                "training with --data"
            )
