"""How griffe reads our docstrings: an `Example:` of lines with `>>>` is a section of examples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Object

EXAMPLE = re.compile(r"^( *)Example:(?=\n)", re.MULTILINE)


class Examples(Extension):
    """Names the section as griffe does."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
