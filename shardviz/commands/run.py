"""Run a real job, unedited, and say where its weights are.

The command after -- starts the ranks as usual: torchrun, accelerate launch,
lightning, python, srun. shardviz captures each sharded model once, at its
first forward. It changes no weight, and the job goes on. Weights are compared
with the checkpoint that the job loads, or with what the model held before it
was sharded. What the job prints goes to stderr.

--trace records one step: each module's inputs, outputs and their gradients,
on every rank. If a loss differs between one GPU and many, record a step of
both jobs; `shardviz diff ONE OTHER` names the first module that differs. The
hooks only read. Each rank keeps at most 16 million numbers of activations, as
many of weights and of gradients, and only a sample of a large tensor.

--trace lines=MODULE also records each line of one module, and of the script
around the model: `lines` alone is the model's own forward. diff then names the
first wrong line. It keeps 4 million numbers, so make the job's batch small; it
holds the step's tensors until the step ends, and turns torch.compile off.

To check the job's loader, let it load a copy whose values say where they belong
(`shardviz stamp-checkpoint CKPT -o COPY`) and name it with --reference. The
weights are then useless; shardviz ends the job before it saves.

Machines need no shared disk: each keeps its ranks' files, and nothing is
checked until `shardviz gather` or `shardviz check` has the files of all.

Exits with 1 if there are findings, 2 if nothing was captured or could be
checked, 3 if the job failed, 130 after Ctrl-C and 143 after SIGTERM.

examples:
  shardviz run -- torchrun --nproc-per-node 8 train.py --config my.toml
  shardviz run -o mine.shardviz --steps 2 -- torchrun --nproc-per-node 8 train.py
  shardviz run --reference checkpoints/llama -- accelerate launch train.py
  shardviz run --trace -o one --steps 1 -- python train.py
  shardviz run --trace lines=layers.0.attn -o one --steps 1 -- python train.py
  shardviz run --reference COPY --steps 1 -- torchrun --nproc-per-node 8 load.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.parser import Parser, count, seconds
from shardviz.commands.common.streams import talk
from shardviz.dump.gather import write_around
from shardviz.dump.write import SUFFIX, TRACE_FOLDER, check_folder, is_earlier_job, prepare_folder
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_RANK_FAILED, EXIT_USAGE, DumpError, ShardvizError
from shardviz.layout.mesh import ranks_by
from shardviz.live.run.options import PATIENCE, Note, Options, ranks_on, read, session_beside
from shardviz.live.trace_modules import Followed
from shardviz.text import bytes_text, named_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence


STAMPED = (
    "shardviz: the reference is a stamped copy: its values are no weights, and a job that has loaded them is ended "
    "before it saves"
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
        "--steps", type=steps, default=0, metavar="N", help="end the job after N optimizer steps; default: let it run"
    )
    parser.add_argument(
        "--trace",
        nargs="?",
        const="all",
        default="off",
        metavar="WHICH",
        help="record one step, for `shardviz diff` with a second job: all modules, modules=PATTERN with * as in file "
        "names, or lines=MODULE: all modules, and each line of one and of the script around the model; default: off",
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
    if shutil.which(args.job[0]) is None and not Path(args.job[0]).exists():
        raise ShardvizError(f"cannot start {args.job[0]}: No such file or directory", _how_to_start(args.job[0]))
    output = Path(os.path.abspath(args.output or _named_for(args.job)))
    force = args.force or (args.output is None and is_earlier_job(output, args.job))
    check_folder(output, force=force)
    if full := _full_disk(output):
        raise ShardvizError(full, OTHER_DISK)
    names = mapping_of(find_map(args.map)) if args.map else {}
    reference, is_stamped = _reference(args.reference) if args.reference else ("", False)
    with _session(output) as session:
        options = Options(
            str(output),
            str(session),
            reference,
            names,
            args.steps,
            force,
            args.patience,
            tuple(args.job),
            is_stamped,
            args.trace,
            args.trace_step,
        )
        if is_stamped:
            talk(STAMPED)
        code = run_job(args.job, options)
        notes = read(session)
        is_captured = any(note.kind == "captured" and note.text == str(output) for note in notes)
        is_traced = args.trace != "off" and keep_trace(session, output, is_captured=is_captured, force=force)
    return report_job(args, notes, code, is_traced=is_traced)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise for a step to trace that never comes."""
    Followed.parse(args.trace, of_job=True)
    if args.steps and args.trace != "off" and args.trace_step > args.steps:
        raise ShardvizError(
            f"--trace-step {args.trace_step}: the job ends after --steps {args.steps}",
            "trace an earlier step, or raise --steps",
        )
    if args.trace == "off" and args.trace_step > 1:
        raise ShardvizError(f"--trace-step {args.trace_step}: no step is traced without --trace", "add --trace")


