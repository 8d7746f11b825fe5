"""From a TOML file and `a.b=value` overrides to a resolved configuration, and back to a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from rowmesh._support.files.secrets import masked_values
from rowmesh.data.raw import is_server
from rowmesh.errors import ConfigurationError
from rowmesh.publish.opening import split_url
from rowmesh.run.config import Config
from rowmesh.run.mistakes import explain


def resolve(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, changed by overrides such as `train.epochs=2`.

    Where an override names another model than the file, what the file says of its own is left out; so is its strategy
    of placement where an override gives a plan, and its plan where one gives a strategy.

    Raises:
        ConfigurationError: the file cannot be read, a key is unknown (with the nearest known one), or a
            value does not fit its key.
    """
    values = read_toml(path)
    changes = [parse_override(override) for override in overrides]
    _forget_other_model(values, dict(changes).get(("model", "name")))
    _forget_other_placement(values, dict(changes))
    for key, value in changes:
        _assign(values, key, value)
    folder = values.setdefault("run", {})
    if isinstance(folder, dict) and not folder.get("folder"):
        folder["folder"] = f"runs/{path.stem}"
    return validate(values, str(path), [key for key, _ in changes])


def validate(values: dict[str, Any], source: str, given: Sequence[tuple[str, ...]] = ()) -> Config:
    """The configuration in nested dictionaries; `source` is named in errors, for keys that were not `given`."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(explain(error, values, source, given)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a byte order mark first
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"cannot read the configuration {path}: {reason}") from None


def anchored(config: Config) -> Config:
    """The same configuration with absolute paths: it means the same wherever it is read."""
    data = config.data.model_copy(update=dict(_anchored_data(config)))
    folders = ("folder", "fallback_folder", "prometheus_file")
    of_run = {key: str(Path(path).absolute()) for key in folders if (path := getattr(config.run, key))}
    run = config.run.model_copy(update=of_run)
    paths = {
        key: str(Path(path).absolute())
        for key in ("plan", "topology")
        if (path := getattr(config.placement, key)) and Path(path).exists()  # a topology may be a shipped one's name
    }
    placement = config.placement.model_copy(update=paths)
    of_checkpoints = {"folder": str(Path(path).absolute())} if (path := config.checkpoint.folder) else {}
    checkpoint = config.checkpoint.model_copy(update=of_checkpoints)
    publish = config.publish.model_copy(update={"to": _anchored_target(config.publish.to)})
    of_start = {"start_from": str(Path(path).absolute())} if (path := config.train.start_from) else {}
    train = config.train.model_copy(update=of_start)
    sections = {
        "run": run,
        "train": train,
        "data": data,
        "placement": placement,
        "checkpoint": checkpoint,
        "publish": publish,
    }
    return config.model_copy(update=sections)


def _anchored_target(url: str) -> str:
    kind, place = split_url(url) if url else ("", "")
    return url if kind in ("", "redis") else f"{kind}:{Path(place).absolute()}"


def _anchored_data(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if not is_server(data.folder):
        yield "folder", str(Path(data.folder).absolute())
    if data.is_raw and data.raw_test:
        yield "test", str(Path(data.raw_test).absolute())
    if data.is_raw and Path(data.raw_schema).is_file():
        yield "raw_schema", str(Path(data.raw_schema).absolute())


def to_toml(config: Config) -> str:
    """Every key and its value, defaults included; `resolve` reads the same configuration back from a file.

    Passwords in URLs are masked.
    """
    return tomli_w.dumps(masked_values(config.model_dump(exclude_none=True)))


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """The key and the value of `a.b=value`; the value is TOML, or else a string as it stands.

    >>> parse_override("train.epochs=2"), parse_override("model.top=[64, 32]")
    ((('train', 'epochs'), 2), (('model', 'top'), [64, 32]))
    >>> parse_override("data.folder=data/criteo")
    (('data', 'folder'), 'data/criteo')
    """
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigurationError(f"an override reads section.key=value, got {text!r}")
    path = tuple(part.strip() for part in key.split("."))
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path, value.strip()


def _forget_other_model(values: dict[str, Any], name: object) -> None:
    """Takes out what a file says of a model in whose place an override puts another: its keys would mean nothing."""
    section = values.get("model")
    if name is not None and isinstance(section, dict) and section.get("name", "dlrm") != name:
        for key in ("bottom", "top", "options"):
            section.pop(key, None)


def _forget_other_placement(values: dict[str, Any], changes: dict[tuple[str, ...], Any]) -> None:
    """Takes out the plan of a file where an override gives a strategy, and the other way round."""
    section = values.get("placement")
    for given, other in (("plan", "strategy"), ("strategy", "plan")):
        if isinstance(section, dict) and changes.get(("placement", given)) and ("placement", other) not in changes:
            section.pop(other, None)


def _assign(values: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    for depth, part in enumerate(key[:-1]):
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            section = ".".join(key[: depth + 1])
            raise ConfigurationError(f"override {'.'.join(key)}: {section} is a value, not a section")
    values[key[-1]] = value
