"""The element under the cursor or the mouse: the ranks that hold it, and what is wrong with it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.picture.model.differences import found_in_place_of
from shardviz.picture.model.holders import ranks_in_words, ranks_of, ranks_text
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.text import cut_at_comma, printable

from ..colors import verdict_style

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.holders import Mask
    from shardviz.picture.model.sides import Cell, Sides

    from ..model.document import Document, TensorEntry
    from ..model.selection import Selection


MOST_HOVERED = 40
"""Characters of the ranks in a tooltip."""


def hovered(sides: Sides, place: Sequence[int], shape: Sequence[int]) -> str:
    """Say in a few words who holds an element.

    Args:
        sides: Who holds what.
        place: The element's index in the holders' shape.
        shape: The tensor's shape, which may have fewer dims.
    """
    cell = sides.at(place)
    lines = [f"[{', '.join(map(str, place[len(place) - len(shape) :]))}]"]
    if sides.has_claimed:
        lines.append(f"{sides.titles[0]} {_named(cell.claimed)}")
    if sides.has_held:
        lines.append(f"{sides.titles[1]} {_named(cell.held)}{f' {WRONG}' if cell.is_wrong else ''}")
    return "\n".join(lines)


def _named(mask: Mask) -> str:
    return f"by {cut_at_comma(ranks_text(mask), MOST_HOVERED)}" if mask else "by nobody"


MOST_RANKS = 30
"""Characters of the ranks that are wrong."""

UNKNOWN_WIDTH = 1000


class Inspector(Static):
    """The ranks that should hold and do hold the element under the cursor; what is wrong with it."""

    _fitting: Callable[[int], Text] | None = None

    def show(self, document: Document, selection: Selection, sides: Sides | None, why: str = "") -> None:
        """Show the element under the cursor."""
        self._fitting = partial(inspector_text, document, selection, sides, why)
        self._fit()

    def on_resize(self) -> None:
        """Write as much as fits now."""
        self._fit()

    def _fit(self) -> None:
        if self._fitting is not None:
            self.update(self._fitting(self.size.width or UNKNOWN_WIDTH), layout=False)


def inspector_text(
    document: Document, selection: Selection, sides: Sides | None, why: str = "", width: int = UNKNOWN_WIDTH
) -> Text:
    """Write which ranks should hold and do hold the element under the cursor, or why nothing is drawn.

    Coordinates of ranks are left out where they do not fit into `width`.
    """
    if sides is None:
        return Text(f"? not drawn: {printable(why)}", verdict_style("unknown"))
    if selection.plane is None:
        return Text("nothing to draw: the tensor has no elements", "dim")
    entry = document.entries[selection.entry]
    at = selection.plane.at
    cell = sides.at(at)
    index = at[len(at) - len(entry.tensor.shape) :]
    mesh = entry.tensor.claimed.mesh if entry.tensor.claimed else document.dump.files.mesh
    text = _holders(index, sides, cell, mesh)
    if text.cell_len > width:
        text = _holders(index, sides, cell, None)
    why = _why(sides, cell)
    note = _in_its_place(entry, index, cell) if sides.titles == CLAIMED_AND_HELD else ""
    if why or note:
        text.append(f"\n{why or note}", verdict_style("error") if why else "dim")
    return text


def _holders(index: tuple[int, ...], sides: Sides, cell: Cell, mesh: Mesh | None) -> Text:
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"), no_wrap=True, overflow="ellipsis")
    if sides.has_claimed:
        text.append(f"  {sides.titles[0]} ", "dim").append(_who(cell.claimed, mesh))
    if sides.has_held:
        text.append(f"  {sides.titles[1]} ", "dim")
        text.append(_who(cell.held, mesh), verdict_style("error") if cell.different else "")
    return text


def _in_its_place(entry: TensorEntry, index: tuple[int, ...], cell: Cell) -> str:
    wrong = cell.due or cell.astray
    if not wrong:
        return ""
    rank = ranks_of(wrong)[0]
    if index_there := found_in_place_of(entry.tensor, index, rank):
        return f"rank {rank} holds [{', '.join(map(str, index_there))}] instead"
    return "" if cell.due else f"in another place of the shard on {ranks_in_words(ranks_of(wrong), MOST_RANKS)}"


def _why(sides: Sides, cell: Cell) -> str:
    """Say what is wrong with an element that is on the ranks that should hold it."""
    if not cell.guilty or cell.different:
        return ""
    return "; ".join(_reason(sides, ranks, words) for ranks, words in sides.reasons_at(cell))


def _reason(sides: Sides, ranks: Mask, words: str) -> str:
    is_placed = sides.is_placed and not ranks & sides.missing
    text = f"{ranks_in_words(ranks_of(ranks), MOST_RANKS)}: {words}"
    return f"{text}; placed as claimed" if is_placed else text


def _who(mask: int, mesh: Mesh | None) -> str:
    ranks = ranks_of(mask)
    if not ranks:
        return "nobody"
    if mesh is not None and len(ranks) == 1 and ranks[0] in mesh:
        return f"{ranks[0]} ({mesh.label(ranks[0]).replace(',', '')})"
    return ranks_text(mask)