def _named_for(job: Sequence[str]) -> Path:
    """Return the dump's folder: named for the job's script, or its module, or its program."""
    scripts = [word for word in job if word.endswith(".py")]
    modules = [after for word, after in pairwise(job) if word == "-m" and not after.startswith("torch.")]
    name = Path(scripts[0]).stem if scripts else modules[-1].rpartition(".")[2] if modules else Path(job[0]).name
    return Path(name + SUFFIX)


def _reference(path: Path) -> tuple[str, bool]:
    """Return a reference's absolute path and whether it is a stamped copy: better to fail before the job."""
    from shardviz.reference.files import open_reference

    return os.path.abspath(path), open_reference(path).is_stamped


LEAST_FREE = 1 << 20
"""Bytes that a disk needs for what ranks note down; a dump of the smallest model is less."""

OTHER_DISK = "free some space, or give a folder on another disk with -o"


def _full_disk(output: Path) -> str:
    """Say that the dump's disk is full; empty if it isn't, or doesn't say how much it holds."""
    path = Path(os.path.abspath(output))
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    disk = shutil.disk_usage(there)
    if not disk.total or disk.free >= LEAST_FREE:
        return ""
    return f"no room for {output}: {bytes_text(disk.free)} are free in {there}"


@contextmanager
def _session(output: Path) -> Iterator[Path]:
    """Give a folder beside the dump, which every process of the job reaches, and remove it."""
    session = session_beside(output)
    try:
        yield session
    finally:
        shutil.rmtree(session, ignore_errors=True)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a command is asked to end: by Ctrl-C, a scheduler or `timeout`, a terminal that closes."""

GRACE = 5.0
"""Seconds that ranks have to end by themselves, then after SIGTERM."""

PAUSE = 0.1


def run_job(job: Sequence[str], options: Options) -> int:
    """Run the job to its end; what ends this command ends the job first.

    Returns:
        The job's exit code; if it is not 0 and this command was asked to end, minus the signal's number.
    """
    sys.stderr.flush()
    try:
        process = subprocess.Popen(job, env=os.environ | options.environment(), stdout=sys.stderr)
    except OSError as error:
        raise ShardvizError(f"cannot start {job[0]}: {error.strerror}", _how_to_start(job[0])) from error
    with _passing_on(process) as seen:
        code = process.wait()
        if code or seen:
            _end_ranks(Path(options.session))
    return -min(seen, key=ENDING.index) if code and seen else code


def _how_to_start(program: str) -> str:
    """Return what to do about a command that does not start."""
    if program.endswith(".py"):
        return f"put python or torchrun before it: shardviz run -- torchrun --nproc-per-node 2 {program}"
    return "give the path of a program, or activate the environment that has it"


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Forward signals to the job and wait for it to end its ranks; yield the signals received."""
    seen: set[int] = set()

    def pass_on(number: int, frame: object) -> None:
        seen.add(number)
        if process.poll() is None and (number != signal.SIGINT or not sys.stdin.isatty()):
            process.send_signal(number)  # Ctrl-C reaches a terminal's whole process group by itself

    heeded = [signum for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, pass_on) for signum in heeded}  # nohup has SIGHUP ignored, and it stays so
    try:
        yield seen
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_ranks(session: Path) -> None:
    """End ranks on this machine that outlived their launcher: wait, SIGTERM, then SIGKILL."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        while left := [pid for pid in ranks_on(session) if _is_of(pid, session)]:
            for pid in left if number else []:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE)
        else:
            return


def _is_of(pid: int, session: Path) -> bool:
    """Whether a process is of the job: another one may have got the number of one that is gone."""
    try:
        return os.fsencode(session) in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or a system that has no /proc
        return False


def report_job(args: argparse.Namespace, notes: Sequence[Note], code: int, *, is_traced: bool = False) -> int:
    """Report each dump and whatever kept others from being written; return the exit code.

    Args:
        is_traced: Whether a step was traced: a job of one process shards nothing that could be captured.
    """
    captured = {Path(note.text) for note in notes if note.kind == "captured"}
    dumps = sorted(captured, key=lambda path: (len(path.name), path.name))
    _talk_of(notes, "source")
    codes = [_report(args, dump, number if len(dumps) > 1 else 0) for number, dump in enumerate(dumps, 1)]
    missed = _not_captured(notes)
    for text in missed:
        message, _, hint = text.partition("\n")
        talk(f"shardviz: not captured: {message}" + (f"\nHint: {hint}" if hint else ""))
    _talk_of([note for note in notes if note.rank > 0], "problem")  # rank 0 has printed its own
    _talk_of(notes, "ended", "the job was ended ")
    _talk_of(notes, "refused", "the job was ended before ")
    if code and not _is_ended(notes) and not _is_aborted_at_exit(args.job, notes, code):
        return _report_failure(args.job, notes, code)
    if not dumps and is_traced and not missed:
        return EXIT_CLEAN
    if not dumps:
        problems = dict.fromkeys(note.text for note in notes if note.kind == "problem")
        full = _full_disk(args.output or _named_for(args.job))
        why = f"{full}\nHint: {OTHER_DISK}" if full else _why_nothing(notes, [*missed, *problems])
        talk(f"shardviz: error: {why}")
        return EXIT_USAGE
    if EXIT_FINDINGS in codes:
        return EXIT_FINDINGS
    return EXIT_USAGE if EXIT_USAGE in codes or missed else EXIT_CLEAN


def _talk_of(notes: Sequence[Note], kind: str, before: str = "") -> None:
    """Print the notes of one kind, each text once."""
    for text in dict.fromkeys(note.text for note in notes if note.kind == kind):
        talk(f"shardviz: {before}{text}")


def _not_captured(notes: Sequence[Note]) -> list[str]:
    """Return why models were not captured, each in the words of one rank."""
    by_name: dict[str, dict[int, list[str]]] = {}
    for note in notes:
        if note.kind == "not-captured":
            by_name.setdefault(note.text.partition(":")[0], {}).setdefault(note.rank, []).append(note.text)
    return list(dict.fromkeys(text for ranks in by_name.values() for text in max(ranks.values(), key=len)))


def _report_failure(job: Sequence[str], notes: Sequence[Note], code: int) -> int:
    """Say how the job ended, and return this command's exit code."""
    program = Path(job[0]).name
    if -code in ENDING:
        how = "was ended by Ctrl-C" if code == -signal.SIGINT else _ended_with(code)
        talk(f"shardviz: interrupted: {program} {how}")
        return 128 - code
    ranks = "".join(f"{named_ranks(ranks, 4)} {_ended_with(how)}, and " for how, ranks in _first_deaths(notes).items())
    talk(f"shardviz: error: the job failed: {ranks}{program} {_ended_with(code)}")
    if any(note.kind == "captured" for note in notes):
        talk("  The report above still holds: it is of the weights at the first forward")
    return EXIT_RANK_FAILED


