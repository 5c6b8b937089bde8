"""Try the installed torch on DTensors, and report wrong results.

Exits with 1 if torch and the placements disagree, and prints a script in plain
torch for each class of disagreement.

examples:
  shardviz audit
  shardviz audit --mesh 2 --max-size 4
  shardviz audit --mesh 2,2 --max-size 8 -o repros
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from shardviz.commands.common.streams import reader_may_leave, write_file
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, ShardvizError
from shardviz.layout.mesh import Mesh, parse_mesh, unnamed_axes
from shardviz.text import counted

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from shardviz.commands.common.parser import Parser
    from shardviz.live.audit.sweep import Audit, Disagreement

AXES = ("pp", "replicate", "fsdp", "tp")
MAX_SIZE = 64


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--mesh", default="2,2", help="the mesh to try on; default: 2,2")
    parser.add_argument(
        "--max-size", type=int, default=6, metavar="N", help="elements of the longest vector to try; default: 6"
    )
    parser.add_output("DIR", "write a script for each class to a folder")
    parser.add_format("text", "json")


def run(args: argparse.Namespace) -> int:
    """Sweep, and print each class of disagreement once with its smallest case and a repro.

    Returns:
        0 if torch and the oracle agree in every case, 1 if they do not.
    """
    from shardviz.commands.common.streams import Count, progress
    from shardviz.live.audit.sweep import audit

    if not 1 <= args.max_size <= MAX_SIZE:
        raise ShardvizError(f"--max-size is {args.max_size}, expected 1 to {MAX_SIZE}")
    mesh = mesh_of(args.mesh)
    if args.output:
        _make_folder(args.output)
    count = Count("tried {done} of {of} cases on " + f"{mesh.size} ranks")
    with progress(lambda: str(count) if count.of else f"trying the first cases on {mesh.size} ranks"):
        sweep = audit(mesh, args.max_size, on_progress=count)
    if args.output:
        _write_repros(sweep, args.output)
    with reader_may_leave():
        print(json.dumps(_as_json(sweep), indent=1) if args.format == "json" else as_text(sweep, args.output))
    return EXIT_FINDINGS if sweep.num_wrong else EXIT_CLEAN


def mesh_of(text: str) -> Mesh:
    """Read the mesh to try; axes without names are called as in training."""
    mesh = parse_mesh(text)
    unnamed = mesh.axes == unnamed_axes(mesh.ndim) and mesh.ndim <= len(AXES)
    return replace(mesh, axes=AXES[-mesh.ndim :]) if unnamed else mesh


def _make_folder(folder: Path) -> None:
    """Make the folder for scripts: a sweep takes a minute, and would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ShardvizError(f"cannot write to {folder}: {error.strerror}", "choose another folder with -o") from error


def _write_repros(sweep: Audit, folder: Path) -> None:
    from shardviz.live.audit.cases import repro

    for number, disagreement in enumerate(sweep.disagreements, 1):
        name = _name(number, disagreement)
        write_file(repro(disagreement.case, name), folder / name)
        print(f"wrote {folder / name}", file=sys.stderr)


def _name(number: int, disagreement: Disagreement) -> str:
    return f"{number:02d}_{disagreement.case.operation}.py"


def as_text(sweep: Audit, folder: Path | None = None) -> str:
    """Write out every class of disagreement with its smallest case, and the first repro.

    Args:
        folder: Where the repros were written; they are named then, and not written out.
    """
    from shardviz.versions import package_version

    lines = [f"torch {package_version('torch')}: {sweep.num_cases:,} cases tried, {sweep.num_wrong:,} wrong"]
    if sweep.not_tried:
        lines.append(f"not tried: {sweep.not_tried:,} cases, because too many worlds died")
    for number, disagreement in enumerate(sweep.disagreements, 1):
        lines += [
            "",
            f"{number}. {disagreement.case}",
            f"   {counted(disagreement.count, 'case')} of this class; the smallest:",
        ]
        lines += [f"   {line}" for line in _differences(disagreement)]
        lines += [f"   to see it: python {folder / _name(number, disagreement)}"] if folder is not None else []
    if folder is None and sweep.disagreements:
        lines += _first_repro(sweep.disagreements)
    return "\n".join(lines)


def _first_repro(disagreements: list[Disagreement]) -> list[str]:
    from shardviz.live.audit.cases import repro

    lines = ["", "# 1 alone, in plain torch:", repro(disagreements[0].case, _name(1, disagreements[0])).rstrip()]
    return (
        [*lines, "", f"# {len(disagreements) - 1} more: -o DIR writes them to files"]
        if len(disagreements) > 1
        else lines
    )


def _differences(disagreement: Disagreement) -> list[str]:
    if disagreement.case.function:
        return [*dict.fromkeys(map(str, disagreement.got.values()))]
    return [
        f"rank {rank}: wanted {disagreement.case.wanted_ids(rank)}, got {got}"
        for rank, got in sorted(disagreement.got.items())
    ]


def _as_json(sweep: Audit) -> dict[str, Any]:
    from shardviz.live.audit.cases import repro

    return {
        "schema": 1,
        "num_cases": sweep.num_cases,
        "num_wrong": sweep.num_wrong,
        "not_tried": sweep.not_tried,
        "disagreements": [
            {
                "case": str(disagreement.case),
                "operation": disagreement.case.operation,
                "num_cases": disagreement.count,
                "got": {str(rank): got for rank, got in sorted(disagreement.got.items())},
                "repro": repro(disagreement.case, _name(number, disagreement)),
            }
            for number, disagreement in enumerate(sweep.disagreements, 1)
        ],
    }
