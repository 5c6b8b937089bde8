"""What is known of a first wrong line: what stands there, in a sentence, and the cause that it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.calls import ENTRIES
from shardviz.explain.step.lines import WrongLine

if TYPE_CHECKING:
    from shardviz.check.step.lines.calls import Call
    from shardviz.dump.records.lines import FrameRecord
    from shardviz.explain.cause import Cause


@dataclass(frozen=True)
class Fault:
    """A first wrong line.

    Attributes:
        line: The line.
        function: What it calls.
        sentence: What is wrong there, with each rank's values and the line before.
        cause: The cause that it is.
        is_forward: Whether the call makes something wrong of what is right, before any backward.
        is_scaled: Whether it is given what is right, sums nothing, and returns it times a number.
        summed: The collective that sums what it makes; empty if nothing does.
        reads: The function that gets what is right, if `function` is given what that makes of it.
        is_given: Whether it reads what its module is given, and that is no part of the unsharded model's.
    """

    line: FrameRecord
    function: str
    sentence: str
    cause: Cause
    is_forward: bool = False
    is_scaled: bool = False
    summed: str = ""
    reads: str = ""
    is_given: bool = False

    @property
    def place(self) -> str:
        """The line as `moe.py:83`."""
        return place_of(self.line)

    @property
    def is_torchs(self) -> bool:
        """Whether the line is one of torch's own modules, which has no line of the user's in it."""
        return self.line.file.startswith("torch/")


def fault_at(call: Call, sentence: str, cause: Cause) -> Fault:
    """Return the fault of a call."""
    return Fault(call.line, call.first.function, sentence, cause)


def given_fault(call: Call) -> Fault:
    """Return the fault of a call that reads what its module is given wrong."""
    sentence = f"{at(call.line)} reads what its module is given and what is no part of the unsharded model's"
    return replace(fault_at(call, sentence, WrongLine(place_of(call.line), call.first.function)), is_given=True)


def place_of(line: FrameRecord) -> str:
    """Return a line as `moe.py:83`."""
    return f"{line.file}:{line.line}"


def at(line: FrameRecord, previous: FrameRecord | None = None) -> str:
    """Return a line with its text; without the file's name behind a line of the same file."""
    place = f"line {line.line}" if previous is not None and previous.file == line.file else place_of(line)
    return f"{place} `{line.source}`" if line.source else place


def called(call: Call, previous: FrameRecord | None = None) -> str:
    """Return a call's line, and the line that calls the function in which it stands, in a step around the model."""
    caller = _caller(call)
    return f"{at(call.line, previous)}{f', called in {at(caller, call.line)},' if caller is not None else ''}"


def reached(call: Call, previous: FrameRecord | None = None) -> str:
    """Return a call's line, the line in a function of the user's that makes the call, and the line that calls it."""
    caller, inner = _caller(call), call.first.frames[-1]
    parts = [f"in {at(inner, call.line)}"] if place_of(inner) != place_of(call.line) else []
    parts += [f"called in {at(caller, call.line)}"] if caller is not None else []
    between = f", {', '.join(parts)}," if parts else ""
    return f"{at(call.line, previous)}{between}"


def after(before: FrameRecord | None, line: FrameRecord) -> str:
    """Say after which line another is the first wrong line; nothing without one."""
    return f", after {at(before, line)}" if before not in (None, line) and before is not None else ""


def _caller(call: Call) -> FrameRecord | None:
    frames, own = call.first.frames, call.first.own
    return frames[own - 1] if call.is_around and own and frames[own].function not in ENTRIES else None
