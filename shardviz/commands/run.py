"""Run a real job, unedited, and say where its weights are.

The command after -- starts the ranks as ever: torchrun, accelerate launch,
lightning, python, srun. Each sharded model is captured once, at its first
forward; no weight is touched, and the job goes on. Values are compared with
the checkpoint that the job loads, or with what the model held before it was
sharded. What the job prints goes to stderr.

Exits with 1 where there are findings, 2 where nothing was captured or could
be checked, 3 if the job failed, and 130 if Ctrl-C ended it.

examples:
  shardviz run -- torchrun --nproc-per-node 8 train.py --config my.toml
  shardviz run -o mine.shardviz --steps 2 -- torchrun --nproc-per-node 8 train.py
  shardviz run --reference checkpoints/llama -- accelerate launch train.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.parser import seconds
from shardviz.commands.common.streams import talk
from shardviz.dump.write import SUFFIX, check_folder
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_RANK_FAILED, EXIT_USAGE, ShardvizError
from shardviz.live.run.notes import read
from shardviz.live.run.options import PATIENCE, Options, session_beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.live.run.notes import Note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("job", nargs="+", metavar="CMD", help="after --, the command that starts the job")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the dump's folder; default: SCRIPT.shardviz")
    parser.add_argument("--force", action="store_true", help="replace the folder, if it is a dump")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="CKPT",
        help="compare values with a safetensors file, a folder of them or a DCP folder",
    )
    parser.add_argument(
        "--map",
        type=Path,
        metavar="MAP",
        help="how the model's tensors are made of the reference's: `shardviz diff --help` says more",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=0,
        metavar="N",
        help="end the job after N optimizer steps; default: let it go on",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help=f"how long ranks wait for each other before a capture; default: {PATIENCE:g}",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where anything was not checked, too")


def _steps(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps: expected 1 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the job and report what was captured.

    Returns:
        0 where nothing is wrong, 1 where there are findings, 2 where nothing was captured or could be checked, 3 if
        the job failed, 130 if it was interrupted.
    """
    from shardviz.checkpoint.maps.families import find_map
    from shardviz.checkpoint.maps.language import mapping_of

    output = Path(os.path.abspath(args.output or _named_for(args.job)))
    check_folder(output, force=args.force)
    names = mapping_of(find_map(args.map)) if args.map else {}
    reference = str(_reference(args.reference)) if args.reference else ""
    with _session(output) as session:
        options = Options(
            str(output), str(session), reference, names, args.steps, args.force, args.patience, tuple(args.job)
        )
        code = _start(args.job, options)
        notes = read(session)
    return _outcome(args, notes, code)


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


def _start(job: Sequence[str], options: Options) -> int:
    """Run the job to its end and return its exit code; what ends this command ends the job first."""
    sys.stderr.flush()
    try:
        process = subprocess.Popen(job, env=os.environ | options.environment(), stdout=sys.stderr)
    except OSError as error:
        raise ShardvizError(f"cannot start {job[0]}: {error.strerror}", _how_to_start(job[0])) from error
    with _passing_on(process) as seen:
        code = process.wait()
    return -signal.SIGINT if code and signal.SIGINT in seen else code


