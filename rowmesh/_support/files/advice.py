"""Advice: remedies of a user for an error of the system."""

from __future__ import annotations

import errno
import os

_ADVICE = {
    errno.ENOSPC: "make room or choose another place",
    errno.EDQUOT: "the user's quota is used up: remove files, or choose another place",
    errno.EFBIG: "the file system or `ulimit -f` allows no file of this size: raise the limit or choose another place",
    errno.EACCES: "get permission, or choose another place",
    errno.EPERM: "get permission, or choose another place",
    errno.EROFS: "choose another place, or have it mounted writable",
    errno.ENOTDIR: "what should be a folder in this path is a file: choose another path",
    errno.EISDIR: "this is a folder where a file is meant: choose another path",
    errno.ENOENT: "check the path, and make its folder first",
    errno.EEXIST: "remove it or choose another path",
    errno.ENOTEMPTY: "something else writes there: choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "symbolic links lead in a circle: mend them or choose another path",
    errno.EMFILE: "raise the number of open files with `ulimit -n`",
    errno.ENFILE: "the machine has too many open files: end other programs",
    errno.ENOMEM: "free memory",
    errno.EAGAIN: "free memory, or raise the number of processes with `ulimit -u`",
    errno.EBUSY: "another process uses it: wait for it, or choose another path",
    errno.ETXTBSY: "another process uses it: wait for it, or choose another path",
    errno.EIO: "the disk or its connection fails: look at `dmesg`, and copy what can still be read",
    errno.ESTALE: "the server of this file system was restarted: look at `dmesg`, and mount it again",
}


_FINAL = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EBADF}


def as_refusal(error: Exception) -> Exception:
    """A lack of memory as an error of the system, which another time may not meet; torch has no class for it.

    >>> as_refusal(MemoryError())
    OSError(12, 'Cannot allocate memory')
    """
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return error


def may_pass(error: BaseException) -> bool:
    """Whether what was refused may succeed later, or elsewhere: room, permission, a disk that comes back.

    >>> may_pass(OSError(errno.ENOSPC, "")), may_pass(OSError(errno.ENOTDIR, "")), may_pass(ValueError())
    (True, False, False)
    """
    return isinstance(error, OSError) and error.errno not in _FINAL


def advice(error: OSError) -> str | None:
    """The remedy; None where nothing is known to help."""
    return _ADVICE.get(error.errno or 0)


def described(error: OSError) -> str:
    """The files, what is wrong, and what to do about it.

    >>> described(PermissionError(13, "Permission denied", "runs/a"))
    'runs/a: Permission denied; get permission, or choose another place'
    """
    files = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    where = f"{files}: " if files else ""
    todo = f"; {known}" if (known := advice(error)) else ""
    return f"{where}{error.strerror or error}{todo}"
