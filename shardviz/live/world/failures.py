"""When a world does not end well: which rank failed or waits, where, and what it printed.

A rank describes an exception without the frames of the runner or of torch. The launcher makes one error of all that it
hears: the rank at fault and its traceback, without echoes; of a world that hangs, ranks' lines and collectives.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from shardviz.errors import RankError, ShardvizError
from shardviz.groups import in_groups
from shardviz.live.world import output, stacks
from shardviz.live.world.protocol import WHERE, Died, Done, Failed, Outcome
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.live.world.starting import Member

MAX_LINES = 20
MAX_COLUMNS = 500
"""Lines of an exception's message, and characters of a line, that are shown."""

_OURS = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_PROBES = str(Path(_PACKAGE, "probes")) + os.sep
_IMPORTLIB = importlib.__file__
_LOADER = str(Path(_PACKAGE, "live/noting.py"))
_PLUMBING = (
    "torch/nn/modules/module.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
)
"""Wrappers around every call of a module or a collective, which say nothing about a failure."""


def describe(error: BaseException) -> Failed:
    """Return everything about an exception that the launcher will want, as plain data."""
    when = time.monotonic()
    summary = traceback.TracebackException.from_exception(error)
    _trim(summary)
    where = f"{summary.stack[-1].filename}:{summary.stack[-1].lineno}" if summary.stack else ""
    text = _with_short_messages("".join(summary.format()).rstrip(), error)
    if not summary.stack and "\n" not in text:
        text = ""  # a task that cannot be found: the headline says it all
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failed(name, shortened(_message(error)), text, where, when, _usage(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a class of the user's own
        return ""


def shortened(message: str) -> str:
    """Cut a message to the size of a screen, and say how much was left out."""
    lines = message.split("\n")
    shown = [line if len(line) <= MAX_COLUMNS else f"{line[:MAX_COLUMNS]}..." for line in lines[:MAX_LINES]]
    num_left = len(lines) - MAX_LINES
    return "\n".join([*shown, *([f"... {num_left:,} more lines"] if num_left > 0 else [])])


def _with_short_messages(text: str, error: BaseException) -> str:
    """Cut the messages of an exception, and of those that led to it, in a traceback."""
    visited: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in visited:
            continue
        visited.add(id(cause))
        message = _message(cause).rstrip()
        if shortened(message) != message:
            text = text.replace(message, shortened(message))
        waiting += [cause.__cause__, cause.__context__]
    return text


def _trim(summary: traceback.TracebackException) -> None:
    noise = (_OURS, "<frozen importlib", _IMPORTLIB, _LOADER)
    frames = (frame for frame in summary.stack if not frame.filename.startswith(noise))
    user_frames = [frame for frame in frames if not frame.filename.endswith(_PLUMBING)]
    outside_shardviz = [index for index, frame in enumerate(user_frames) if not is_of_shardviz(frame.filename)]
    summary.stack = traceback.StackSummary.from_list(
        user_frames[outside_shardviz[0] :] if outside_shardviz else user_frames
    )
    for earlier in (summary.__cause__, summary.__context__):
        if earlier is not None:
            _trim(earlier)


def is_of_shardviz(filename: str) -> bool:
    """Whether a file is shardviz's own; its recipes count as probes."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_PROBES)


def _usage(error: BaseException) -> bytes | None:
    if not isinstance(error, ShardvizError):
        return None
    return pickled(error) or pickle.dumps(ShardvizError(error.message, error.hint))


def pickled(raised: BaseException | type[BaseException]) -> bytes:
    """Return an exception, a warning or its class pickled; empty if it would not come back.

    An exception's own pickling may raise anything, as may its constructor when it is read.
    """
    try:
        content = pickle.dumps(raised)
        pickle.loads(content)
    except Exception:
        return b""
    return content


TAIL = 20
"""Lines of a rank's output in a message."""
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket ?timeout|timed? ?out|gloo/transport"
    r"|DistNetworkError|DistBackendError|remote process exited|Connect(ion)? ?error|OtherRankError",
    re.IGNORECASE,
)
"""Messages of a rank that fails because another one did."""
_LIMITS_HINT = "the machine has no room for so many ranks: use fewer, or raise its limits (ulimit -u, ulimit -n)"


class RankFailedError(RankError):
    """A rank raised, died or hung. Its text is the whole story; its fields are the parts.

    Args:
        message: One line: which rank, and what happened to it.
        hint: What to do about it, if anything is known.
        rank: The rank at fault; of several, the first.
        coord: Its coordinate as the launcher names it ("fsdp=1, tp=1"), or "".
        traceback_text: Its traceback from the task on, or for a hang the stacks of the ranks that hang.
        output: What it printed.
        others: What other ranks did, in a line, or "".
        waiting: Where ranks that had not finished were, or "".
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        rank: int = 0,
        coord: str = "",
        traceback_text: str = "",
        output: str = "",
        others: str = "",
        waiting: str = "",
    ) -> None:
        super().__init__(message, hint)
        self.rank = rank
        self.coord = coord
        self.traceback_text = traceback_text
        self.output = output
        self.others = others
        self.waiting = waiting

    def __str__(self) -> str:
        parts = [self.message, self.traceback_text, self.others, self.waiting]
        if self.output.strip():
            tail = self.output.rstrip().splitlines()[-TAIL:]
            parts.append(f"Last output of rank {self.rank}:\n" + "\n".join(f"  {line}" for line in tail))
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return "\n".join(part for part in parts if part)

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[object, ...]]:  # type: ignore[override]
        fields = (self.message, self.hint, self.rank, self.coord, self.traceback_text, self.output)
        return type(self), (*fields, self.others, self.waiting)


def name_rank(rank: int, coords: Sequence[str]) -> str:
    """Return a rank with its coordinate: "rank 5 (fsdp=1, tp=1)"."""
    return f"rank {rank} ({coords[rank]})" if rank < len(coords) and coords[rank] else f"rank {rank}"


def find_root(outcomes: Iterable[Outcome]) -> Failed | Died:
    """Return the first failure; one that looks like an echo of another comes last."""
    return min(
        (outcome for outcome in outcomes if not isinstance(outcome, Done)),
        key=lambda outcome: (is_echo(outcome), outcome.when),
    )


def is_echo(outcome: Outcome) -> bool:
    """Whether a failure looks like the consequence of another rank's."""
    return isinstance(outcome, Failed) and bool(_ECHO.search(f"{outcome.kind}: {outcome.message}"))


def explain(outcomes: Mapping[int, Outcome], coords: Sequence[str], folder: Path, waiting: str = "") -> ShardvizError:
    """Return the error for a world in which some ranks failed or died.

    Args:
        outcomes: By rank, what is known; at least one is not `Done`.
        coords: A label for every rank, or nothing.
        folder: Where the ranks' output was caught.
        waiting: Where the other ranks are.

    Returns:
        The usage error that a rank raised, as it was, or a `RankFailedError`.
    """
    first = find_root(outcomes.values())
    if isinstance(first, Failed) and first.usage is not None:
        error: ShardvizError = pickle.loads(first.usage)
        return error
    same = {rank: outcome for rank, outcome in outcomes.items() if _is_same(outcome, first)}
    rank = min(same)
    root = same[rank]
    more = len(same) - 1
    others = f", and {more} other rank{'s' if more > 1 else ''} the same" if more else ""
    return RankFailedError(
        f"{name_rank(rank, coords)} {root.headline}{others}",
        hint=_hint(root),
        rank=rank,
        coord=coords[rank] if rank < len(coords) else "",
        traceback_text=root.traceback_text if isinstance(root, Failed) else "",
        output=output.read(folder, rank),
        others=_other_ranks_text(outcomes, same, coords),
        waiting=waiting,
    )


def _hint(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        refused = ("Resource temporarily unavailable", "can't start new thread", "Too many open files")
        return _LIMITS_HINT if any(reason in outcome.message for reason in refused) else ""
    assert isinstance(outcome, Died)
    if outcome.exit_code == -signal.SIGKILL:
        return "out of memory? The kernel kills processes this way (see `dmesg`). Use fewer ranks or a smaller model"
    if outcome.exit_code < 0:
        return "native code crashed; the Python stack at that moment is at the end of the rank's output"
    return "something in the task calls sys.exit or os._exit"


def _is_same(outcome: Outcome, root: Failed | Died) -> TypeGuard[Failed | Died]:
    if isinstance(outcome, Failed) and isinstance(root, Failed):
        same = (outcome.kind, outcome.where) == (root.kind, root.where)
        return same and is_echo(outcome) == is_echo(root)
    return isinstance(outcome, Died) and isinstance(root, Died) and outcome.exit_code == root.exit_code


def _other_ranks_text(outcomes: Mapping[int, Outcome], named: Iterable[int], coords: Sequence[str]) -> str:
    bad = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failed | Died)}
    unnamed = {rank: outcome for rank, outcome in bad.items() if rank not in named}
    lines = [
        f"{name_rank(rank, coords)} {outcome.headline}" for rank, outcome in unnamed.items() if not is_echo(outcome)
    ]
    if echoes := [rank for rank, outcome in unnamed.items() if is_echo(outcome)]:
        lines.append(f"{named_ranks(echoes)} then lost the connection")
    return "\n".join(lines)


