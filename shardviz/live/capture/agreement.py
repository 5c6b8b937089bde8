"""Exchanges between ranks during a capture: values and errors of every rank."""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from torch import distributed, nn
from torch.distributed.distributed_c10d import PrefixStore

from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.compat.modules import clean_name
from shardviz.live.compat.worlds import default_store, have_come
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Sent = TypeVar("Sent")
Done = TypeVar("Done")

PATIENCE = 5.0
"""Seconds that a rank whose step raised waits for the others to finish or raise."""

LONG_PATIENCE = 1800.0
"""Seconds that a rank that raised nothing waits: torch's default timeout of a collective."""


def refuse_without_group(hint: str) -> None:
    """Raise if there are no ranks to exchange with.

    Raises:
        ShardvizError: No process group is initialized; its hint is `hint`.
    """
    if not distributed.is_initialized():
        raise ShardvizError("no process group is initialized, so there are no ranks to compare", hint)


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank sends in place of a value when it has raised.

    Attributes:
        message: What it raised, in a line.
        hint: What to do about it.
    """

    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a rank raised.

    Attributes:
        text: That, in a line; empty if it raised nothing.
        module: The innermost module, with parameters in it, in whose forward it did; empty if in none.
        is_alike: Whether every rank raised it, at the same line.
    """

    text: str = ""
    module: str = ""
    is_alike: bool = False


class OtherRankError(ShardvizError):
    """Another rank raised in the middle of what all ranks do together.

    Attributes:
        world: The process group of all of these ranks.
    """

    world: object = None


def of_all_ranks(value_here: Sent) -> list[Sent]:
    """Return every rank's value, in rank order. Every rank calls this.

    Raises:
        OtherRankError: A rank has left what they do `together`.
    """
    of_all: list[Sent] = [value_here] * distributed.get_world_size()
    distributed.all_gather_object(of_all, value_here, _APART.get(distributed.group.WORLD))
    for rank, reply in enumerate(of_all):
        if isinstance(reply, Failed) and not isinstance(value_here, Failed):
            heard = OtherRankError(f"rank {rank} failed: {reply.message}", reply.hint)
            heard.world = distributed.group.WORLD
            raise heard
    return of_all


_APART: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The group for exchanges in a world some of whose ranks left the job's collectives by an error."""

