"""Section: a TOML table of a configuration, and the kinds of values that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Auto = Literal["auto"]
AUTO: Final = "auto"
_LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Folder = Annotated[str, AfterValidator(lambda text: str(Path(text).expanduser()) if text.startswith("~") else text)]
"""A path; a shell expands `~` at the start of a word only, which `data.folder=~/clicks` is not."""


class Section(BaseModel):
    """A TOML table: unknown keys are errors, values are not converted between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
