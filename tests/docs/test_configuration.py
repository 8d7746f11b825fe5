"""The table of keys in docs/command_line.md has every key of a configuration, with its default."""

import re
from pathlib import Path

from pydantic import BaseModel

from rowmesh.run.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
KEY = r"`\.?[A-Za-z_.]+`"
ROW = re.compile(rf"^\| ({KEY}(?:, {KEY})*) \|(.*?) \| (.*) \|$", re.MULTILINE)
IN_WORDS = {"run.folder", "train.loss_weights"}  # their default follows from something else


def defaults(section, prefix=""):
    """The keys of a section and of those in it, each with its default."""
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from defaults(type(default), f"{prefix}{name}.")
        elif name == "data":
            yield from defaults(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", default


def documented():
    """The keys of the page, each with what it says of its default; of those that its text alone names, nothing."""
    found = {}
    for names, values, text in ROW.findall(PAGE.read_text()):
        keys = re.findall(r"[A-Za-z_.]+", names.replace("NAME.", "").replace(".LABEL", ""))
        parent = keys[0].rpartition(".")[0]
        keys = [parent + key if key.startswith(".") else key for key in keys]
        parts = re.split(r", (?![^\[]*\])", values)
        found |= dict(zip(keys, parts, strict=True)) if len(keys) == len(parts) else dict.fromkeys(keys, "")
        found |= {parent + key: "" for key in re.findall(r"`(\.[a-z_0-9]+)`", text) if parent + key not in found}
    return found


def as_value(text):
    """The value that a cell gives; None where it says something else of it."""
    plain = text.strip().strip("`").replace(",", "")
    if plain in ("true", "false"):
        return plain == "true"
    if re.fullmatch(r"\d+(\.\d+)?", plain):
        return float(plain)
    return plain if re.fullmatch(r"`[^`]+`", text.strip()) else None


def test_the_page_has_every_key_with_its_default():
    page, keys = documented(), dict(defaults(Config))
    assert keys.keys() - page.keys() == {"tables.tensor_train.optimizer"}  # a section, whose keys it has
    given = {key: (as_value(page.get(key, "")), default) for key, default in keys.items() if key not in IN_WORDS}
    given = {key: pair for key, pair in given.items() if pair[0] is not None}
    assert len(given) > 60
    # What a table leaves out is None here, and the page has the library's own default.
    assert {key: pair for key, pair in given.items() if pair[1] is not None and pair[0] != pair[1]} == {}
