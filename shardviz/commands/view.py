"""Walk through a dump in the terminal.

If stdout is not a terminal, prints what `show` prints, or for two dumps what
`diff` prints. Reads files again when they change. With --watch, DUMP is a
probe's file, and the probe runs again each time the file is saved.

examples:
  shardviz view tp_fsdp-2x4.shardviz
  shardviz view tp_fsdp-2x4.shardviz up.weight --rank 3
  shardviz view before.shardviz after.shardviz
  shardviz view checkpoints/step-1000
  shardviz view job.shardviz checkpoints/step-1000
  shardviz view path/to/my_model.py --mesh 2,4 --watch
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN, ShardvizError

if TYPE_CHECKING:
    import argparse


PORT = 8000
HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "dump", type=Path, metavar="DUMP", help="a dump's folder, a checkpoint, or with --watch a probe"
    )
    parser.add_argument("--watch", action="store_true", help="DUMP is a probe: run it again whenever it is saved")
    parser.add_argument("--mesh", help="for --watch: sizes of the mesh axes; default: the probe's own")
    parser.add_argument(
        "other",
        metavar="OTHER",
        nargs="?",
        help="a second dump or a checkpoint, to compare side by side; or the tensor to open on",
    )
    parser.add_argument("--rank", type=int, metavar="N", help="the rank to open on")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--print", action="store_true", help="print what `show` prints, also on a terminal")
    how.add_argument("--web", action="store_true", help="serve it to a browser on this machine; needs textual-serve")
    parser.add_argument("--port", type=int, help=f"where --web listens; default: {PORT}")
    parser.add_argument("--host", help=f"where --web listens; default: {HOST}, this machine only")


def run(args: argparse.Namespace) -> int:
    """Open the TUI, serve it, or print the dump's tensors into a pipe.

    Raises:
        ShardvizError: An address is given for a server that was not asked for.
    """
    from shardviz.commands.common.dumps import naming_checkpoints

    if not args.web and (args.port is not None or args.host is not None):
        option = "--host" if args.port is None else "--port"
        raise ShardvizError(
            f"{option} sets where --web listens, and --web is not given", f"add --web, or leave {option} out"
        )
    if args.watch or args.mesh is not None:
        _watch(args)
        return EXIT_CLEAN
    other, tensor = _second(args.other)
    _check_rank(args.rank, args.dump, other, is_seen=args.web or (not args.print and _on_a_screen()))
    with naming_checkpoints(*filter(None, (args.dump, other))):
        _open(args, other, tensor)
    return EXIT_CLEAN


def _open(args: argparse.Namespace, other: Path | None, tensor: str | None) -> None:
    """Serve the TUI, open it, or print."""
    from shardviz.checkpoint.open import is_checkpoint

    # Not import statements: mypy knows the TUI as `tui`, where its files are.
    if args.web:
        where = {"host": args.host or HOST, "port": args.port or PORT}
        import_module("shardviz.tui.web").serve(args.dump, other, tensor=tensor, rank=args.rank, **where)
    elif _only_traces(args.dump, other):
        _print(args.dump, other, tensor, args.color)
    elif not args.print and _on_a_screen() and not _all_checkpoints(args.dump, other):
        dump, beside = (other, args.dump) if other is not None and is_checkpoint(args.dump) else (args.dump, other)
        import_module("shardviz.tui.app").view(dump, other=beside, tensor=tensor, rank=args.rank)
    elif not args.print and _on_a_screen() and other is None and is_checkpoint(args.dump):
        import_module("shardviz.tui.app").view_checkpoint(args.dump, tensor=tensor)
    else:
        _print(args.dump, other, tensor, args.color)


def _only_traces(dump: Path, other: Path | None) -> bool:
    """Whether nothing but traced steps is given: the viewer shows tensors."""
    from shardviz.dump.read import read_files
    from shardviz.dump.write import TRACE_FOLDER

    return all(
        (path / TRACE_FOLDER).is_dir() and not any(record.tensors for record in read_files(path).ranks.values())
        for path in filter(None, (dump, other))
    )


def _all_checkpoints(dump: Path, other: Path | None) -> bool:
    from shardviz.checkpoint.open import is_checkpoint

    return all(map(is_checkpoint, filter(None, (dump, other))))


def _watch(args: argparse.Namespace) -> None:
    """Open the TUI on the dump of a probe that is run again and again.

    Raises:
        ShardvizError: It is not a probe, or nobody looks.
    """
    if not args.watch:
        raise ShardvizError("--mesh is for the probe that --watch runs", "add --watch, or leave --mesh out")
    if args.dump.is_dir():
        raise ShardvizError(
            f"{args.dump} is a folder: --watch runs a probe",
            f"shardviz view {args.dump} reads it again whenever it changes",
        )
    if args.other is not None or args.rank is not None or args.web or args.print or not _on_a_screen():
        raise ShardvizError("--watch shows one probe, in this terminal", f"shardviz probe {args.dump} --watch prints")
    from shardviz.commands.common.watching import probing
    from shardviz.commands.probe import wanted

    args.probe, args.output = str(args.dump), None
    _, mesh, folder = wanted(args)
    sizes = ",".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    with probing(args.probe, sizes, folder) as beside:
        beside.wait()
        import_module("shardviz.tui.app").view(folder, started=beside.follow)


def _second(text: str | None) -> tuple[Path | None, str | None]:
    """Return the second dump or the tensor that a text names."""
    if text is None:
        return None, None
    is_path = os.path.exists(text) or os.sep in text or text.endswith(".shardviz")
    return (Path(text), None) if is_path else (None, text)


def _check_rank(rank: int | None, dump: Path, other: Path | None, *, is_seen: bool) -> None:
    """Refuse a rank if nothing opens on one."""
    from shardviz.checkpoint.open import is_checkpoint

    if rank is None:
        return
    if is_checkpoint(dump):
        raise ShardvizError(f"--rank {rank}: a checkpoint has no ranks", "leave --rank out")
    if other is not None:
        raise ShardvizError(f"--rank {rank} opens one dump, and two are given", "give one dump, or leave --rank out")
    if not is_seen:
        raise ShardvizError(f"--rank {rank} opens the viewer, and stdout is not a terminal", "leave --rank out")


def _print(dump: Path, other: Path | None, tensor: str | None, color: str) -> None:
    """Print what `show` prints of a dump or of one tensor, and `diff` of two dumps."""
    if other is None:
        from shardviz.commands.show import show

        show(dump, tensor, color)
    else:
        from shardviz.commands.common.checkpoints import diff_checkpoints, kinds_of
        from shardviz.commands.diff import compared

        if kinds_of(dump, other) != "dumps":
            diff_checkpoints(dump, other, "text", color)
            return
        compared(dump, other, "text", color)


def _on_a_screen() -> bool:
    """Whether output is a terminal, or textual-serve, which sets an environment variable."""
    return "TEXTUAL_DRIVER" in os.environ or (sys.stdin.isatty() and sys.stdout.isatty())
