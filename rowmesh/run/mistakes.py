"""Mistakes in a configuration, in the user's words: key, value, what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from rowmesh._support.suggest import nearest
from rowmesh.run.config import Config
from rowmesh.run.table_config import TableConfig

Key = tuple[str, ...]
COMMAND_LINE = "the command line"
"""Where overrides come from, in messages."""


def explain(error: ValidationError, values: dict[str, Any], source: str, given: Sequence[Key] = ()) -> str:
    """Where mistakes in `values` are, and every one of them, one a line.

    Args:
        error: what pydantic found.
        values: what was validated.
        source: where they come from.
        given: the keys that came from the command line.
    """
    mistakes: dict[Key, list[str]] = {}
    for detail in error.errors():
        key = _written_key(values, tuple(str(part) for part in detail["loc"]))
        inherited = detail["type"] != "missing" and not _is_written(values, key)
        if not inherited:  # a default of all tables is reported once, where it stands
            for each in _unknown_keys(key, detail):
                mistakes.setdefault(each, []).append(_reason(each, detail))
    found = [(".".join(key), " or ".join(dict.fromkeys(reasons))) for key, reasons in mistakes.items()]
    lines = [
        f"{key}: {reason}" if key else reason for key, reason in found
    ]  # of several sections: the reason names them
    text = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes", *lines])
    are_given = [any(_is_in(each, leaf) for each in given) for key in mistakes if key for leaf in _leaves(values, key)]
    if not any(are_given):
        return f"{source}: {text}"
    return f"{COMMAND_LINE}: {text}" if all(are_given) else f"{source} and {COMMAND_LINE}: {text}"


def _unknown_keys(key: Key, detail: Any) -> list[Key]:
    """The keys of a mistake: itself, or of a section that is unknown those of it that have a name like a known one."""
    section = detail["input"]
    if detail["type"] != "extra_forbidden" or not isinstance(section, dict):
        return [key]
    names = [(*key, str(name)) for name in section]
    return [name for name in names if _nearest(".".join(name), list(known_keys()))] or [key]


def _leaves(values: Any, key: Key) -> Iterator[Key]:
    """The keys of a section that are written; of what is none itself, also where it is missing."""
    node = values
    for part in key:
        node = node.get(part, {}) if isinstance(node, dict) else node
    if isinstance(node, dict) and node:
        for name in node:
            yield from _leaves(values, (*key, str(name)))
    else:
        yield key


def _is_in(section: Key, key: Key) -> bool:
    """Whether a key is that of a section, or in it."""
    return key[: len(section)] == section


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, dotted."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def _reason(key: Key, detail: Any) -> str:
    """Why the value of one key does not do."""
    if detail["type"] == "missing":
        return f"missing; write it in the file or give {_first_key(key)}=…"
    not_a_section = detail["type"] == "model_type"
    if detail["type"] == "extra_forbidden" or (not_a_section and _would_be_a_table(key)):
        return f"unknown key; {_suggestion(key)}"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    if not_a_section:
        return f"is a section; give its keys, such as {_first_key(key)}=…, got {detail['input']!r}"
    return f"{detail['msg'].removeprefix('Input ')}, got {detail['input']!r}"


def _suggestion(key: Key) -> str:
    """The nearest key, or else those that stand beside it."""
    known = list(known_keys())
    if _would_be_a_table(key):
        own = f"tables.{key[1]}." if len(key) > 2 else "tables."
        known = list(dict.fromkeys([*known_keys(TableConfig, own), *known]))
    if len(key) == 1 and (section := nearest(key[0], Config.model_fields, cutoff=0.75)):
        return f"did you mean the section {section!r}?"
    if match := _nearest(".".join(key), known):
        return f"did you mean {match!r}?"
    if len(key) == 1:
        return f"known sections: {', '.join(Config.model_fields)}"
    siblings = [path for path in known if path.startswith("".join(f"{part}." for part in key[:-1]))]
    return f"known: {', '.join(siblings)}"


def _nearest(path: str, known: list[str]) -> str | None:
    """The key nearest to a path, or else to its last part alone: its section may be what is wrong or left out."""
    by_last_part = {key.rpartition(".")[2]: key for key in reversed(known)}
    last_part = nearest(path.rpartition(".")[2], by_last_part, cutoff=0.75)
    return nearest(path, known, cutoff=0.75) or (last_part and by_last_part[last_part])


def _first_key(section: Key) -> str:
    path = ".".join(section)
    return next((key for key in known_keys() if key.startswith(f"{path}.")), path)


def _would_be_a_table(key: Key) -> bool:
    return len(key) > 1 and key[0] == "tables" and key[1] not in TableConfig.model_fields


def _is_written(values: Any, key: Key) -> bool:
    for part in key:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _written_key(values: dict[str, Any], location: Key) -> Key:
    """The part of a location that names a key: pydantic goes on with list positions and union branches."""
    node: Any = values
    for depth, part in enumerate(location):
        if not isinstance(node, dict):
            return location[:depth]
        node = node.get(part)
    return location
