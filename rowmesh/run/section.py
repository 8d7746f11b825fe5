"""Section: a TOML table of a configuration, and the kinds of values that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rowmesh._support.files.places import local_path
from rowmesh.data.raw import is_server

Auto = Literal["auto"]
AUTO: Final = "auto"
_LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def _local(text: str) -> str:
    local_path(text, "the path")
    return str(Path(text).expanduser()) if text.startswith("~") else text


Folder = Annotated[str, AfterValidator(_local)]
"""A path of this machine; a shell expands `~` at the start of a word only, which `data.folder=~/clicks` is not."""
Source = Annotated[str, AfterValidator(lambda text: text if is_server(text) else _local(text))]
"""A path, or the URL of a server; what it is decides where it is read."""


class Section(BaseModel):
    """A TOML table: unknown keys are errors, values are not converted between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def default_of(kind: Callable[..., object], argument: str) -> Any:
    """The default of an argument of a class of the library, for the key of the same name.

    >>> default_of(Section.model_dump_json, "indent") is None
    True
    """
    default = signature(kind).parameters[argument].default
    assert default is not Parameter.empty, f"{kind} has no default of {argument}"
    return default


def shared(section: Section, kind: Callable[..., object]) -> dict[str, Any]:
    """The values of the keys of a section that are arguments of a class of the library, too, by the same names.

    The library declares such a key and says what it means: the section has its default from there, and adds what values
    may be.
    """
    names = signature(kind).parameters.keys() & type(section).model_fields.keys()
    return {name: getattr(section, name) for name in names}
