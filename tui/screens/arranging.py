"""Where widgets are on the screen: worked out once for a layout, and not again for what is beside the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual._compositor import Compositor

if TYPE_CHECKING:
    from textual._compositor import ReflowResult
    from textual.geometry import Size
    from textual.widget import Widget


class ArrangedOnce(Compositor):
    """Textual's own, which arranges all widgets a second time after a layout, and whenever a hidden one changes."""

    def reflow(self, parent: Widget, size: Size) -> ReflowResult:
        """Arrange all widgets; until something new comes they stay where they are."""
        found = super().reflow(parent, size)
        self._full_map_invalidated = False
        return found

    def update_widgets(self, widgets: set[Widget]) -> None:
        """Note what has to be painted; a widget that is known, but beside the screen, has been arranged already."""
        visible = self.visible_widgets
        super().update_widgets({one for one in widgets if one in visible or one not in self._full_map})
