"""Where widgets are on the screen: worked out once for a layout, and not again for what is beside or behind others."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual._compositor import ReflowResult
    from textual.geometry import Size
    from textual.strip import Strip
    from textual.widget import Widget

Span = tuple[int, int]
"""The columns of a line from one up to but not including another."""

Stretch = tuple[int, int, int]
"""A line of the screen, and the columns of it that one widget shows: the first, and the one behind the last."""


class PaintedInFront(Compositor):
    """Textual's own, which paints all of every widget, and cuts each line where any widget begins or ends.

    Here a line is cut where another widget comes in front, and of each widget only what is in front is painted.
    """

    _in_front: tuple[object, list[list[Stretch]]] | None = None

    @property
    def cuts(self) -> list[list[int]]:
        """The columns of each line at which another widget comes in front, and both ends of the line."""
        if self._cuts is None:
            found: list[list[int]] = [[] for _ in range(self.size.height)]
            for stretches in self._stretches:
                for y, start, stop in stretches:
                    found[y] += (start, stop)
            self._cuts = [sorted({0, self.size.width, *line}) for line in found]
        return self._cuts

    @property
    def _stretches(self) -> list[list[Stretch]]:
        """What each visible widget shows, worked out once for a layout."""
        visible = self.visible_widgets
        if self._in_front is None or self._in_front[0] is not visible:
            front = np.full((self.size.height, self.size.width), -1, np.int32)
            for number, (region, clip) in reversed([*enumerate(visible.values())]):
                x, y, width, height = region.intersection(clip).intersection(self.size.region)
                front[y : y + height, x : x + width] = number
            found: list[list[Stretch]] = [[] for _ in visible]
            for y, line in enumerate(front):
                edges = [0, *(np.flatnonzero(line[1:] != line[:-1]) + 1).tolist(), len(line)]
                for start, stop in pairwise(edges):
                    if (number := int(line[start])) >= 0:
                        found[number].append((y, start, stop))
            self._in_front = visible, found
        return self._in_front[1]

    def render_partial_update(self) -> ChopsUpdate | None:
        """Paint the stretches that are dirty; Textual would paint whole lines of all widgets between them."""
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        if not regions:
            return None
        spans = [*self._regions_to_spans(regions)]
        dirty: list[list[Span]] = [[] for _ in range(self.size.height)]
        for y, start, stop in spans:
            dirty[y].append((start, stop))
        chops = self._paint(dirty)
        return ChopsUpdate(chops, spans, [cuts[1:] for cuts in self.cuts])

    def _render_chops(self, crop: Region, is_rendered_line: Callable[[int], bool]) -> Sequence[Mapping[int, Strip]]:
        """Paint the lines that are asked for, as far as they are in a region."""
        wanted = [(crop.x, crop.right)]
        return self._paint([wanted if is_rendered_line(y) else [] for y in range(self.size.height)])

    def _paint(self, dirty: Sequence[Sequence[Span]]) -> Sequence[Mapping[int, Strip]]:
        """Paint what widgets show of some columns of each line."""
        chops: list[dict[int, Strip | None]] = [dict.fromkeys(line[:-1]) for line in self.cuts]
        for (widget, (region, clip)), stretches in zip(self.visible_widgets.items(), self._stretches, strict=True):
            wanted = [
                (y, start, stop)
                for y, start, stop in stretches
                if any(start < right and stop > left for left, right in dirty[y])
            ]
            if wanted:
                shown, top, bottom = region.intersection(clip), wanted[0][0], wanted[-1][0] + 1
                lines = widget.render_lines(Region(shown.x - region.x, top - region.y, shown.width, bottom - top))
                for y, start, stop in wanted:
                    chops[y][start] = lines[y - top].crop(start - shown.x, stop - shown.x)
        return chops  # type: ignore[return-value]


class ArrangedOnce(PaintedInFront):
    """Textual's own arranges all widgets a second time after a layout, and whenever a hidden one changes."""

    def reflow(self, parent: Widget, size: Size) -> ReflowResult:
        """Arrange all widgets; until something new comes they stay where they are."""
        found = super().reflow(parent, size)
        self._full_map_invalidated = False
        return found

    def update_widgets(self, widgets: set[Widget]) -> None:
        """Note what has to be painted; a widget that is known, but beside the screen, has been arranged already."""
        visible = self.visible_widgets
        super().update_widgets({one for one in widgets if one in visible or one not in self._full_map})
