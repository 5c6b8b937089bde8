"""The screen that the views are on, below whatever dialog is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.reactive import Reactive
from textual.screen import Screen

from ..widgets.box import Entitled

if TYPE_CHECKING:
    from textual.widget import Widget


class MainScreen(Screen[None]):
    """The screen. It lights the box that the focus is in."""

    focused: Reactive[Widget | None] = Reactive(None, repaint=False)  # Textual paints the whole screen again for it

    _lit: Entitled | None = None

    def set_focus(self, widget: Widget | None, scroll_visible: bool = True, from_app_focus: bool = False) -> None:
        """Move the focus, and the light with it, so that one frame has both."""
        super().set_focus(widget, scroll_visible, from_app_focus)
        around = self.focused.ancestors_with_self if self.focused is not None else []
        box = next((node for node in around if isinstance(node, Entitled)), None)
        if box is not self._lit:
            for changed, on in ((self._lit, False), (box, True)):
                if changed is not None:
                    changed.light(on=on)
            self._lit = box
