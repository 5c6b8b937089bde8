"""`shardviz.show`: a run, a layout, a mesh, a DTensor or a module as a picture, in a notebook or printed.

Nothing here communicates: a DTensor is drawn as its placements claim. Torch is used only for torch's own objects.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.text import Text

    from shardviz.dump.dump import Dump
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.subjects.subject import Subject
    from shardviz.picture.text.terminal import Terminal

    Lines = Callable[[Terminal], list[Text]]
    Picture = tuple[Lines, dict[str, str]]
    """The lines for a terminal, and the MIME types for a notebook."""

_LAYOUT = re.compile(r"\s*[\w.]*\[")
"""How a layout in the notation begins."""


def show(what: object, tensor: str | None = None, *, mesh: Mesh | str | None = None) -> None:
    """Display a picture in a notebook; elsewhere print it, once: only rank 0 prints, whatever ranks call this.

    Args:
        what: What `shardviz.load` gives, a tensor, a report or a finding of it; a dump, or the path of one; a
            `shardviz.Layout`, or one in the notation, `"[12/tp/fsdp, 12]"`; a mesh; a DTensor; or a module, whose
            parameters and buffers are listed.
        tensor: The name of the one tensor to draw, for a run, a dump or a module.
        mesh: The mesh of a layout in the notation, `"fsdp=2,tp=4"`.

    Raises:
        ShardvizError: It is none of these, or the dump or the tensor is not there.
    """
    if _rank() != 0:
        return
    if isinstance(what, str) and _LAYOUT.match(what) and not Path(what).exists():
        what = _layout(what, mesh)
    lines, markup = _of_torch(what, tensor) or _of_plain(what, tensor)
    if "IPython" in sys.modules and _display(lines, markup):
        return
    from shardviz.picture.text.terminal import Terminal

    terminal = Terminal.of(sys.stdout)
    terminal.write(sys.stdout, lines(terminal))
    sys.stdout.flush()


def _layout(text: str, mesh: Mesh | str | None) -> Layout:
    from shardviz.layout.mesh import parse_mesh
    from shardviz.layout.notation import parse

    if mesh is None:
        raise ShardvizError(f"layout {text!r} needs a mesh", f'shardviz.show({text!r}, mesh="fsdp=2,tp=4")')
    return parse(text).layout(parse_mesh(mesh) if isinstance(mesh, str) else mesh)


def _rank() -> int:
    """Return this process's rank: torch's own where a process group is up, otherwise torchrun's."""
    if "torch.distributed" in sys.modules:
        from shardviz.live.showing import rank

        found = rank()
        if found is not None:
            return found
    given = os.environ.get("RANK", "")
    return int(given) if given.isdigit() else 0


def _display(lines: Lines, markup: dict[str, str]) -> bool:
    """Hand a picture to IPython, if this process runs in it: a notebook shows the markup, a terminal the text."""
    from shardviz.picture.text.terminal import Terminal

    if import_module("IPython").get_ipython() is None:
        return False
    terminal = Terminal()
    import_module("IPython.display").display({**markup, "text/plain": terminal.render(lines(terminal))}, raw=True)
    return True


def _of_plain(what: object, tensor: str | None) -> Picture:
    from shardviz.dump.dump import Dump, dump_of
    from shardviz.dump.read import DumpFiles, read_files
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.drawn import Drawn

    if isinstance(what, Drawn):
        drawn = what if tensor is None else what.part(tensor)
        return drawn.lines, dict(drawn.markup()) if "IPython" in sys.modules else {}
    if isinstance(what, Layout):
        from shardviz.picture.model.subjects.subject import of_layout

        return _of_subject(of_layout(what))
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
        from shardviz.dump.find import find_tensors
        from shardviz.picture.model.subjects.subject import of_tensor

        found = find_tensors(dump, pattern)
        if len(found) > 1:
            raise ShardvizError(f"{len(found):,} tensors match {pattern!r}", "name one")
        ((name, tensor),) = found
        return _of_subject(of_tensor(dump, tensor, name))
    from shardviz.check.run import report_on
    from shardviz.picture.drawn import framed
    from shardviz.picture.html.page import html
    from shardviz.picture.text.report import report_lines

    report = report_on(dump)
    page = framed(html(dump, report)) if "IPython" in sys.modules else ""
    return lambda terminal: report_lines(dump, report, terminal), {"text/html": page}


def _of_subject(subject: Subject) -> Picture:
    from shardviz.picture.svg.page import svg
    from shardviz.picture.text.page import page_lines
    from shardviz.picture.text.tables.ranks import rank_lines
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


def _of_torch(what: object, name: str | None) -> Picture | None:
    """Draw a tensor or a module; None for anything else."""
    if "torch" not in sys.modules:
        return None
    from shardviz.live.showing import mesh_of, subject_of, table_of

    mesh = mesh_of(what)
    if mesh is not None:
        return _of_mesh(mesh)
    subject = subject_of(what, name)
    if subject is not None:
        return _of_subject(subject)
    rows = table_of(what)
    return None if rows is None else _of_table(rows)


def _of_table(rows: list[tuple[str, str]]) -> Picture:
    """List names with their layouts, identical layers folded."""
    from shardviz.picture.markup import element, words
    from shardviz.picture.text.tables.table import padded, widest
    from shardviz.picture.text.terminal import line
    from shardviz.text import fold

    folded = [(printable(str(names)), text) for names, text in fold(rows)]
    width = widest(name for name, _ in folded)
    cells = (element("tr", element("td", words(name)), element("td", words(text))) for name, text in folded)
    head = element("tr", element("th", "tensor"), element("th", "layout"))
    table = element("table", head, *cells)
    return lambda _: [line((padded(name, width), "bold"), f"  {text}") for name, text in folded], {"text/html": table}