def _how_to_start(program: str) -> str:
    """Return what to do about a command that does not start."""
    if program.endswith(".py"):
        return f"put python or torchrun before it: shardviz run -- torchrun --nproc-per-node 2 {program}"
    return "give the path of a program, or activate the environment that has it"


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Let the job see the signals that this command gets, and wait for it: it has ranks to end. Gives those seen."""
    seen: set[int] = set()

    def pass_on(number: int, frame: object) -> None:
        seen.add(number)
        if process.poll() is None and (number != signal.SIGINT or not sys.stdin.isatty()):
            process.send_signal(number)  # Ctrl-C reaches a terminal's whole process group by itself

    heeded = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, pass_on) for one in heeded}  # nohup has SIGHUP ignored, and it stays so
    try:
        yield seen
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _outcome(args: argparse.Namespace, notes: Sequence[Note], code: int) -> int:
    """Report each dump and whatever kept others from being written; return the exit code."""
    dumps = list(dict.fromkeys(Path(note.text) for note in notes if note.kind == "captured"))
    for text in dict.fromkeys(note.text for note in notes if note.kind == "source"):
        talk(f"shardviz: {text}")
    codes = [_report(args, dump) for dump in sorted(dumps, key=lambda path: (len(path.name), path.name))]
    missed = list(dict.fromkeys(note.text for note in notes if note.kind == "not-captured"))
    for text in missed:
        message, _, hint = text.partition("\n")
        talk(f"shardviz: not captured: {message}" + (f"\nHint: {hint}" if hint else ""))
    problems = list(dict.fromkeys(note.text for note in notes if note.kind == "problem"))
    for text in dict.fromkeys(note.text for note in notes if note.kind == "problem" and note.rank > 0):
        talk(f"shardviz: {text}")  # rank 0 has said its own
    ended = any(note.kind == "steps" for note in notes)
    if code and not (ended and _all_ended(notes)):
        return _failed(args.job, code)
    if not dumps:
        talk(f"shardviz: error: {_why_nothing(notes, [*missed, *problems])}")
        return EXIT_USAGE
    if EXIT_FINDINGS in codes:
        return EXIT_FINDINGS
    return EXIT_USAGE if EXIT_USAGE in codes or missed else EXIT_CLEAN


def _failed(job: Sequence[str], code: int) -> int:
    """Say how the job ended, and return this command's exit code."""
    if code == -signal.SIGINT:
        talk(f"shardviz: interrupted: {Path(job[0]).name} was ended by Ctrl-C")
        return EXIT_INTERRUPTED
    talk(f"shardviz: error: the job failed: {Path(job[0]).name} {_ended_with(code)}")
    return EXIT_RANK_FAILED


def _report(args: argparse.Namespace, dump: Path) -> int:
    from shardviz.commands import check

    shown = Path(os.path.relpath(dump))
    code = check.report(shown, args.format, args.color, strict=args.strict)
    if code == EXIT_USAGE and not args.reference:
        talk("Hint: where the job loads a checkpoint, name it with --reference CKPT")
    talk(f"wrote {shown}; look at it with: shardviz view {shown}")
    return code


def _all_ended(notes: Sequence[Note]) -> bool:
    """Whether every rank that joined came to the last step: whatever happened at its exit is torch's."""
    joined = {note.rank for note in notes if note.kind == "joined"}
    return joined <= {note.rank for note in notes if note.kind == "steps"}


def _ended_with(code: int) -> str:
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"was ended by {known.get(-code, f'signal {-code}')}"
    return f"exited with {code}"


def _why_nothing(notes: Sequence[Note], missed: Sequence[str]) -> str:
    ranks = {note.rank for note in notes if note.kind == "joined"}
    if missed:
        return "nothing was captured"
    if any(note.kind == "sharded" for note in notes):
        return (
            "nothing was captured: models were sharded, and none was called or stepped afterwards\n"
            "Hint: run at least one step of the job, or call shardviz.capture(model, DUMP, mesh=mesh) in it"
        )
    if ranks:
        return (
            f"no sharding call was seen: {len(ranks)} ranks joined a process group, none called fully_shard, "
            "parallelize_module, distribute_module or distribute_tensor, or made FSDP, DDP or a DeepSpeed engine\n"
            "Hint: where your own code shards, call shardviz.capture(model, DUMP, mesh=mesh, reference=CKPT) in it"
        )
    return (
        "no sharding call was seen: no Python process of the job joined a process group where shardviz sees it\n"
        "Hint: give the command that starts the ranks; a Python that ignores PYTHONPATH (-I, -E) cannot be watched"
    )
