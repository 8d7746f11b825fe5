"""compiled: Numba's compiler, with a cache on disk whose loss or damage costs time and nothing else.

Numba ends a program where it finds no folder for its cache, where a write to it fails, and for ever once a file in it
is damaged: after a power cut files have the right name and size and zeros inside. Code that is damaged without Python
noticing would be run. So each kernel and signature here has one file, which begins with its checksum. A file that is
not what was written is compiled and written again; where none can be written, every process compiles for itself.
Where several processes need the same kernel, a single process compiles it and the others wait: ranks start at the same
moment, and often on fewer cores than there are ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from rowmesh._support.faults import reach

logger = logging.getLogger("rowmesh")
_DIGEST_BYTES = 16
WAIT_S = 120.0
"""How long a process waits for another one that compiles the same kernel."""
_said: set[str] = set()
_njit: Any = numba.njit


def compiled(function: Callable[..., Any] | None = None, *, cache: bool = True, **options: Any) -> Any:
    """Has Numba compile a function at its first call, as `numba.njit` does.

    Args:
        function: what to compile; without it, this is a decorator with options.
        cache: whether to keep the code on disk.
        options: of `numba.njit`.

    Example:
        >>> @compiled(nogil=True)
        ... def add(a, b):
        ...     return a + b
        >>> add(1, 2)
        3
    """
    if function is None:
        return lambda function: compiled(function, cache=cache, **options)
    dispatcher = _njit(**options)(function)
    if cache and (store := _open_cache(function)) is not None:
        dispatcher._cache = store  # as `cache=True` does, but with Numba's own kind of cache
    return dispatcher


def cache_folder() -> str | None:
    """Where this module's kernels would be kept, and those of others likewise; None where no folder can be written."""
    store = _open_cache(cache_folder)
    return None if store is None else store.cache_path


class _Cache(FunctionCache):
    """A file a kernel and signature: checksum, what it was compiled from, code.

    Unlike Numba's own it has no index, which would name a file before that is there.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._claims: dict[Path, Any] = {}

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        found = self._read(key, target_context)
        if found is None and self._claim(self._path(key)):
            found = self._read(key, target_context)  # another process may have compiled it meanwhile
            if found is not None:
                self._release(self._path(key))
        return found

    def _claim(self, path: Path) -> bool:
        """Makes others wait for this process, which is about to compile; False where nobody can be made to.

        Where compiling fails, they wait for as long as this process lives, and WAIT_S at most.
        """
        from filelock import FileLock  # where there is something to compile

        if path in self._claims:  # compiling failed, and is tried again
            return False
        lock = FileLock(path.with_suffix(".lock"), timeout=WAIT_S, thread_local=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError):  # a time-out is an OSError too
            return False
        self._claims[path] = lock
        return True

    def _release(self, path: Path) -> None:
        if (lock := self._claims.pop(path, None)) is not None:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def _read(self, key: Any, target_context: Any) -> Any:
        path, content = self._path(key), b""
        try:
            content = path.read_bytes()
            checksum, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if checksum != _digest(content):
                raise ValueError("it is not what was written")
            if content[:_DIGEST_BYTES] != self._origin(key):
                return None
            stored, code = pickle.loads(content[_DIGEST_BYTES:])
            return self._impl.rebuild(target_context, code) if stored == key else None
        except FileNotFoundError:
            return None
        except Exception as error:  # a pickle of other versions may raise anything
            _log("damaged", f"kernels are compiled again, as {path} cannot be used: {error}")
            return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        key = self._index_key(sig, data.codegen)
        try:
            if self._impl.check_cachable(data):
                self._write_file(key, data)
        finally:
            self._release(self._path(key))

    def _write_file(self, key: Any, data: Any) -> None:
        content = self._origin(key) + dumps((key, self._impl.reduce(data)))
        try:
            _write(self._path(key), _digest(content) + content)
        except OSError as error:
            _log(
                "unwritten",
                f"kernels are compiled again in every process, as they cannot be kept in {self.cache_path}: "
                f"{error.strerror}; set NUMBA_CACHE_DIR to another folder",
            )

    def flush(self) -> None:
        """Nothing: files of other sources are written over."""

    def _path(self, key: Any) -> Path:
        return Path(self.cache_path) / f"{self._impl.filename_base}.{_digest(str(key).encode()).hex()}.nbc"

    def _origin(self, key: Any) -> bytes:
        return _digest(f"{numba.__version__} {self._impl.locator.get_source_stamp()!r} {key}".encode())


def _open_cache(function: Any) -> _Cache | None:
    try:
        return _Cache(function)
    except RuntimeError:  # which Numba raises where it can write neither beside the source nor in the user's cache
        _log(
            "nowhere",
            "kernels are compiled again in every process, which takes a while: neither the folder of rowmesh nor the "
            "user's cache can be written; set NUMBA_CACHE_DIR to a folder that can",
        )
        return None


def _write(path: Path, content: bytes) -> None:
    """Writes a file that appears whole, even if others write it too; the checksum reveals what a crash left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        reach("ops.compiled.save", path)
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _log(what: str, text: str) -> None:
    """Logs each kind of trouble once, on rank 0."""
    if what not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(what)
        logger.warning(text)
