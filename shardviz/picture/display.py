"""Pictures of a run, dump, layout, mesh or table of layouts, shown in a notebook or printed."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.picture.markup import element, words
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.text import Text

    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.subject import Subject
    from shardviz.picture.text.terminal import Terminal

    Lines = Callable[[Terminal], list[Text]]
    Picture = tuple[Lines, dict[str, str]]
    """The lines for a terminal, and the MIME types for a notebook."""

MOST_LINES = 60
"""Lines that a terminal shows of something that is only named at a prompt; `shardviz.show` prints all."""

HTML, SVG = "text/html", "image/svg+xml"

_FRAME = '<iframe srcdoc="{}" style="width:100%;height:{}px;border:0" title="shardviz"></iframe>'


def display(picture: Picture) -> None:
    """Show a picture: as markup in a notebook, as text in IPython's terminal, else printed."""
    lines, markup = picture
    if "IPython" in sys.modules and _in_notebook(lines, markup):
        return
    from shardviz.picture.text.terminal import Terminal

    terminal = Terminal.of(sys.stdout)
    terminal.write(sys.stdout, lines(terminal))
    sys.stdout.flush()


def _in_notebook(lines: Lines, markup: dict[str, str]) -> bool:
    """Give a picture to IPython if this process runs in it; return whether it does."""
    from shardviz.picture.text.terminal import Terminal

    if import_module("IPython").get_ipython() is None:
        return False
    terminal = Terminal()
    import_module("IPython.display").display({**markup, "text/plain": terminal.render(lines(terminal))}, raw=True)
    return True


def picture_of(what: object, tensor: str | None = None) -> Picture:
    """Draw what `shardviz.load` returns, a dump or its path, one tensor of it, a layout, a mesh.

    Raises:
        ShardvizError: It is none of these, or the dump or the tensor is not there.
    """
    from shardviz.dump.dump import Dump, dump_of
    from shardviz.dump.read import DumpFiles, read_files
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

    if isinstance(what, Drawable):
        drawn = what if tensor is None else what.part(tensor)
        return drawn.lines, dict(drawn.markup()) if "IPython" in sys.modules else {}
    if isinstance(what, Layout):
        from shardviz.picture.model.subject import of_layout

        return of_subject(of_layout(what))
    if isinstance(what, Mesh):
        return _of_mesh(what)
    if isinstance(what, (str, Path)):
        what = read_files(Path(what), strict=False)
    if isinstance(what, DumpFiles):
        what = dump_of(what)
    if isinstance(what, Dump):
        return _of_model(what, tensor)
    raise ShardvizError(
        f"shardviz.show cannot draw a {type(what).__name__}",
        "give it a run of shardviz.load, a dump or its path, a layout, a mesh, a DTensor or a module",
    )


def _of_model(dump: Dump, pattern: str | None) -> Picture:
    """Draw one tensor of a dump, or the whole of it."""
    if pattern is not None:
        from shardviz.dump.dump import find_tensors
        from shardviz.picture.model.subject import of_tensor

        tensors = find_tensors(dump, pattern)
        if len(tensors) > 1:
            raise ShardvizError(f"{len(tensors):,} tensors match {pattern!r}", "name one")
        ((name, tensor),) = tensors
        return of_subject(of_tensor(dump, tensor, name))
    from shardviz.check.run import report_on
    from shardviz.picture.html.page import html
    from shardviz.picture.text.report import report_lines

    report = report_on(dump)
    page = framed(html(dump, report)) if "IPython" in sys.modules else ""
    return lambda terminal: report_lines(dump, report, terminal), {"text/html": page}


def of_subject(subject: Subject) -> Picture:
    """Draw one tensor."""
    from shardviz.picture.svg.page import svg
    from shardviz.picture.text.page import page_lines
    from shardviz.picture.text.ranks import rank_lines
    from shardviz.picture.text.terminal import line

    def lines(terminal: Terminal) -> list[Text]:
        return [*page_lines(subject, terminal), line(""), *rank_lines(subject, terminal)]

    return lines, {"image/svg+xml": svg(subject)}


def _of_mesh(mesh: Mesh) -> Picture:
    from shardviz.picture.svg.page import mesh_figure
    from shardviz.picture.text.meshes import mesh_lines
    from shardviz.picture.text.terminal import line

    def lines(terminal: Terminal) -> list[Text]:
        return [line((f"mesh {mesh}", "bold")), *mesh_lines(mesh, terminal.width, terminal.glyphs)]

    return lines, {"image/svg+xml": mesh_figure(mesh, style=True)}


def of_table(rows: list[tuple[str, str]]) -> Picture:
    """List names with their layouts, identical layers folded."""
    from shardviz.picture.markup import element, words
    from shardviz.picture.text.terminal import line, pad, widest
    from shardviz.text import fold

    folded = [(printable(str(names)), text) for names, text in fold(rows)]
    width = widest(name for name, _ in folded)
    cells = (element("tr", element("td", words(name)), element("td", words(text))) for name, text in folded)
    head = element("tr", element("th", "tensor"), element("th", "layout"))
    table = element("table", head, *cells)
    return lambda _: [line((pad(name, width), "bold"), f"  {text}") for name, text in folded], {"text/html": table}


def framed(page: str, height: int = 640) -> str:
    """Put a page into an iframe, which keeps its style and the notebook's apart."""
    return _FRAME.format(escape(page), height)


class Drawable(ABC):
    """Something with a picture; IPython and Jupyter call its `_repr_` methods."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is, in a line."""

    @abstractmethod
    def lines(self, terminal: Terminal) -> list[Text]:
        """Return its picture as text."""

    @abstractmethod
    def markup(self) -> Mapping[str, str]:
        """Return its picture for a notebook, by MIME type."""

    def part(self, name: str) -> Drawable:
        """Return the part that has a name.

        Raises:
            ShardvizError: It has no such part.
        """
        raise ShardvizError(f"{self!r} has no tensors by name", "leave the name out")

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        try:
            return next(iter(self.markup().values()))
        except ShardvizError as error:
            return element("pre", words(error.message))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print its text at a prompt, and one line for it within a list or a dictionary."""
        if cycle or len(printer.stack) > 1:
            printer.text(repr(self))
            return
        from shardviz.picture.text.terminal import PIPE_WIDTH, Terminal

        terminal = Terminal(PIPE_WIDTH)
        lines = self.lines(terminal)
        text = terminal.render(lines[:MOST_LINES]).rstrip("\n")
        printer.text(text)
        if (more := len(lines) - MOST_LINES) > 0:
            printer.text(f"\n{terminal.glyphs.more} {more:,} more lines: shardviz.show prints them")
