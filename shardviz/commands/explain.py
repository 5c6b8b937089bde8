"""Explain a layout, a kind of finding, or a cause.

For a layout: which rank holds what, how torch spells it, and what gathering
costs. Write it in shardviz's notation, "[12/tp/fsdp, 12]", or in torch's,
"(Shard(0), Replicate())" with --shape. With a second layout: how to get there.

For a kind of finding, such as misordered: its causes. For a cause, such as
same-shard: what happens, why nothing raises, and how to fix it. Also for the
words in tables and findings: plain, output, not-checked, =tp, +tp, and for
the order of a dim: "order 0: view(3, 4, 2).transpose(0, 1)".

examples:
  shardviz explain misordered
  shardviz explain same-shard
  shardviz explain "[12/tp/fsdp, 12]" --mesh fsdp=2,tp=4
  shardviz explain "(Shard(0), Replicate())" --shape 12,12 --mesh 2,4
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.dump.costs import elements_text
from shardviz.errors import EXIT_CLEAN, LayoutError, NotationError, ShardvizError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.commands.common.parser import Parser
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.placements import Placement
    from shardviz.picture.text.terminal import Terminal

_CALL = re.compile(r"[\[(\s]*(?!flat\b)[A-Za-z_]+\(")
"""Something called by its name: placements, right or wrong."""

INDENT = 11
MOST_SHAPES = 8


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "layout", metavar="LAYOUT|KIND|CAUSE|WORD", help='"[12/tp/fsdp, 12]", "(Shard(0), Replicate())", or a name'
    )
    parser.add_argument("to", nargs="?", metavar="TO", help="a second layout of the same tensor: how to get there")
    parser.add_argument("--mesh", metavar="MESH", help="fsdp=2,tp=4; a layout needs one")
    parser.add_argument("--shape", metavar="SIZES", help="12,12; for torch's spelling, and for sizes written as *")
    parser.add_argument("--all", action="store_true", help="print every rank, however many there are")
    parser.add_output("FILE", "write to a file; as a picture if it is .svg")


def run(args: argparse.Namespace) -> int:
    """Print the layout, or the page of a kind or a cause.

    Raises:
        ShardvizError: The layout, the mesh or the shape cannot be read, or they do not fit; or nothing has that name.
    """
    from shardviz.commands.common.dumps import refuse_other_files, terminal_for, write_answer, write_markup
    from shardviz.explain.pages import is_name
    from shardviz.layout.mesh import parse_mesh
    from shardviz.picture.model.subject import MAX_DRAWN_RANKS, of_layout

    refuse_other_files(args.output)
    if is_name(args.layout):
        return _print_page(args)
    if args.mesh is None:
        raise ShardvizError(f"layout {args.layout!r} needs the mesh that it is on", _sizes_hint(args.layout))
    mesh = parse_mesh(args.mesh)
    if "=" not in args.mesh and not set(_axes_of(args.layout)) <= set(mesh.axes):
        problem = f"layout {args.layout!r} names axes, and --mesh {args.mesh} doesn't"
        raise LayoutError(problem, _sizes_hint(args.layout))
    if mesh.size > MAX_DRAWN_RANKS:
        raise LayoutError(f"mesh {mesh} has {mesh.size:,} ranks, more than {MAX_DRAWN_RANKS:,}")
    layout, dtype = read_layout(args.layout, mesh, _shape(args.shape))
    if args.output is not None and args.output.suffix.lower() == ".svg":
        if args.to is not None:
            raise LayoutError(
                "an SVG shows one layout, not a route between two", "leave TO out, or write to a .txt file"
            )
        from shardviz.picture.svg.page import svg

        write_markup(svg(of_layout(layout, dtype)), args.output)
        return EXIT_CLEAN
    terminal = terminal_for(args.color, args.output)
    if args.to is not None:
        from shardviz.picture.text.costs import route_lines

        end, _ = read_layout(args.to, mesh, _shape(args.shape) or layout.shape)
        lines = route_lines(layout, end, dtype, terminal)
    else:
        lines = _lines(layout, dtype, terminal, all_ranks=args.all)
    write_answer(lines, terminal, args.output)
    return EXIT_CLEAN


def _axes_of(layout: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[/=+]([A-Za-z_]\w*)", layout)))


def _sizes_hint(layout: str) -> str:
    sizes = ",".join(f"{axis}=2" for axis in _axes_of(layout) or ("fsdp", "tp"))
    return f"name the axes in the order of the mesh, with their sizes, such as --mesh {sizes}"


def _print_page(args: argparse.Namespace) -> int:
    from shardviz.commands.common.dumps import terminal_for, write_answer
    from shardviz.explain.pages import page_of
    from shardviz.picture.text.report import page_lines

    given = [name for name in ("to", "mesh", "shape", "all") if getattr(args, name)]
    if given:
        raise ShardvizError(f"{args.layout!r} is a name, and {given[0]} belongs to a layout", "leave it out")
    terminal = terminal_for(args.color, args.output)
    write_answer(page_lines(page_of(args.layout), terminal), terminal, args.output)
    return EXIT_CLEAN


def read_layout(text: str, mesh: Mesh, shape: tuple[int, ...] | None) -> tuple[Layout, str]:
    """Read a layout in either spelling, and its dtype, float32 unless it is written.

    Raises:
        ShardvizError: The text is not a layout, or it lacks a size.
    """
    from shardviz.layout import notation
    from shardviz.layout.layout import Layout
    from shardviz.layout.placements import are_placements, parse_placements
    from shardviz.layout.region import MAX_DIMS

    if are_placements(text) or _CALL.match(text):
        placements = parse_placements(text, MAX_DIMS if shape is None else len(shape))
        if shape is None:
            raise LayoutError("placements alone do not give the size of the tensor", "add --shape 12,12")
        return Layout.from_placements(mesh, shape, placements), "float32"
    pattern = notation.parse(text)
    if shape is None and None in pattern.sizes and pattern.flat is None:
        raise NotationError(f"layout {text!r} has a * in place of a size", "write the size, or add --shape 12,12")
    return pattern.layout(mesh, shape), pattern.dtype or "float32"


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = text.removeprefix("torch.Size").strip("[]() ").removesuffix(",")
    parts = re.split(r"\s*[,x×]\s*|\s+", sizes) if sizes else []
    if not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise LayoutError(f"shape {text!r} is not a list of sizes", "write it as --shape 12,12")
    return tuple(map(int, parts))


def _lines(layout: Layout, dtype: str, terminal: Terminal, *, all_ranks: bool) -> list[Text]:
    from shardviz.layout import notation
    from shardviz.picture.model.subject import of_layout
    from shardviz.picture.text.page import picture_lines
    from shardviz.picture.text.ranks import rank_lines
    from shardviz.picture.text.terminal import line

    subject = of_layout(layout, dtype)
    return [
        line((notation.write(layout, dtype), "bold"), f"  on mesh {layout.mesh}"),
        line(""),
        *picture_lines(subject, terminal),
        line(""),
        *rank_lines(subject, terminal, all_ranks=all_ranks),
        line(""),
        *_in_torch(layout),
        *_local_shapes(layout),
        *_memory(layout, dtype),
        *_gathering(layout, dtype),
    ]


def _entry(title: str, text: str) -> Text:
    from shardviz.picture.text.terminal import DIM, line

    return line((f"{title:<{INDENT}}", DIM), text)


def _entries(title: str, texts: Sequence[str]) -> list[Text]:
    return [_entry("" if at else title, text) for at, text in enumerate(texts)]


def _in_torch(layout: Layout) -> list[Text]:
    from shardviz.layout.placements import spell

    if layout.flat is not None:
        return [_entry("in torch", _fsdp1(layout))]
    placements = layout.placements()
    if placements is None:
        placements = _other_placements(layout)
    spelled = "torch has no placements for this layout" if placements is None else spell(placements)
    return [_entry("in torch", spelled)]


def _fsdp1(layout: Layout) -> str:
    """Name FSDP1's strategy that holds a parameter so; its flat parameters have no placements."""
    copied = [axis for axis in layout.replicate_axes if layout.mesh.axis_size(axis) > 1]
    strategy = "NO_SHARD" if not layout.split_axes else "HYBRID_SHARD" if copied else "FULL_SHARD"
    where = ", ".join([*copied, *layout.split_axes])
    return f"FSDP1's {strategy} over {where or 'no axis'}: a stretch of a FlatParameter, without placements"


