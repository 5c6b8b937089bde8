"""Draw a mesh: ranks, coordinates, and the groups along each axis.

examples:
  shardviz mesh fsdp=2,tp=4
  shardviz mesh 2,4 --axes fsdp,tp
  shardviz mesh pp=2,fsdp=2,tp=4 --all
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN
from shardviz.text import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.text.terminal import Terminal

MOST_LINES = 16
"""Lines of each list, unless all are asked for."""

MOST_NUMBERS = 8
"""Ranks of a group that are written out, unless all are asked for."""


USUAL_AXES = ("dp", "tp", "pp", "cp", "ep", "fsdp", "pods", "nodes")
"""Names for an example."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("mesh", metavar="MESH", help="sizes of the axes, outermost first: 2,4 or fsdp=2,tp=4")
    parser.add_argument("--axes", metavar="NAMES", help="names for sizes without one: fsdp,tp")
    parser.add_argument("--all", action="store_true", help="print every line, however many there are")


def run(args: argparse.Namespace) -> int:
    """Print the mesh.

    Raises:
        MeshError: The sizes or names do not make a mesh.
    """
    from shardviz.commands.common.dumps import terminal_for, write_answer
    from shardviz.layout.mesh import parse_mesh

    mesh = parse_mesh(args.mesh)
    if args.axes is not None:
        mesh = _with_axis_names(mesh, [name.strip() for name in args.axes.split(",")])
    terminal = terminal_for(args.color)
    write_answer(_lines(mesh, terminal, None if args.all else MOST_LINES), terminal)
    return EXIT_CLEAN


def _with_axis_names(mesh: Mesh, names: Sequence[str]) -> Mesh:
    """Name the axes of a mesh that was written as sizes alone."""
    from shardviz.errors import MeshError
    from shardviz.layout.mesh import unnamed_axes

    if mesh.axes != unnamed_axes(mesh.ndim):
        raise MeshError(f"mesh {mesh} already has names", "leave --axes out")
    if len(names) != mesh.ndim:
        usual = [name for name in USUAL_AXES if name not in names]
        example = ",".join([*names, *usual][: mesh.ndim])
        raise MeshError(
            f"--axes has {counted(len(names), 'name')} for {counted(mesh.ndim, 'size')}: {', '.join(names)}",
            f"name each axis, as in --axes {example}",
        )
    return replace(mesh, axes=tuple(names))


def _lines(mesh: Mesh, terminal: Terminal, most: int | None) -> list[Text]:
    from shardviz.picture.text.meshes import mesh_lines
    from shardviz.picture.text.terminal import line

    ranks = f"  {counted(mesh.size, 'rank')}"
    lines = [line((f"mesh {mesh}", "bold"), ranks), *mesh_lines(mesh, terminal.width, terminal.glyphs)]
    wide = len(str(max(mesh.ranks)))
    coords = [f"  rank {rank:>{wide}}  {mesh.label(rank)}" for rank in mesh.ranks[:most]]
    lines += [
        line(""),
        line(("coordinates", "bold")),
        *map(line, coords),
        *_more_text(mesh.size - len(coords), terminal),
    ]
    for axis in mesh.axes:
        num_groups = mesh.size // mesh.axis_size(axis)
        groups = mesh.groups(axis) if most is None else _first_groups(mesh, axis, most)
        shown = [line(f"  {_group(group, most is None)}") for group in groups]
        title = f"{counted(num_groups, 'group')} along {axis}"
        lines += [line(""), line((title, "bold")), *shown, *_more_text(num_groups - len(shown), terminal)]
    return lines


def _first_groups(mesh: Mesh, axis: str, most: int) -> list[tuple[int, ...]]:
    """Return the groups that come first along an axis: a large mesh has half a million."""
    places = product(*(range(1 if other == axis else size) for other, size in zip(mesh.axes, mesh.shape, strict=True)))
    return [mesh.group_of(mesh.rank_at(place), axis) for place in islice(places, most)]


def _group(ranks: Sequence[int], whole: bool) -> str:
    if whole or len(ranks) <= MOST_NUMBERS + 2:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:MOST_NUMBERS]))}, ... {ranks[-1]}  ({len(ranks):,} ranks)"


def _more_text(count: int, terminal: Terminal) -> list[Text]:
    from shardviz.picture.text.terminal import DIM, line

    return [line((f"  {terminal.glyphs.more} {count:,} more: --all prints them", DIM))] if count else []
