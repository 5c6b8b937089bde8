"""A job beside a checkpoint: which rank claims which part of a tensor, which file has it, wrong parts marked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on
from textual.widgets import Static

from shardviz.checkpoint.comparing.outcome import notable
from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import ranks_in_words, ranks_of
from shardviz.picture.model.palette import WRONG
from shardviz.picture.text.checkpoint import why_text
from shardviz.picture.text.tables.exhibit import exhibit_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.text import printable

from ..model.messages import PlaceChosen, PlaneTurned
from ..model.pairs import plane_of
from ..model.selection import next_plane, of_entry
from ..widgets.box import Box, ScrollBox
from ..widgets.grid import Lines
from ..widgets.tensor_map import TensorMap
from .compare_view import PairsView, is_inside, pair_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult

    from shardviz.picture.model.holders import Plane
    from shardviz.picture.model.subjects.beside import Beside, Marked

    from ..model.document import Document
    from ..model.pairs import Compared, Line
    from ..model.selection import Selection


MOST_RANKS = 40
"""Characters of the ranks in a tooltip."""

LEGEND = "Tensors: ≠ different  < job only  > checkpoint only  = equal  ? not compared"


class BesideLines(Lines):
    """The list of the tensors of a job and a checkpoint."""

    HELP = """\
## A job beside a checkpoint

The tensors of both, different ones first. The left map has the ranks that claim each part, the right one the numbers of
the files that have it. `✗` is where a rank holds something else than the checkpoint has; below is what, and the bytes
of the file that have what it claims.
"""


class BesideView(PairsView):
    """The tensors of a job and a checkpoint, the maps of the chosen one, and what ranks hold in words."""

    NAME = "beside"
    TITLE = "Compare"
    TOOLTIP = "The job beside the checkpoint"
    FOCUS = "#pairs"
    LINES = BesideLines

    _plane: Plane | None = None
    _of: Compared | None = None

    def compose(self) -> ComposeResult:
        """Put the words at the bottom."""
        yield from super().compose()
        with ScrollBox(id="beside-box"):
            yield Static(id="beside-said")

    def on_mount(self) -> None:
        """Follow the comparison too."""
        super().on_mount()
        self.watch(self.app, "compared", self.show_again, init=False)

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the lines, and the chosen one's maps."""
        compared = self.state.compared
        if compared is None:
            return
        lines = self.query_one("#pairs", Lines)
        at = lines.cursor if self._of is compared else 0
        if self._of is not compared:
            self._of = compared
            self.query_one("#pairs-box", Box).set_titles(LEGEND, notable(compared.comparison))
        elif at < len(compared.lines) and compared.lines[at].entry not in (None, selection.entry):
            at = next((index for index, line in enumerate(compared.lines) if line.entry == selection.entry), at)
        lines.show(len(compared.lines), self._line, at)
        if compared.lines:
            self._show_line(compared, compared.lines[at])

    def picture(self) -> str:
        """Draw the chosen tensor as `shardviz diff JOB CHECKPOINT TENSOR -o FILE.svg` does.

        Raises:
            ShardvizError: It cannot be drawn.
        """
        from shardviz.picture.svg.stored import beside_svg

        compared, at = self.state.compared, self.query_one("#pairs", Lines).cursor
        if compared is None or not compared.lines:
            raise ShardvizError("the job is not compared yet")
        return beside_svg(compared.drawn(compared.lines[at])[0])

    def _line(self, index: int) -> Text:
        assert self._of is not None, "it has lines"
        line = self._of.lines[index]
        return pair_text(line.sign, printable(str(line.names)), line.outcome.verdict)

    def _show_line(self, compared: Compared, line: Line) -> None:
        try:
            picture, turned = compared.drawn(line)
        except ShardvizError as error:
            self._show_maps(None, None, None)
            self.query_one("#beside-said", Static).update(Text(f"? not drawn: {printable(error.message)}"))
            return
        sides = picture.sides
        if sides is None or self._plane is None or not is_inside(self._plane, sides.holders):
            self._plane = plane_of(sides, picture.shape) if sides is not None else None
        self._show_maps(picture, turned, self._plane)
        self.query_one("#beside-said", Static).update(_said(picture, max(self.room.width - 4, 40)))

    def _show_maps(self, picture: Beside | None, turned: Marked | None, plane: Plane | None) -> None:
        sides = picture.sides if picture is not None else None
        for name, marked in (("here", sides), ("there", turned)):
            drawn = marked if marked is not None and marked.has_claimed else None
            shown = self.query_one(f"#{name}", TensorMap)
            self.query_one(f"#{name}-box", Box).set_titles(marked.titles[0] if marked is not None else "")
            shown.show(drawn, "claimed", plane if drawn is not None else None)
            shown.describe = _describing(picture) if picture is not None else None

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        compared, document = self.state.compared, self.state.document
        if compared is None or document is None:
            return
        self._plane = None
        line = compared.lines[message.index]
        if line.entry is not None and line.entry != self.state.selection.entry:
            self.state.selection = of_entry(document, self.state.selection, line.entry)
        else:
            self._show_line(compared, line)

    @on(PlaceChosen)
    def _moved(self, message: PlaceChosen) -> None:
        """Move on both maps: they have planes of their own, also of tensors that the job lacks."""
        message.prevent_default()
        if self._plane is not None:
            self._plane = replace(self._plane, at=message.place)
            for shown in self.query(TensorMap):
                shown.show(shown.sides, "claimed", self._plane if shown.sides is not None else None)

    @on(PlaneTurned)
    def _turned(self, message: PlaneTurned) -> None:
        message.prevent_default()
        if self._plane is not None:
            self._plane = next_plane(self._plane)
            self.show_again()


def _describing(picture: Beside) -> Callable[[tuple[int, ...]], str]:
    """Return the mouse's tooltip: who claims an element, and which file has it."""

    def described(place: tuple[int, ...]) -> str:
        assert picture.sides is not None, "there is a map"
        cell = picture.sides.at(place)
        index = place[len(place) - len(picture.shape) :]
        lines = [f"[{', '.join(map(str, index))}]{f' {WRONG}' if cell.different else ''}"]
        lines += [f"claimed by {ranks_in_words(ranks_of(cell.claimed), MOST_RANKS)}"] if cell.claimed else []
        files = picture.stored.files if picture.stored is not None else {}
        lines += [f"in {printable(files[at])}" for at in ranks_of(cell.held) if at in files]
        return "\n".join(lines)

    return described


def _said(picture: Beside, width: int) -> Text:
    """Write what became of a tensor, and what ranks hold."""
    outcome = picture.outcome
    texts = [
        why_text(outcome) or outcome.verdict,
        *([picture.why] if picture.why and picture.why != outcome.why else []),
    ]
    texts += [f"{title:<6} {text}" for title, text in (("fix", outcome.fix), ("cause", outcome.cause)) if text]
    lines = [Text(printable(text)) for text in texts]
    lines += exhibit_lines(picture.exhibit, Terminal(width=width)) if picture.exhibit is not None else []
    return Text("\n").join(lines)
