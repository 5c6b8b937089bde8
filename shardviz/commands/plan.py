"""Say what every rank of a job will hold and send, before it is run.

No rank is started: plan builds the model without memory, runs the probe's
sharding code for a few of the ranks, and derives all others from these. It
writes a dump that show, view, diff and check open.

examples:
  shardviz plan tp_fsdp --mesh fsdp=16,tp=8 --node 8
  shardviz plan path/to/my_model.py --mesh pp=16,dp=128,tp=8 -o mine.shardviz
  shardviz plan path/to/my_model.py --mesh dp=64,tp=8 --lock layouts.lock
  shardviz plan path/to/my_model.py --gpus 1024 --memory 80GB --node 8
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz import probe_files
from shardviz.commands.common.parser import Parser, count
from shardviz.commands.common.streams import progress, talk
from shardviz.commands.probe import default_folder, ending_at_signals, mesh_for
from shardviz.dump.plan import PlannedRanks
from shardviz.dump.write import check_folder, is_earlier_run, replacing_folder, write_plan, write_run
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, ShardvizError
from shardviz.layout.mesh import MAX_RANKS, Mesh

if TYPE_CHECKING:
    import argparse

    from shardviz.live.plan.planning import PlanJob
    from shardviz.plan.alternatives import Row

PATIENCE = 10.0
"""Seconds before it is said how many are left."""

OPTIMIZERS = ("adam", "momentum", "none")
MAX_ELEMENTS = 1 << 60
"""Elements of a batch: torch counts them, and their bytes, in 64 bits."""

_BATCH = re.compile(r"([0-9]+(?:[,x][0-9]+)*)(?::([a-z0-9_]+))?")


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("probe", help="a name from `shardviz probes`, or path/to/file.py[:build_function]")
    parser.add_argument("--mesh", help="sizes of the mesh axes, pp=16,dp=128,tp=8; default: the probe's own")
    gpus = partial(count, of="GPUs", least=1, most=MAX_RANKS)
    parser.add_argument("--node", type=gpus, default=0, metavar="N", help="GPUs per node, to see what crosses nodes")
    parser.add_argument(
        "--batch", metavar="SHAPE", help="a batch of this shape, 64,8192 or 64,8192:int64; default: the probe's own"
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="whose state is counted; default: the probe's own, or adam"
    )
    parser.add_argument("--state", default="", metavar="DTYPE", help="dtype of its state; default: the weights'")
    parser.add_argument("--master", action="store_true", help="also count a float32 copy of narrower weights")
    parser.add_argument("--no-step", action="store_true", help="plan no step: no activations, no collectives")
    parser.add_argument("--gpus", type=gpus, metavar="N", help="list the meshes of N ranks instead of one mesh")
    parser.add_argument("--memory", metavar="SIZE", help="with --gpus: only those that fit in SIZE per rank, 80GB")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="compare with FILE, or write it if it is not there")
    parser.add_output("DIR", "the dump's folder; default: PROBE-2x4-plan.shardviz")
    parser.add_force(
        "replace the folder, if it is a dump, and FILE; not needed for the default folder and the same plan"
    )


def run(args: argparse.Namespace) -> int:
    """Plan the probe, print what every rank will hold, and write the dump, or check a lockfile.

    Returns:
        0; 1 if the lockfile differs.
    """
    with ending_at_signals():
        return _choose(args) if args.gpus is not None else _plan(args)


def _plan(args: argparse.Namespace) -> int:
    """Plan one mesh."""
    if args.memory is not None:
        raise ShardvizError("--memory is for --gpus", "say of how many: --gpus 1024 --memory 80GB")
    job = _job(args)
    from shardviz.live.plan.planning import plan

    folder = args.output or default_folder(job.probe, job.mesh, "-plan")
    force = args.force or (args.output is None and is_earlier_run(folder, job.probe.name, job.mesh))
    if args.lock is None:
        check_folder(folder, force=force)
    else:
        _check_lock(args.lock, force=args.force)
    begin = time.monotonic()
    with progress(lambda: f"planning {job.mesh.size:,} ranks on a few of them"):
        run_record, record = plan(job)
    seconds = time.monotonic() - begin
    ranks = PlannedRanks(record, job.mesh)
    if args.lock is not None:
        return _lock(args.lock, ranks, force=args.force, with_step=not args.no_step)
    _print(args, job, ranks)
    with replacing_folder(folder, force=force) as unfinished:
        write_run(unfinished, run_record)
        write_plan(unfinished, record)
    print(
        f"planned in {seconds:.1f} s; wrote {folder}; look at it with: shardviz view {shlex.quote(str(folder))}",
        file=sys.stderr,
    )
    return EXIT_CLEAN


def _choose(args: argparse.Namespace) -> int:
    """Plan every mesh of a number of ranks, and list those that fit.

    Returns:
        0; 1 if none fits, or the step fails on all that would.
    """
    from shardviz.commands.common.dumps import terminal_for, write_answer
    from shardviz.picture.text.plans import choice_lines
    from shardviz.plan.alternatives import bytes_of, fitting_meshes

    if args.mesh or args.lock or args.output:
        raise ShardvizError("--gpus plans many meshes, and writes no dump", "leave out --mesh, --lock and -o")
    memory = 0 if args.memory is None else bytes_of(args.memory)
    if args.memory is not None and not memory:
        raise ShardvizError(f"--memory {args.memory}: no mesh fits in 0 bytes", "give what a GPU has: --memory 80GB")
    job = _job(args)
    from shardviz.live.plan.planning import rows as planned_rows

    tried = _meshes_to_plan(job, args.gpus)
    rows: list[Row] = []
    doing = PlanProgress(len(tried))
    try:
        with progress(lambda: str(doing)):
            for row in planned_rows(job, tried, memory, doing.ended):
                rows.append(row)
    except KeyboardInterrupt:
        talk(f"shardviz: planned {len(rows)} of {len(tried)} meshes")
        raise
    finally:
        terminal = terminal_for(args.color)
        write_answer(choice_lines(rows, memory, terminal.width), terminal)
    return EXIT_CLEAN if fitting_meshes(rows, memory) else EXIT_FINDINGS


def _meshes_to_plan(job: PlanJob, gpus: int) -> list[Mesh]:
    """Return the meshes of a number of ranks that are planned, and say if there are more."""
    from shardviz.plan.alternatives import MOST_MESHES, meshes

    candidates = meshes(job.mesh.axes, gpus, job.node)
    if len(candidates) > MOST_MESHES:
        talk(f"trying the {MOST_MESHES} likeliest of {len(candidates):,} meshes")
    return candidates[:MOST_MESHES]


@dataclass
class PlanProgress:
    """The progress of planning many meshes.

    Attributes:
        begun: When it began.
    """

    of: int
    done: int = 0
    begun: float = field(default_factory=time.monotonic)

    def ended(self) -> None:
        """Count a mesh."""
        self.done += 1

    def __str__(self) -> str:
        return f"{self.done} of {self.of} meshes done{self._time_left()}"

    def _time_left(self) -> str:
        """Say about how long it takes yet, if all meshes take as long as those that are done."""
        passed = time.monotonic() - self.begun
        if self.done in (0, self.of) or passed < PATIENCE:
            return ""
        minutes = passed / self.done * (self.of - self.done) / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than 1 min left"


def _print(args: argparse.Namespace, job: PlanJob, ranks: PlannedRanks) -> None:
    from shardviz.commands.common.dumps import terminal_for, write_answer
    from shardviz.picture.text.plans import plan_lines

    terminal = terminal_for(args.color)
    write_answer(plan_lines(job.probe.name, ranks, terminal.width), terminal)


def _check_lock(path: Path, *, force: bool) -> None:
    """Make sure that a lockfile can be read, or written, before a minute is spent on the plan."""
    from shardviz.plan.lock import read_lock

    if path.exists() and not force:
        read_lock(path)
    elif path.is_dir() or not path.parent.is_dir():
        raise ShardvizError(f"--lock {path}: no file can be written there", "name one in a folder that exists")


def _lock(path: Path, ranks: PlannedRanks, *, force: bool, with_step: bool) -> int:
    """Write a lockfile, or print what a plan has changed beside one that is there."""
    from shardviz.commands.common.dumps import terminal_for, write_answer, write_markup
    from shardviz.picture.text.terminal import line
    from shardviz.plan.lock import lock_changes, lock_text, same_text
    from shardviz.text import printable

    why = f"planned without collectives: {printable(ranks.plan.without_step)}"
    if force or not path.exists():
        if ranks.plan.without_step and with_step:
            talk(why)
        write_markup(lock_text(ranks), path, "--lock")
        talk(f"run this again to compare with {path}")
        return EXIT_CLEAN
    differences = lock_changes(path, ranks)
    if ranks.plan.without_step and any(text.startswith("- sent ") for text in differences):
        talk(why)
    write_answer(map(line, differences or [same_text(path)]), terminal_for("auto"))
    if differences:
        talk(f"{path} differs; give --force to overwrite it")
    return EXIT_FINDINGS if differences else EXIT_CLEAN


def _job(args: argparse.Namespace) -> PlanJob:
    """Read the arguments as a job; torch, which takes seconds, is imported after the checks."""
    probe = probe_files.find(args.probe)
    probe_files.check_torch(probe)
    mesh, batch = mesh_for(probe, args.mesh), _batch(args.batch)
    from shardviz.live.plan.optimizers import Optimizer
    from shardviz.live.plan.planning import PlanJob

    optimizer = Optimizer(args.optimizer or "", args.state, args.master)
    command = ("shardviz", *sys.argv[1:])
    return PlanJob(probe, mesh, args.node, optimizer, batch, with_step=not args.no_step, command=command)


def _batch(text: str | None) -> tuple[tuple[int, ...], str] | None:
    if text is None:
        return None
    match = _BATCH.fullmatch(text)
    if match is None:
        raise ShardvizError(f"--batch {text!r} is not a shape", "write it as 64,8192 or 64,8192:int64")
    sizes = tuple(int(size) for size in re.split("[,x]", match[1]))
    if not 0 < math.prod(sizes) <= MAX_ELEMENTS:
        raise ShardvizError(
            f"--batch {text!r} has {math.prod(sizes):,} elements: expected 1 to {MAX_ELEMENTS:,}",
            "write sizes as 64,8192, the rows of all ranks together first",
        )
    return sizes, match[2] or ""
