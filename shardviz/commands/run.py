"""Run a real job, unedited, and say where its weights are.

The command after -- starts the ranks as usual: torchrun, accelerate launch,
lightning, python, srun. shardviz captures each sharded model once, at its
first forward. It changes no weight, and the job goes on. Weights are compared
with the checkpoint that the job loads, or with what the model held before it
was sharded. What the job prints goes to stderr.

--trace records one step: each module's inputs, outputs and their gradients,
on every rank. If a loss differs between one GPU and many, record a step of
both jobs; `shardviz diff ONE OTHER` names the first module that differs. The
hooks only read. Each rank keeps at most 2^24 numbers each of activations,
weights and gradients; of a large tensor it keeps a sample.

--stamp checks the job's loader instead, and destroys the weights: the job
loads a copy of its checkpoint whose values say where they belong. shardviz
ends the job after the capture, before it saves and before an optimizer steps.
The checkpoint is not changed; the copy needs as much disk, and is removed.

Machines need no disk in common: each keeps its ranks' files, and checks nothing
before `shardviz gather` or `shardviz check` has all of them together.

Exits with 1 if there are findings, 2 if nothing was captured or could be
checked, 3 if the job failed, 130 after Ctrl-C and 143 after SIGTERM.

examples:
  shardviz run -- torchrun --nproc-per-node 8 train.py --config my.toml
  shardviz run -o mine.shardviz --steps 2 -- torchrun --nproc-per-node 8 train.py
  shardviz run --reference checkpoints/llama -- accelerate launch train.py
  shardviz run --trace -o one --steps 1 -- python train.py
  shardviz run --stamp -- torchrun --nproc-per-node 8 serve.py
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.job import keep_trace, report_job, run_job
from shardviz.commands.common.parser import count, seconds
from shardviz.commands.common.streams import talk
from shardviz.dump.write import SUFFIX, check_folder
from shardviz.errors import ShardvizError
from shardviz.live.followed import Followed
from shardviz.live.run.options import PATIENCE, Options, read, session_beside

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from shardviz.commands.common.parser import Parser


STAMPS = (
    "shardviz: --stamp: the job loads stamped copies in place of its checkpoints, its weights are destroyed, and it is "
    "ended before it saves; files stay as they are"
)


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("job", nargs="+", metavar="CMD", help="after --, the command that starts the job")
    parser.add_output("DIR", "the dump's folder; default: SCRIPT.shardviz")
    parser.add_force("replace the folder, if it is a dump")
    steps = partial(count, of="steps", least=1)
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="CKPT",
        help="compare the weights with this safetensors file, folder of them, or DCP folder",
    )
    parser.add_argument(
        "--map",
        type=Path,
        metavar="MAP",
        help="how the model's tensors are made from the reference's; see `shardviz diff --help`",
    )
    parser.add_argument(
        "--steps",
        type=steps,
        default=0,
        metavar="N",
        help="end the job after N optimizer steps; default: let it run",
    )
    parser.add_argument(
        "--stamp",
        action="store_true",
        help="give the job a stamped copy of its checkpoint, and end it before it saves: destroys its weights",
    )
    parser.add_argument(
        "--trace",
        nargs="?",
        const="all",
        default="off",
        metavar="WHICH",
        help="record one step, for `shardviz diff` with a second job: all modules, or modules=PATTERN with * as in "
        "file names; default: off",
    )
    parser.add_argument(
        "--trace-step", type=steps, default=1, metavar="N", help="record optimizer step N; default: the first"
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help=f"how long ranks wait for each other before a capture; default: {PATIENCE:g}",
    )
    parser.add_format("text", "json")
    parser.add_strict()


def run(args: argparse.Namespace) -> int:
    """Run the job and report what was captured.

    Returns:
        0 if nothing is wrong, 1 if there are findings, 2 if nothing was captured or could be checked, 3 if
        the job failed, 128 and the signal's number if it was ended by one: 130 by Ctrl-C, 143 by SIGTERM.
    """
    from shardviz.checkpoint.maps.families import find_map
    from shardviz.checkpoint.maps.language import mapping_of

    _refuse_contradictions(args)
    output = Path(os.path.abspath(args.output or _named_for(args.job)))
    check_folder(output, force=args.force)
    names = mapping_of(find_map(args.map)) if args.map else {}
    reference = str(_reference(args.reference)) if args.reference else ""
    with _session(output) as session:
        options = Options(
            str(output),
            str(session),
            reference,
            names,
            args.steps,
            args.force,
            args.patience,
            tuple(args.job),
            args.stamp,
            args.trace,
            args.trace_step,
        )
        if args.stamp:
            talk(STAMPS)
        code = run_job(args.job, options)
        notes = read(session)
        is_captured = any(note.kind == "captured" and note.text == str(output) for note in notes)
        is_traced = args.trace != "off" and keep_trace(session, output, is_captured=is_captured, force=args.force)
    return report_job(args, notes, code, is_traced=is_traced)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise if --stamp is given with what it takes the place of, or a step is to be followed that never comes.

    Raises:
        ShardvizError: It is.
    """
    if args.stamp and args.reference:
        raise ShardvizError(
            "--stamp and --reference: shardviz compares a stamped load with the file that it loads", "give one of them"
        )
    Followed.parse(args.trace)
    if args.stamp and args.trace != "off":
        raise ShardvizError(
            "--stamp and --trace: a job with stamped weights ends before its first step", "give one of them"
        )
    if args.steps and args.trace != "off" and args.trace_step > args.steps:
        raise ShardvizError(
            f"--trace-step {args.trace_step}: the job ends after --steps {args.steps}",
            "follow an earlier step, or let the job take more of them",
        )
    if args.stamp and args.steps:
        raise ShardvizError(
            "--stamp and --steps: a job with stamped weights ends before its first step", "give one of them"
        )


def _named_for(job: Sequence[str]) -> Path:
    """Return the dump's folder: named for the job's script, or its module, or its program."""
    scripts = [word for word in job if word.endswith(".py")]
    modules = [after for word, after in pairwise(job) if word == "-m" and not after.startswith("torch.")]
    name = Path(scripts[0]).stem if scripts else modules[-1].rpartition(".")[2] if modules else Path(job[0]).name
    return Path(name + SUFFIX)


def _reference(path: Path) -> Path:
    """Return the whole path of a reference that can be read: better to hear that it cannot before a job than after."""
    from shardviz.reference.files import open_reference

    open_reference(path)
    return Path(os.path.abspath(path))


@contextmanager
def _session(output: Path) -> Iterator[Path]:
    """Give a folder beside the dump, which every process of the job reaches, and remove it."""
    session = session_beside(output)
    try:
        yield session
    finally:
        shutil.rmtree(session, ignore_errors=True)