def _deaths(notes: Sequence[Note]) -> dict[int, int]:
    """Return the exit code of each rank that its launcher saw fail."""
    return {note.rank: int(note.text) for note in notes if note.kind == "died"}


def _first_deaths(notes: Sequence[Note]) -> dict[int, list[int]]:
    """Group the failed ranks by exit code, without those that the launcher ended afterwards."""
    by_code = ranks_by(_deaths(notes).items())
    return {code: ranks for code, ranks in by_code.items() if code != -signal.SIGTERM} or by_code


def _is_aborted_at_exit(job: Sequence[str], notes: Sequence[Note], code: int) -> bool:
    """Whether all scripts came to their end, and a rank was aborted after that. Says so.

    torch 2.13's gloo does that now and then: "terminate called without an active exception", with exit code 1 of
    torchrun, in a job without shardviz too.
    """
    joined = {note.rank for note in notes if note.kind == "joined"}
    deaths = _deaths(notes) or (dict.fromkeys(joined, code) if len(joined) == 1 else {})
    aborted = [rank for rank, how in deaths.items() if how == -signal.SIGABRT]
    is_over = joined <= {note.rank for note in notes if note.kind == "finished"}
    if not (aborted and is_over and set(deaths.values()) <= {-signal.SIGABRT, -signal.SIGTERM}):
        return False
    verb = "was" if len(aborted) == 1 else "were"
    talk(
        f"shardviz: {named_ranks(aborted, 4)} {verb} aborted while Python exited, after the script had ended: "
        f"{Path(job[0]).name} {_ended_with(code)} for that. torch's gloo does it now and then, without shardviz too"
    )
    return True


