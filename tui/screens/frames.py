"""The base of screens: a frame has all that is known when it is painted."""

from __future__ import annotations

from textual.screen import Screen, ScreenResultType


class PaintedOnce(Screen[ScreenResultType]):
    """A screen that paints once what a layout changed, such as scroll bars; Textual would do that in a second frame."""

    def _compositor_refresh(self) -> None:
        """Paint what waits to be painted; a batch is painted when it ends, and Textual would paint it for nothing."""
        if self.app._batch_count:
            self._dirty_widgets.add(self)
            return
        waiting = {
            widget
            for widget in self._compositor.visible_widgets
            if widget._repaint_required and not widget._layout_required
        }
        for widget in waiting:
            widget._repaint_required = False
        self._compositor.update_widgets(waiting)
        super()._compositor_refresh()
