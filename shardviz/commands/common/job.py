"""The job that `shardviz run` starts: its process, the signals that it gets, and what is said when it has ended.

That is each dump's report, what was not captured, and how ranks died.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import talk
from shardviz.dump.traced import write_around
from shardviz.dump.write import TRACE_FOLDER, prepare_folder
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_RANK_FAILED, EXIT_USAGE, DumpError, ShardvizError
from shardviz.live.run.options import ranks_on
from shardviz.text import named_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from shardviz.live.run.options import Note, Options


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
    """Let the job see the signals that this command gets, and wait for it: it has ranks to end. Gives those seen."""
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
    """End the ranks on this machine that have outlived what started them, once they had time to end by themselves."""
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
        args: The command's arguments.
        notes: What the ranks left.
        code: The job's exit code.
        is_traced: Whether a step was traced: a job of one process shards nothing that could be captured.
    """
    captured = {Path(note.text) for note in notes if note.kind == "captured"}
    dumps = sorted(captured, key=lambda path: (len(path.name), path.name))
    _talk_of(notes, "source")
    codes = [_report(args, dump, number if len(dumps) > 1 else 0) for number, dump in enumerate(dumps, 1)]
    missed = _missed(notes)
    for text in missed:
        message, _, hint = text.partition("\n")
        talk(f"shardviz: not captured: {message}" + (f"\nHint: {hint}" if hint else ""))
    _talk_of([note for note in notes if note.rank > 0], "problem")  # rank 0 has printed its own
    _talk_of(notes, "ended", "the job was ended ")
    if code and not _is_ended(args, notes) and not _is_aborted_at_exit(args.job, notes, code):
        return _failed(args.job, notes, code)
    if not dumps and is_traced and not missed:
        return EXIT_CLEAN
    if not dumps:
        problems = dict.fromkeys(note.text for note in notes if note.kind == "problem")
        talk(f"shardviz: error: {_why_nothing(notes, [*missed, *problems])}")
        return EXIT_USAGE
    if EXIT_FINDINGS in codes:
        return EXIT_FINDINGS
    return EXIT_USAGE if EXIT_USAGE in codes or missed else EXIT_CLEAN


def _talk_of(notes: Sequence[Note], kind: str, before: str = "") -> None:
    """Print the notes of one kind, each text once."""
    for text in dict.fromkeys(note.text for note in notes if note.kind == kind):
        talk(f"shardviz: {before}{text}")


def _missed(notes: Sequence[Note]) -> list[str]:
    """Return why models were not captured: of each as one rank says it, because each says it in its own words."""
    by_name: dict[str, dict[int, list[str]]] = {}
    for note in notes:
        if note.kind == "not-captured":
            by_name.setdefault(note.text.partition(":")[0], {}).setdefault(note.rank, []).append(note.text)
    return list(dict.fromkeys(text for ranks in by_name.values() for text in max(ranks.values(), key=len)))


def _failed(job: Sequence[str], notes: Sequence[Note], code: int) -> int:
    """Say how the job ended, and return this command's exit code."""
    program = Path(job[0]).name
    if -code in ENDING:
        how = "was ended by Ctrl-C" if code == -signal.SIGINT else _ended_with(code)
        talk(f"shardviz: interrupted: {program} {how}")
        return 128 - code
    ranks = "".join(f"{named_ranks(ranks, 4)} {_ended_with(how)}, and " for how, ranks in _first_deaths(notes).items())
    talk(f"shardviz: error: the job failed: {ranks}{program} {_ended_with(code)}")
    return EXIT_RANK_FAILED


def _deaths(notes: Sequence[Note]) -> dict[int, int]:
    """Return the exit code of each rank that its launcher saw fail."""
    return {note.rank: int(note.text) for note in notes if note.kind == "died"}


def _first_deaths(notes: Sequence[Note]) -> dict[int, list[int]]:
    """Return the ranks that failed by their exit codes, without those that the launcher ended because others had."""
    by_code: dict[int, list[int]] = {}
    for rank, code in _deaths(notes).items():
        by_code.setdefault(code, []).append(rank)
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
    from shardviz.commands.common.dumps import says_it_is_a_part

    if says_it_is_a_part(dump):
        return EXIT_USAGE
    shown = Path(os.path.relpath(dump))
    if number and args.format == "text":
        _write([*([""] if number > 1 else []), f"{shown}:"], args.color)
    code = check.report([shown], args.format, args.color, strict=args.strict)
    if code == EXIT_USAGE and not args.reference:
        talk("Hint: if the job loads a checkpoint, name it with --reference CKPT")
    talk(f"wrote {shown}; look at it with: shardviz view {shlex.quote(str(shown))}")
    return code


def _write(texts: Sequence[str], color: str) -> None:
    from shardviz.commands.common.dumps import terminal_for, write_answer
    from shardviz.picture.text.terminal import line

    write_answer(map(line, texts), terminal_for(color))


def _is_ended(args: argparse.Namespace, notes: Sequence[Note]) -> bool:
    """Whether shardviz ended the job: all of its ranks, or under --stamp one of them, and with it the others."""
    ended = {note.rank for note in notes if note.kind == "ended"}
    joined = {note.rank for note in notes if note.kind == "joined"}
    return bool(ended) and (args.stamp or joined <= ended)


def _ended_with(code: int) -> str:
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"was ended by {known.get(-code, f'signal {-code}')}"
    return f"exited with {code}"


def _why_nothing(notes: Sequence[Note], missed: Sequence[str]) -> str:
    ranks = {note.rank for note in notes if note.kind == "joined"}
    if missed:
        return "nothing was captured"
    if any(note.kind == "not-loaded" for note in notes):
        return (
            "nothing was captured: models were called, and no load of a checkpoint was seen before\n"
            "Hint: --stamp sees safetensors (from_pretrained too), torch.distributed.checkpoint and torch.load; "
            "without it, give the checkpoint by --reference CKPT"
        )
    if any(note.kind == "sharded" for note in notes):
        return (
            "nothing was captured: models were sharded, and none was called or stepped afterwards\n"
            "Hint: run at least one step of the job, or call shardviz.capture(model, DUMP, mesh=mesh) in it"
        )
    if ranks:
        return (
            f"no sharding call was seen: {len(ranks)} ranks joined a process group, none called fully_shard, "
            "parallelize_module, distribute_module or distribute_tensor, or made FSDP, DDP or a DeepSpeed engine\n"
            "Hint: if your own code shards, call shardviz.capture(model, DUMP, mesh=mesh, reference=CKPT) in it"
        )
    return (
        "no sharding call was seen: no Python process of the job joined a process group that shardviz sees\n"
        "Hint: give the command that starts the ranks; a Python that ignores PYTHONPATH (-I, -E) cannot be watched"
    )


def keep_trace(session: Path, output: Path, *, is_captured: bool, force: bool) -> bool:
    """Move the trace of a job's step into its dump, and say so; make a dump where the job has none.

    Args:
        session: Where the ranks on this machine left it.
        output: The dump's folder.
        is_captured: Whether the job has written its dump.
        force: Replace what is there, if that is a dump.

    Returns:
        Whether there is a trace.
    """
    source = session / TRACE_FOLDER
    files = sorted(source.iterdir()) if source.is_dir() else []
    if not files:
        talk("shardviz: no step was traced: no optimizer of the job stepped a model that it had called")
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
    talk(f"traced a step into {shown}; lay it beside another job's with: shardviz diff ONE OTHER")
    return True
