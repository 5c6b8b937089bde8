"""Copy a checkpoint with values that show where each belongs.

The copy has the same names, shapes and dtypes, and the other files that
a loader reads: any loader, converter or engine takes it for the checkpoint.
Capture what it loaded with shardviz.capture(model, DUMP, reference=COPY), or
run the job by `shardviz run --reference COPY --steps 1 -- CMD`: tensors that
were renamed, cut in the wrong place, permuted, or never loaded are findings.

examples:
  shardviz stamp-checkpoint Llama-3.2-1B -o stamped
  shardviz stamp-checkpoint model.safetensors -o stamped.safetensors
  shardviz stamp-checkpoint train.py:build_model -o stamped
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import talk
from shardviz.errors import EXIT_CLEAN, DumpError
from shardviz.text import printable

if TYPE_CHECKING:
    import argparse

    from shardviz.commands.common.parser import Parser
    from shardviz.stamping.copies import CopyPlan

DCP = ".metadata"
"""The file by which a folder of torch.distributed.checkpoint is known."""


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source",
        metavar="CHECKPOINT",
        help="a safetensors file, a folder of them, a DCP folder, FILE.py:FUNCTION that builds the model, or a probe",
    )
    parser.add_output("COPY", "the copy: a folder, or a file for a file", required=True)
    parser.add_force("replace COPY, if it is a stamped copy")


def run(args: argparse.Namespace) -> int:
    """Write the copy and say what it has.

    Raises:
        ShardvizError: The source cannot be read, or the copy cannot be written.
    """
    for line in _stamp(args.source, args.output, force=args.force).summary():
        print(line)
    talk(printable(f"load {args.output}, then: shardviz.capture(model, DUMP, reference={str(args.output)!r})"))
    return EXIT_CLEAN


def _stamp(source: str, target: Path, *, force: bool) -> CopyPlan:
    from shardviz.stamping.copies import stamp_safetensors
    from shardviz.stamping.target import SAFETENSORS

    path = Path(source)
    if (path / DCP).is_file():
        from shardviz.stamping.copies import stamp_dcp

        return stamp_dcp(path, target, force=force)
    if path.is_dir() or path.suffix == SAFETENSORS:
        return stamp_safetensors(path, target, force=force)
    if path.is_file() and path.suffix != ".py":
        hint = "convert it to safetensors: pickled weights are not read"
        raise DumpError(f"{path} is not a checkpoint that can be stamped", hint)
    return _stamp_model(source, target, force=force)


def _stamp_model(source: str, target: Path, *, force: bool) -> CopyPlan:
    from shardviz.live.outline import tensors_of
    from shardviz.stamping.copies import plan, write_model

    tensors, tied = tensors_of(source)
    made = plan(tensors, tied, source)
    write_model(tensors, made, target, force=force)
    return made