_PHASES: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How often each phase was agreed on, by world: a rank may have been in worlds that others of this one were not in."""

_TOGETHER: list[object] = []
"""The worlds whose ranks do something together, the innermost last."""

LETTING_GO = 0.05
"""Seconds after the last exchange, in which gloo's own thread lets go of its tensors. It needs the GIL for that: where
a script ends first, the interpreter ends the thread, and C++ aborts the process (torch 2.13: "terminate called")."""


@contextmanager
def together() -> Iterator[None]:
    """Do something full of exchanges on every rank: if one rank raises, all do, at once.

    Without it the others would wait for a rank that raised until torch's timeout, or worse, take what it sends in the
    job's next collective for its answer. All exchanges must be by `of_all_ranks`: a rank that raised takes part in the
    one that the others are in, or come to next, and says so there. One inside of another changes nothing, unless the
    inner one is in a smaller world (`testing.trips.worlds`): its ranks hear of it first, and then all others.

    Raises:
        OtherRankError: Another rank raised.
    """
    world = distributed.group.WORLD
    if any(entered is world for entered in _TOGETHER):
        yield
        return
    _TOGETHER.append(world)
    try:
        yield
        of_all_ranks(None)  # a rank that raised after the last exchange is heard here
        time.sleep(LETTING_GO)
    except BaseException as error:  # torch's CheckpointException is not an Exception, and pytest's failures are not
        is_known = isinstance(error, OtherRankError) and error.world is world
        if is_known or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        error_text = (error.message, error.hint) if isinstance(error, ShardvizError) else (in_a_line(error),)
        with suppress(RuntimeError):  # the others are gone: what this rank raised says more
            of_all_ranks(Failed(*error_text))
        raise
    finally:
        _TOGETHER.pop()


def raise_together(error: ShardvizError | None) -> None:
    """Raise any rank's error on all ranks: alone, a rank would leave the others waiting.

    Raises:
        ShardvizError: This rank's own, or the first rank's that has one.
    """
    of_all = of_all_ranks((error.message, error.hint) if error is not None else None)
    if error is not None:
        raise error
    for rank, refusal in enumerate(of_all):
        if refusal is not None:
            raise ShardvizError(f"rank {rank}: {refusal[0]}", refusal[1])


def agreed_run_id() -> str:
    """Draw an id for this run on rank 0 and share it with all ranks. Every rank calls this."""
    return of_all_ranks(secrets.token_hex(8))[0]


def agreed_errors(error: Exception | None, phase: str) -> list[Raised]:
    """Return what every rank raised in a phase. Every rank calls this.

    A rank that raised has left out collectives that others wait in, and they would take what it sends next for its part
    in these. So each rank writes its error into the job's store and waits for all others'. If any rank raised, later
    exchanges go through a new group.

    Raises:
        Exception: This rank's own error, if another rank says nothing because it waits for this one.
        OtherRankError: Another rank said nothing for half an hour: it may have ended.
    """
    phases = _PHASES.setdefault(distributed.group.WORLD, Counter())
    phases[phase] += 1
    errors_by_rank = PrefixStore(f"shardviz/{phase}/{phases[phase]}", default_store())
    raised = Raised(in_a_line(error), module_of(error)) if error is not None else Raised()
    errors_by_rank.set(str(distributed.get_rank()), json.dumps([raised.text, raised.module]))
    ranks = [str(rank) for rank in range(distributed.get_world_size())]
    patience = LONG_PATIENCE if error is None else PATIENCE
    if not have_come(errors_by_rank, ranks, patience):
        silent = [int(rank) for rank in ranks if not errors_by_rank.check([rank])]
        raise error or OtherRankError(f"{named_ranks(silent)} did not finish {phase} in {patience:,.0f} seconds")
    errors = [Raised(*json.loads(errors_by_rank.get(rank))) for rank in ranks]
    if any(one.text for one in errors):
        backend = "gloo" if distributed.is_gloo_available() else None  # NCCL may split its world, which is out of step
        _APART[distributed.group.WORLD] = distributed.new_group(backend=backend)
    return errors


def attempted(work: Callable[[], Done], phase: str) -> tuple[Done | None, Raised]:
    """Do work that may raise on some ranks only. Every rank calls this.

    Returns:
        What it returned and no error. If it raised on any rank: None and the first rank's error, with the next rank's
        that raised something else.

    Raises:
        ProbeError: It raised that on this rank: what the probe's author has to mend is not a finding.
    """
    done, failure = None, None
    try:
        done = work()
    except Exception as error:
        failure = error
    errors = agreed_errors(failure, phase)
    if isinstance(failure, ProbeError):
        raise failure
    raised = {rank: one for rank, one in enumerate(errors) if one.text}
    if not raised:
        return done, Raised()
    unlike = {one.text.partition(": ")[0]: rank for rank, one in reversed(raised.items())}
    texts = [f"rank {rank} raised {raised[rank].text}" for rank in sorted(unlike.values())[:2]]
    is_alike = len(unlike) == 1 and len(raised) == len(errors)
    return None, replace(next(iter(raised.values())), text="; ".join(texts), is_alike=is_alike)


def in_a_line(error: BaseException) -> str:
    """Describe an error in one line, with the place in the user's own code."""
    from shardviz.live.world.stacks import Frame, user_frames

    frames = [
        Frame(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)
    ]
    user_code = [
        frame for frame in user_frames(tuple(frames)) if Path(__file__).parents[1] not in Path(frame.file).parents
    ]
    place = f" in {user_code[-1].function} ({Path(user_code[-1].file).name}:{user_code[-1].line})" if user_code else ""
    in_module = f", in module {name}" if (name := module_of(error)) else ""
    return f"{type(error).__name__}{place}{in_module}: {str(error).strip().partition(chr(10))[0]}"


def module_of(error: BaseException) -> str:
    """Name the innermost module, with parameters in it, in whose forward an error was raised; empty if in none."""
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [caller for caller in callers if isinstance(caller, nn.Module)]
    names = {module: clean_name(name) for name, module in modules[0].named_modules()} if modules else {}
    inner = (names.get(module) for module in reversed(modules) if any(True for _ in module.parameters()))
    return next(inner, None) or ""