HANG_HINT = (
    "a collective that not every rank of its group calls, or not in the same order, waits forever: "
    "look for one under a condition on the rank"
)


def explain_hang(members: Sequence[Member], seconds: float, coords: Sequence[str], folder: Path) -> RankFailedError:
    """Return the error for a world in which some ranks are still running after `seconds`."""
    late = [member for member in members if member.outcome is None]
    places = _places(late, coords, folder)
    first = late[0]
    finished = [member.rank for member in members if member.outcome is not None]
    waits = any(place.startswith("waiting") for place, _ in places)
    return RankFailedError(
        _summary(late, places, seconds, coords),
        hint=HANG_HINT if waits else "allow more time (timeout), or see in the stacks where the time goes",
        rank=first.rank,
        coord=coords[first.rank] if first.rank < len(coords) else "",
        traceback_text="\n".join(
            "\n".join([f"{named_ranks(ranks)}: {place}", *map(str, stack)]) for (place, stack), ranks in places.items()
        ),
        output=output.read(folder, first.rank),
        others=f"{named_ranks(finished)} had finished" if finished else "",
    )


def places_text(members: Sequence[Member], coords: Sequence[str], folder: Path) -> str:
    """Say where the ranks are that are still running, one line per place."""
    places = _places([member for member in members if member.outcome is None], coords, folder)
    by_place = in_groups((place, rank) for (place, _), ranks in places.items() for rank in ranks)
    return "\n".join(f"{named_ranks(ranks)}: {place}" for place, ranks in by_place.items())