def _report(args: argparse.Namespace, dump: Path, number: int) -> int:
    """Report a dump: the only one if `number` is 0, else one of several, under its title."""
    from shardviz.commands import check
    from shardviz.commands.common.dumps import says_it_is_a_part, terminal_for, write_answer
    from shardviz.picture.text.terminal import line

    if says_it_is_a_part(dump):
        return EXIT_USAGE
    shown = Path(os.path.relpath(dump))
    if number and args.format == "text":
        write_answer(map(line, [*([""] if number > 1 else []), f"{shown}:"]), terminal_for(args.color))
    code = check.report([shown], args.format, args.color, strict=args.strict)
    if code == EXIT_USAGE and not args.reference:
        talk("Hint: if the job loads a checkpoint, name it with --reference CKPT")
    talk(f"wrote {shown}; look at it with: shardviz view {shlex.quote(str(shown))}")
    return code


def _is_ended(notes: Sequence[Note]) -> bool:
    """Whether shardviz ended the job: all of its ranks, or any of them before a save."""
    ended = {note.rank for note in notes if note.kind == "ended"}
    joined = {note.rank for note in notes if note.kind == "joined"}
    return any(note.kind == "refused" for note in notes) or (bool(ended) and joined <= ended)


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
            "nothing was captured: models were sharded, but none was called or stepped afterwards\n"
            "Hint: run at least one step of the job, or call shardviz.capture(model, DUMP, mesh=mesh) in it"
        )
    if ranks:
        return (
            f"no sharding call was seen: {len(ranks)} ranks joined a process group, none called fully_shard, "
            "parallelize_module, distribute_module or distribute_tensor, or made FSDP, DDP or a DeepSpeed engine\n"
            "Hint: if your own code shards, call shardviz.capture(model, DUMP, mesh=mesh, reference=CKPT) in it; if it "
            "only reduces gradients, run it and the job of one process with --trace, and compare their steps with diff"
        )
    unwatched = next((note.text for note in notes if note.kind == "not-watched"), "")
    if unwatched:
        return (
            f"no sharding call was seen: {unwatched}\n"
            "Hint: pip install shardviz there, or start the job from this environment: python -m torch.distributed.run"
        )
    return (
        "no sharding call was seen: no Python process of the job joined a process group that shardviz sees\n"
        "Hint: give the command that starts the ranks, such as torchrun; a job of one process needs --trace; a Python "
        "that ignores PYTHONPATH (-I, -E) cannot be watched"
    )


def keep_trace(session: Path, output: Path, *, is_captured: bool, force: bool) -> bool:
    """Move the trace of a job's step into its dump; make a dump if the job has none.

    Args:
        is_captured: Whether the job has written its dump.

    Returns:
        Whether there is a trace.
    """
    source = session / TRACE_FOLDER
    files = sorted(source.iterdir()) if source.is_dir() else []
    if not files:
        talk(
            "shardviz: no step was traced: no optimizer of the job stepped parameters of a model that it had called, "
            "or copies of them that have their values or shapes\n"
            "  Hint: if the optimizer was made before sharding, it steps the old parameters: make it after fully_shard"
        )
        return False
    try:
        if not is_captured:
            write_around(source, prepare_folder(output, force=force))
        target = output / TRACE_FOLDER
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(file, target / file.name)
    except (OSError, DumpError) as error:
        talk(f"shardviz: the trace of the step could not be kept: {error}")
        return False
    shown = os.path.relpath(output)
    talk(f"traced a step into {shown}; compare it with a second job's: shardviz diff {shown} OTHER")
    return True
