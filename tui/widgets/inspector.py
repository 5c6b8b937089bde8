"""The element under the cursor or the mouse: the ranks that hold it, and what is wrong with it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.picture.model.differences import found_in_place_of
from shardviz.picture.model.holders import ranks_in_words, ranks_of
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.text import cut_at_comma, printable

from ..colors import verdict_style
from ..model.rank_memory import holders_at, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.sides import Cell, Sides

    from ..model.document import Document, TensorEntry
    from ..model.selection import Selection


MOST_HOVERED = 40
"""Characters of the ranks in a tooltip."""

MOST_RANKS = 30
"""Characters of the ranks that are wrong."""

UNKNOWN_WIDTH = 1000


def hovered(sides: Sides, place: Sequence[int], shape: Sequence[int]) -> str:
    """Say in a few words who holds an element, by its index in the holders' shape; a tensor may have fewer dims."""
    cell = sides.at(place)
    lines = [f"[{', '.join(map(str, place[len(place) - len(shape) :]))}]"]
    lines += [f"{title} by {cut_at_comma(named(mask, None), MOST_HOVERED)}" for title, mask in holders_at(sides, cell)]
    return "\n".join(lines) + (f" {WRONG}" if sides.has_held and cell.is_wrong else "")


class Inspector(Static):
    """The ranks that should hold and do hold the element under the cursor; what is wrong with it."""

    _fitting: Callable[[int], Text] | None = None

    def show(self, document: Document, selection: Selection, sides: Sides | None, why: str = "") -> None:
        """Show the element under the cursor, as much as fits."""
        self._fitting = partial(inspector_text, document, selection, sides, why)
        self.on_resize()

    def on_resize(self) -> None:
        """Write as much as fits now."""
        if self._fitting is not None:
            text = self._fitting(self.size.width or UNKNOWN_WIDTH)
            if text != self.content:
                self.update(text, layout=False)


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
    entry, at = document.entries[selection.entry], selection.plane.at
    cell, index = sides.at(at), at[len(at) - len(entry.tensor.shape) :]
    text = _holders(index, sides, cell, entry.tensor.claimed.mesh if entry.tensor.claimed else document.mesh)
    if text.cell_len > width:
        text = _holders(index, sides, cell, None)
    if cell.guilty and not cell.different:
        reasons = "; ".join(_reason(sides, ranks, words) for ranks, words in sides.reasons_at(cell))
        text.append(f"\n{reasons}", verdict_style("error"))
    elif sides.titles == CLAIMED_AND_HELD and (note := _in_its_place(entry, index, cell)):
        text.append(f"\n{note}", "dim")
    return text


def _holders(index: tuple[int, ...], sides: Sides, cell: Cell, mesh: Mesh | None) -> Text:
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"), no_wrap=True, overflow="ellipsis")
    for title, mask in holders_at(sides, cell):
        is_wrong = cell.different and title == sides.titles[1]
        text.append(f"  {title} ", "dim").append(named(mask, mesh), verdict_style("error") if is_wrong else "")
    return text


def _in_its_place(entry: TensorEntry, index: tuple[int, ...], cell: Cell) -> str:
    """Say what a rank holds instead of an element, or that it holds it in another place."""
    wrong = cell.due or cell.astray
    if not wrong:
        return ""
    rank = ranks_of(wrong)[0]
    if index_there := found_in_place_of(entry.tensor, index, rank):
        return f"rank {rank} holds [{', '.join(map(str, index_there))}] instead"
    return "" if cell.due else f"in another place of the shard on {ranks_in_words(ranks_of(wrong), MOST_RANKS)}"


def _reason(sides: Sides, ranks: int, words: str) -> str:
    """Say what is wrong with an element that is on the ranks that should hold it."""
    placed = "; placed as claimed" if sides.is_placed and not ranks & sides.missing else ""
    return f"{ranks_in_words(ranks_of(ranks), MOST_RANKS)}: {words}{placed}"