Place = tuple[str, stacks.Stack]
"""Where a rank is, in a few words, and its stack."""


def _places(late: Sequence[Member], coords: Sequence[str], folder: Path) -> dict[Place, list[int]]:
    """Ask ranks where they are; return by place which are there."""
    running = {member.rank: member for member in late if member.thread is not None}
    answers = stacks.ask(folder, {rank: member.process.pid for rank, member in running.items() if member.process.pid})
    for member in running.values():  # only now: a thread that runs while its stack is read by signal can crash the rank
        with suppress(OSError):
            member.line.send_bytes(WHERE)
    groups = stacks.read_groups(folder, running)
    places: dict[Place, list[int]] = {}
    for member in late:
        stack = answers.get(member.rank, {}).get(member.thread or 0, ())
        axes = stacks.axes_text(groups.get(member.rank, ()), coords)
        places.setdefault((_place(member, stack, axes), _shown_frames(stack)), []).append(member.rank)
    return places


def _shown_frames(stack: stacks.Stack) -> stacks.Stack:
    """Return the frames from the user's own code on; the last one of a stack that has none of it."""
    frames = stacks.user_frames(stack)
    own = [index for index, frame in enumerate(frames) if not is_of_shardviz(frame.file)]
    return frames[own[0] :] if own else frames[-1:]


def _place(member: Member, stack: stacks.Stack, axes: str) -> str:
    if not member.ready:
        return "still starting"
    if not stack:
        return "not answering"
    place = stacks.waiting_in(stack)
    caller = ", called by shardviz" if all(is_of_shardviz(frame.file) for frame in _shown_frames(stack)) else ""
    return (f"{place} {axes}" if axes and place.startswith("waiting") else place) + caller


def _summary(late: Sequence[Member], places: dict[Place, list[int]], seconds: float, coords: Sequence[str]) -> str:
    who = name_rank(late[0].rank, coords) if len(late) == 1 else named_ranks([member.rank for member in late])
    where = "; ".join(
        place if len(places) == 1 else f"{named_ranks(ranks)} {place}" for (place, _), ranks in places.items()
    )
    return f"{who} did not finish in {seconds:g} s: {where}"
