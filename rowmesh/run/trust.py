"""Whether the module that a run's configuration names may be imported: importing runs it.

A run of this user on this machine leaves a seal of its model's name in its folder: a keyed hash. The key never leaves
the machine, so that a folder from elsewhere has none that fits, whatever it says.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from rowmesh._support.files.atomic import replacing_file
from rowmesh.errors import ConfigurationError

_KEY_BYTES = 32


def seal_of(name: str) -> str | None:
    """The seal of a model's name, for the folder of a run that trains it; None where no key can be kept."""
    key = _key(make=True)
    return None if key is None else _digest(key, name)


def check_trusted(run: Path, name: str, seal: object, *, trust: bool, how: str) -> None:
    """Raises where a class that only the folder of a run names is to be imported.

    Args:
        run: the folder, for the error.
        name: `package.module:Class`, as the folder says.
        seal: what the folder has.
        trust: the user says that the name may be imported.
        how: what the user does then, for the error.

    Raises:
        ConfigurationError: no run of this user on this machine left that seal, and `trust` is not given.
    """
    key = _key(make=False)
    if trust or (key is not None and isinstance(seal, str) and hmac.compare_digest(_digest(key, name), seal)):
        return
    raise ConfigurationError(
        f"{run} names the model {name}, and was not trained by you on this machine: its module would be imported, "
        f"which runs it. Look at {run / 'config.toml'}, and {how} if you trust it"
    )


def _digest(key: bytes, name: str) -> str:
    return hmac.new(key, name.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    """The key of the user on this machine."""
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rowmesh" / "key"
    with suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(path) as file:
                os.chmod(file.fileno(), 0o600)  # noqa: PTH101 - the file has no name of its own yet
                file.write(secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
        return key if len(key) == _KEY_BYTES else None
    return None
