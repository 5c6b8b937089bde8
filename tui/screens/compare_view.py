"""Two dumps side by side, or a job beside a checkpoint: the same tensor on both maps, with one cursor and one zoom."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.text import Text
from textual import on
from textual.containers import Horizontal
from textual.widgets import Static

from shardviz.picture.model.palette import GREY, VERMILLION
from shardviz.picture.text.terminal import pad

from ..colors import ink
from ..keys import keys
from ..model.names import fitted
from ..model.selection import Picked, Zoomed, of_entry
from ..widgets.frame import Box, ScrollBox
from ..widgets.grid import Lines
from ..widgets.tensor_map import TensorMap
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from shardviz.picture.model.holders import Plane

    from ..app import ShardvizApp
    from ..model.document import Document
    from ..model.pairs import Comparison, Pair
    from ..model.selection import Selection


class CompareView(View["Document"]):
    """The tensors of two sides in a list, the maps of the chosen one, and of a checkpoint what ranks hold in words."""

    NAME = "compare"
    TITLE = "Compare"
    TOOLTIP = "Both sides of a comparison"
    FOCUS = "#pairs"
    HELP = """\
## Two sides

The tensors of two dumps, or of a job and a checkpoint, different ones first. The maps below share one cursor and one
zoom: to move on one is to move on the other.

Of a checkpoint, the left map has the ranks that claim each part, and the right one the numbers of the files that have
it. `✗` is where a rank holds something else than the checkpoint has; below is what, and the bytes of the file that have
what it claims.
"""

    BINDINGS = keys("compare", [("v", "next_side", "Claimed/held", "Show claimed, held, or their difference")])

    _of: Comparison | None = None
    _plane: Plane | None = None
    """What is drawn of a pair that has a plane of its own: one side may lack the tensor."""

    def compose(self) -> ComposeResult:
        """Put the pairs above, a map for each side below them under a line for its layout, and the words last."""
        with Box(id="pairs-box") as box:
            box.set_titles("comparing …")
            yield Lines(id="pairs")
        with Horizontal(id="both"):
            for name in ("here", "there"):
                with Box(id=f"{name}-box"):
                    yield Static("", id=f"{name}-layout", classes="legend", markup=False)
                    yield TensorMap(id=name)
        with ScrollBox(id="words-box") as box:
            box.display = False
            yield Static(id="words")

    def on_mount(self) -> None:
        """Follow the comparison too."""
        super().on_mount()
        self.watch(self.app, "compared", self.show_again, init=False)

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the pair of the chosen tensor."""
        comparison, lines = cast("ShardvizApp", self.app).compared, self.query_one("#pairs", Lines)
        if document is None or comparison is None:
            return
        pairs = comparison.pairs
        if self._of is not comparison:
            self._of, self._plane = comparison, None
            self.query_one("#pairs-box", Box).set_titles(comparison.legend, comparison.summary)
            first = pairs[0] if pairs else None
            if self.display and first and first.sign == "≠" and first.here not in (None, selection.entry):
                self.state.selection = of_entry(document, selection, first.here or 0)
                return
        cursor = lines.cursor
        if cursor < len(pairs) and pairs[cursor].here not in (None, selection.entry):
            cursor = next((at for at, pair in enumerate(pairs) if pair.here == selection.entry), cursor)
        lines.show(len(pairs), lambda at: pair_text(pairs[at]), cursor)
        if pairs:
            self._show_pair(comparison, pairs[lines.cursor])

    def _show_pair(self, comparison: Comparison, pair: Pair) -> None:
        """Show both maps of a pair, and what became of it."""
        self._show_maps(comparison, pair)
        self.query_one("#words-box").display = comparison.words is not None
        if comparison.words is not None:
            self.query_one("#words", Static).update(comparison.words(pair, max(self.room.width - 4, 40)))

    def _show_maps(self, comparison: Comparison, pair: Pair) -> None:
        selection = self.state.selection
        side, plane = selection.side, selection.plane
        if comparison.plane is not None:
            self._plane = plane = self._plane or comparison.plane(pair)
            side = "claimed"
        for name, drawn in zip(("here", "there"), comparison.maps(pair, side), strict=True):
            self.query_one(f"#{name}-box", Box).set_titles(drawn.title, drawn.subtitle)
            layout, tensor_map = self.query_one(f"#{name}-layout", Static), self.query_one(f"#{name}", TensorMap)
            layout.update(drawn.layout, layout=False)
            layout.display = bool(drawn.layout)
            shape = drawn.sides.holders.shape if drawn.sides is not None and plane is not None else ()
            at = plane.at if plane is not None else ()
            fits = bool(shape) and len(shape) == len(at) and all(map(int.__lt__, at, shape))
            tensor_map.show(drawn.sides if fits else None, side, plane)
            tensor_map.describe = drawn.describe

    @property
    def _pair(self) -> Pair | None:
        """The pair under the cursor."""
        cursor = self.query_one("#pairs", Lines).cursor
        return self._of.pairs[cursor] if self._of is not None and cursor < len(self._of.pairs) else None

    def picture(self) -> str:
        """Draw the chosen tensor as `shardviz diff JOB CHECKPOINT TENSOR -o FILE.svg` does; empty for two dumps.

        Raises:
            ShardvizError: It cannot be drawn.
        """
        drawn = self._of.picture if self._of is not None else None
        return drawn(self._pair) if drawn is not None and self._pair is not None else ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A checkpoint has one side, and so has the job beside it."""
        return action != "next_side" or self._of is None or self._of.plane is None

    @on(Lines.Highlighted)
    def _highlighted(self) -> None:
        pair, document, selection = self._pair, self.state.document, self.state.selection
        self._plane = None
        if document is not None and pair is not None and pair.here not in (None, selection.entry):
            self.state.selection = of_entry(document, selection, pair.here or 0)
        elif self._of is not None and pair is not None:
            self._show_pair(self._of, pair)

    @on(Zoomed)
    def _zoomed(self, message: Zoomed) -> None:
        for tensor_map in self.query(TensorMap):
            tensor_map.zoom_to(message.level)

    @on(Picked)
    def _moved(self, message: Picked) -> None:
        """Move on both maps of a pair that has a plane of its own."""
        if self._plane is not None and message.plane is not None and self._of is not None and self._pair is not None:
            message.stop()
            self._plane = message.plane
            self._show_maps(self._of, self._pair)


def pair_text(pair: Pair) -> Text:
    """Write a line of the list: how a pair compares as a sign, its name, and what differs."""
    style = ink(GREY if pair.sign in "=?" else VERMILLION, bold=True)
    name = pad(fitted(pair.title), 32) + "  "
    return Text.assemble((f" {pair.sign} ", style), name, (pair.what, "dim"), no_wrap=True)
