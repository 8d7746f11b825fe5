"""Docstrings as the API pages need them: two habits of ours that Markdown does not know."""

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Turns `Example:` into the section `Examples:`, and the `::` before a literal block into `:`."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"(?<=\S)::$", ":", text, flags=re.MULTILINE)
