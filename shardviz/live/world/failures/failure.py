"""The one error for a failed world: the rank at fault and its traceback, without echoes."""

from __future__ import annotations

import pickle
import re
import signal
from typing import TYPE_CHECKING

from shardviz.errors import RankError, ShardvizError
from shardviz.live.world.failures import output
from shardviz.live.world.protocol import Died, Done, Failed
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeGuard

    from shardviz.live.world.protocol import Outcome

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
