"""compiled: Numba's compiler, with a cache on disk whose loss or damage costs time and nothing else.

Numba ends a program where it finds no folder for its cache, where a write to it fails, and for ever once a file in it
is damaged: after a power cut files have the right name and size and zeros inside. Code that is damaged without Python
noticing would be run. So each kernel and signature here has one file, which begins with its checksum. A file that is
not what was written is compiled and written again; where none can be written, every process compiles for itself.
"""

from __future__ import annotations

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

from rowmesh.faults import reach

logger = logging.getLogger("rowmesh")
_DIGEST_BYTES = 16
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

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
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
        if not self._impl.check_cachable(data):
            return
        key = self._index_key(sig, data.codegen)
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
