"""A few lines of text that cost nothing while they stay as they are, and no layout while they take as many lines."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static


class Note(Static):
    """Text that is painted again only where it changes. Strings are text and never markup."""

    _said: Text | None = None

    def say(self, text: str | Text) -> None:
        """Show a text instead of the one before."""
        text = Text(text) if isinstance(text, str) else text
        before, self._said = self._said, text
        if before is None or text != before:
            self.update(text, layout=before is None or self._needs_room(before, text))

    def _needs_room(self, before: Text, after: Text) -> bool:
        """Whether the text may take more or fewer lines: where any of them is wrapped nobody knows before."""
        if not self.styles.is_auto_height:
            return False
        is_wrapped = any(line.cell_len > self.size.width for text in (before, after) for line in text.split("\n"))
        return is_wrapped or before.plain.count("\n") != after.plain.count("\n") or bool(before) != bool(after)
