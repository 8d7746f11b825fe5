import errno
import os

import pytest

from rowmesh._support.files.advice import described


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ENOSPC", "make room or choose another place"),
        ("EDQUOT", "quota"),
        ("EFBIG", "ulimit -f"),
        ("EACCES", "permission"),
        ("EPERM", "permission"),
        ("EROFS", "choose another place"),
        ("ENOTDIR", "is a file"),
        ("EISDIR", "is a folder"),
        ("ENOENT", "check the path"),
        ("ENAMETOOLONG", "shorter"),
        ("ELOOP", "links"),
        ("EMFILE", "ulimit -n"),
        ("ENFILE", "open files"),
        ("EIO", "dmesg"),
        ("ESTALE", "dmesg"),
        ("ENOMEM", "memory"),
        ("EBUSY", "process"),
    ],
)
def test_each_error_says_what_to_do_about_it(name, advice):
    number = getattr(errno, name)
    text = described(OSError(number, os.strerror(number), "runs/a/metrics.jsonl"))
    assert text.startswith(f"runs/a/metrics.jsonl: {os.strerror(number)}; ")
    assert advice in text
    assert ("make room" in text) == (name == "ENOSPC")


def test_nothing_is_made_up():
    assert described(OSError(errno.EPIPE, "Broken pipe")) == "Broken pipe"
    assert described(OSError("odd")) == "odd"
    assert described(OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b")) == (
        "a, b: Invalid cross-device link"
    )
