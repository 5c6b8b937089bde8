"""The colors of ranks in text, pictures and viewer; a rank's number is always shown, too.

A color is a hue and a shade of it. The hue shows where a rank is along the outermost splits of the tensor, the shade
separates neighbors along the other axes: 8 parts of 128 read as 8 bands. The hues were searched for: the nearest two,
in any shades, are as far apart as possible for the common kinds of color blindness (the distances are tested). All are
far from vermilion, which marks errors, and from gray, which marks parts that nobody holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardviz.picture.model.holders import ranks_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh

    Indices = NDArray[np.int64]

Number = TypeVar("Number", int, "Indices")

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, GREY, VERMILLION = "#56b4e9", "#999999", "#d55e00"
"""Okabe and Ito's, for everything but ranks."""

HUES = 8
SHADES = 2
RANK_COLORS = (
    *("#348ddd", "#56acff", "#0c6544", "#34835f", "#dbcb02", "#fcec48", "#898c13", "#a7ab3e"),
    *("#91027f", "#b2339e", "#c2709d", "#e48ebc", "#86ddab", "#a6fecb", "#6b01db", "#863efe"),
)
"""The shades of each hue, hue after hue; hues that follow each other are as unlike as can be."""

RANK_COLORS_256 = (
    *("#5f87ff", "#87afd7", "#5f5f00", "#00875f", "#ffd75f", "#ffff00", "#878700", "#d7af00"),
    *("#87005f", "#af0087", "#af5faf", "#ff8787", "#87d7d7", "#87ffaf", "#5f00d7", "#8700ff"),
)
"""The same for a terminal of 256 colors: of its cube, so that none is rounded to another one's."""

RANK_COLORS_16 = (4, 11, 5, 10, 6, 3, 14, 2)
"""The hues for a terminal of 16 colors, by their ANSI numbers; the second shade of each is underlined."""

INK_ON_16 = (15, 0, 15, 0, 0, 0, 0, 0)
"""White or black, whichever can be read on each of `RANK_COLORS_16`."""

RIGHT, WRONG = "✓", "✗"
"""Before what is right and what is wrong, in every format. `≠` would be read as "not" before what was found."""

HEAT_SIGNS = "▁▂▃▄▅▆▇█"
"""How much, from the least to the most: the sign of each level of heat, so that color is not the only one."""

HEAT_COLORS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
"""Viridis, whose brightness rises evenly: it is read in the same order by all eyes."""

HEAT_COLORS_256 = ("#5f005f", "#5f00af", "#005f87", "#008787", "#00af87", "#5fd75f", "#afd700", "#ffff00")
HEAT_COLORS_16 = (4, 4, 6, 6, 2, 2, 11, 11)
INK_ON_HEAT_16 = (15, 15, 0, 0, 0, 0, 0, 0)

BLACK, WHITE = "#000000", "#ffffff"


@dataclass(frozen=True, slots=True)
class Coloring:
    """How ranks are colored: by their place on the mesh, or by number.

    Attributes:
        mesh: Where they are; None if numbers count something else, such as files.
        axes: The axes that split the tensor, outermost first. Ranks that differ only along others hold copies, and have
            one color. Without any, all axes of the mesh.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()

    def color(self, rank: int) -> int:
        """Return the place of a rank's color in the palette."""
        return rank_color(rank, self.mesh, self.axes)

    def color_of(self, ranks: Sequence[int] | Indices) -> int:
        """Return the color of a set of ranks: their most frequent hue, or -1 if it is under a third.

        The first shade stands for a whole hue. An unsplit tensor that all ranks hold has the first color.
        """
        if self.mesh is not None and not self.axes and len(ranks) == self.mesh.size:
            return 0
        counts = np.bincount(self._colors_of(np.asarray(ranks, np.int64)), minlength=HUES * SHADES)
        if np.count_nonzero(counts) == 1:
            return int(counts.argmax())
        hues = counts.reshape(HUES, SHADES).sum(axis=1)
        most = int(hues.argmax())
        return most * SHADES if 3 * hues[most] >= len(ranks) else -1

    def _colors_of(self, ranks: Indices) -> Indices:
        """Return the color of each of some ranks, looked up at once."""
        colors = _by_number(ranks)
        if self.mesh is not None:
            known = _colors(self.mesh, self.axes)
            is_near = ranks < len(known)
            colors[is_near] = known[ranks[is_near]]
        return colors


def rank_color(rank: int, mesh: Mesh | None = None, axes: tuple[str, ...] = ()) -> int:
    """Return the place of a rank's color in the palette; the arguments are those of `Coloring`."""
    known = _color_of_each(mesh, axes) if mesh is not None else ()
    return known[rank] if 0 <= rank < len(known) else _by_number(rank)


def _by_number(rank: Number) -> Number:
    """Return the color of a rank that is nowhere on a mesh, or of several."""
    return rank % HUES * SHADES + rank // HUES % SHADES


@lru_cache(maxsize=256)
def _color_of_each(mesh: Mesh, axes: tuple[str, ...]) -> Sequence[int]:
    """Return the same as `_colors`, for one rank after the other."""
    found: list[int] = _colors(mesh, axes).tolist()
    return found


@lru_cache(maxsize=256)
def _colors(mesh: Mesh, axes: tuple[str, ...]) -> Indices:
    """Return the color of every rank up to a mesh's highest.

    Hues are for the outermost axes, as many as have no more parts than there are hues. If the first alone has more,
    neighbors share a hue, and shades tell them apart.
    """
    order = [axis for axis in axes or mesh.axes if mesh.axis_size(axis) > 1]
    sizes = [mesh.axis_size(axis) for axis in order]
    leading = max((count for count in range(1, len(sizes) + 1) if math.prod(sizes[:count]) <= HUES), default=1)
    part = np.zeros(mesh.shape, np.int64)
    for axis, size in zip(order[:leading], sizes, strict=False):
        part = part * size + _along(mesh, axis)
    parts = math.prod(sizes[:leading])
    hue = part * HUES // parts
    within_hue = part - -(-hue * parts // HUES)
    shade = sum((_along(mesh, axis) for axis in order[leading:]), within_hue) % SHADES
    ranks = ranks_on(mesh)
    found = _by_number(np.arange(int(ranks.max()) + 1))
    found[ranks] = (hue * SHADES + shade).ravel()
    return found


def _along(mesh: Mesh, axis: str) -> NDArray[np.int64]:
    """Return each coordinate's position along an axis, in a shape that broadcasts over the mesh."""
    shape = [size if name == axis else 1 for name, size in zip(mesh.axes, mesh.shape, strict=True)]
    return np.arange(mesh.axis_size(axis)).reshape(shape)


def ink_on(color: str) -> str:
    """Return black or white, whichever can be read on a color: at least 4.5 to 1."""
    return BLACK if (_luminance(color) + 0.05) / (_luminance(BLACK) + 0.05) >= 4.5 else WHITE


@lru_cache(maxsize=256)
def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def rank_style(rank: int, coloring: Coloring) -> str:
    """Return the name of a rank's text style; `Terminal` defines how it looks."""
    return style_of("rank", coloring.color(rank))


def style_of(family: str, number: int) -> str:
    """Return the name of a text style: of a color (`rank`), a `line` in one, a level of `heat`; none below 0."""
    return f"{family}.{number}" if number >= 0 else ""
