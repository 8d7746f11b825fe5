"""Series: the checkpoints of one run, each in a folder of its own, named by the step that it is after.

::

    checkpoints/
      step-000000200/      a checkpoint, as `rowmesh.checkpoint.manifest` describes it; whole once it has a manifest
        best/              the best model by then, where the run looks for one
      step-000000400/
      step-000000517.survivors-of-4711    while ranks that are left when others died write one: whose it is
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from rowmesh._support.faults import reach
from rowmesh._support.files.lock import exclusive
from rowmesh.checkpoint.chain import read_chain, read_manifest
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.manifest import MANIFEST, step_name
from rowmesh.checkpoint.owned import BEST, is_whole, remove
from rowmesh.errors import CheckpointError

STEP_PATTERN = r"step-(\d{9,})"
CLAIM_PATTERN = STEP_PATTERN + r"\.survivors-of-\d+"
LOCK = ".checkpoints.lock"


class Series:
    """The checkpoints in a folder.

    Everything else in it stays, whatever it is called: see `rowmesh.checkpoint.owned`.

    Args:
        folder: where they are; it need not exist.

    Example:
        >>> Series(Path("runs/criteo/checkpoints")).at(200).name
        'step-000000200'
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def held(self, advice: str) -> Iterator[None]:
        """Keeps other writers out of the folder, which is made here, and removed at the end where nothing is in it.

        Args:
            advice: what a second one may do instead.

        Raises:
            RowmeshError: another one writes there.
            OSError: the folder cannot be written in.
        """
        refusal = f"another run or loop has its checkpoints in {self.folder}; wait for it, or {advice}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with exclusive(self.folder / LOCK, refusal):
                yield
        finally:
            with contextlib.suppress(OSError):  # not there, or with something in it
                self.folder.rmdir()

    def at(self, step: int) -> Path:
        """The folder of the checkpoint after a step."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """After which steps there are whole checkpoints, from the oldest on."""
        return sorted(step for step, path in self._found() if is_whole(path))

    def claim_of(self, step: int, run: int) -> Path:
        """A file that the ranks that write a checkpoint after others died make, so that no others do.

        Args:
            step: after which it is.
            run: the process of rank 0, which tells one start of a run from another.
        """
        return self.folder / f"{step_name(step)}.survivors-of-{run}"

    def prune(self, keep_last: int, keep_every: int = 0) -> None:
        """Removes all but the newest, those after multiples of `keep_every`, and what interrupted writes left.

        The checkpoints that an increment adds to stay with it.

        A checkpoint that is being removed is not whole any more, whatever interrupts that.
        """
        whole = self.steps()
        kept = {*whole[-keep_last:], *(step for step in whole if keep_every and step % keep_every == 0)}
        for step in sorted(kept, reverse=True):
            kept.update(self._parents(step))
        for step, path in sorted(self._found(), reverse=True):  # increments go before what they add to
            if step not in kept:
                reach("checkpoint.prune", path)
                remove(path)
        self._remove_claims()

    def remove_after(self, step: int) -> None:
        """Removes those after a step, whole or not, and what ranks left that were killed while they wrote one."""
        for newer, path in sorted(self._found(), reverse=True):  # increments go before what they add to
            if newer > step:
                remove(path)
        self._remove_claims()

    def _parents(self, step: int) -> Iterator[int]:
        """The steps that a checkpoint adds to; all older steps where a manifest that would name them cannot be read."""
        try:
            while parent := read_manifest(self.at(step)).parent:
                if parent.step >= step:
                    return
                yield (step := parent.step)
        except CheckpointError:
            yield from (older for older in self.steps() if older < step)

    def clear(self) -> None:
        """Removes all of them."""
        for _, path in self._found():
            remove(path)
        self._remove_claims()
        with contextlib.suppress(OSError):  # not there, or with something else in it
            self.folder.rmdir()

    def _remove_claims(self) -> None:
        for path in self._paths():
            if re.fullmatch(CLAIM_PATTERN, path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _found(self) -> list[tuple[int, Path]]:
        """Steps and folders, whole or not."""
        named = [(re.fullmatch(STEP_PATTERN, path.name), path) for path in self._paths()]
        return [(int(match[1]), path) for match, path in named if match]

    def _paths(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def verify(folder: Path) -> tuple[int, int]:
    """Compares every byte of a checkpoint, and of the best model in it, with its checksums.

    For the checkpoints that an increment adds to, only the manifests are read.

    Returns:
        How many files there are, and of how many bytes.

    Raises:
        CheckpointError: a file is missing or damaged, names it, and the bytes; or what it adds to is.
    """
    manifest = read_chain(folder)[0].manifest
    count, num_bytes = SavedFiles(folder, manifest).verify()
    if (folder / BEST / MANIFEST).exists():
        of_best = verify(folder / BEST)
        count, num_bytes = count + of_best[0], num_bytes + of_best[1]
    return count, num_bytes