def _other_placements(layout: Layout) -> tuple[Placement, ...] | None:
    """Return torch placements that give every rank the same elements as a layout, or None."""
    from shardviz.check.order.infer import infer_layout

    held = {coord: layout.region(coord) for coord in layout.mesh.coords()}
    same = infer_layout(layout.mesh, layout.shape, held)
    return replace(same, partial=layout.partial).placements() if same is not None else None


def _local_shapes(layout: Layout) -> list[Text]:
    from shardviz.layout.mesh import ranks_by
    from shardviz.picture.model.holders import mask_of
    from shardviz.picture.model.mesh import ranks_label
    from shardviz.picture.model.palette import Coloring

    coloring = Coloring(layout.mesh)
    by_shape = ranks_by((rank, region.shape) for rank, region in layout.regions())
    if len(by_shape) == 1:
        return [_entry("shape", f"{list(next(iter(by_shape)))} on every rank")]
    texts = [
        f"{list(shape)} on {'rank' if len(ranks) == 1 else 'ranks'} {ranks_label(mask_of(ranks), coloring, 40)}"
        for shape, ranks in by_shape.items()
    ]
    shown, left = texts[:MOST_SHAPES], len(texts) - MOST_SHAPES
    return _entries("shape", [*shown, *([f"and {left:,} other shapes"] if left > 0 else [])])


def _memory(layout: Layout, dtype: str) -> list[Text]:
    sizes = [region.size for _, region in layout.regions()]
    whole = math.prod(layout.tensor_shape)
    most, least = (elements_text(size, dtype) for size in (max(sizes), min(sizes)))
    each = most if most == least else f"{least} to {most}"
    return [_entry("memory", f"{each} per rank, {elements_text(whole, dtype)} in total")]


def _gathering(layout: Layout, dtype: str) -> list[Text]:
    from shardviz.layout.routes import gathering, total

    legs, reductions = gathering(layout), dict(layout.partial)
    if not legs:
        return [_entry("gathering", "nothing to do: every rank holds the whole tensor")]
    texts = []
    for leg in legs:
        op = f" ({reductions[leg.axis]})" if leg.axis in reductions else ""
        texts.append(
            f"{leg.collective} over {leg.axis}{op}: each rank receives up to {elements_text(leg.received, dtype)}"
        )
    if len(legs) > 1:
        texts.append(f"in this order; together each rank receives up to {elements_text(total(legs), dtype)}")
    return _entries("gathering", texts)
