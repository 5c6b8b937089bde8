"""What is known of a first wrong line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardviz.check.step.lines.calls import ENTRIES, SELECTS

if TYPE_CHECKING:
    from shardviz.check.step.lines.calls import Call
    from shardviz.check.step.lines.states import Moved, State
    from shardviz.dump.records.lines import FrameRecord

Way = Literal[
    "result",
    "unsummed",
    "collective",
    "gradient",
    "unsummed gradient",
    "between",
    "rows",
    "exchange",
    "exchange gradient",
    "foreign",
    "misplaced",
    "shifted",
    "padding",
    "unwritten",
    "given",
    "kept gradient",
    "backward",
    "left out",
    "narrow reduction",
    "not stored",
    "local weight",
    "averaged term",
    "summed loss",
]


@dataclass(frozen=True)
class Fault:
    """A first wrong line.

    Attributes:
        way: `result`, a call gives something else; `unsummed`, it reads terms of a sum as the whole; `collective`, a
            reduction gives something else; `gradient`, it hands back another gradient; `unsummed gradient`, it hands
            back terms of a sum beside what another line hands back whole; `between`, it is one of the lines from
            `before` to `line`; `rows`, it makes rows that the unsharded model has nowhere, of rows that it has;
            `exchange`, it leaves rows in another order than `before` brought them, and `reader` sends them back;
            `exchange gradient`, its backward does not reverse what its forward exchanges;
            `kept gradient`, it writes something else into a gradient after the backward;
            `backward`, it runs backward on a number that is not the loss;
            `left out`, it reduces other gradients; `narrow reduction`, it reduces a gradient over other ranks alone;
            `not stored`, it writes into a copy what `before` reduces, or does that if nothing writes it (`reader`);
            `local weight`, it takes a weight's part and names no placements of its gradient;
            `averaged term`, it makes a rank's term of the loss, whose terms are averaged instead of summed;
            `summed loss`, it sums ranks' losses before the backward, whose gradients are averaged;
            `foreign`, it reads at indices that `before` moved into the rank's part, and `reader` sums that;
            `misplaced`, it takes another rank's part on `ranks`, and `reader` combines that with the rank's own;
            `shifted`, it takes another stretch of a dim than the part of `ranks`, and `reader` combines it with that;
            `padding`, it sums over elements that the unsharded model cuts off in `before`, on `ranks`;
            `unwritten`, it reads what `before` made room for and nothing wrote to;
            `given`, it reads what its module is given, and that is no part of the unsharded model's.
        line: The line.
        function: What it calls.
        input_text: What ranks have of what it is given, or of the gradient that it is given.
        held: What they have of its result, or of the gradient that it hands back.
        before: The line that makes what it is given, or the terms; of `rows`, the exchange whose rows are only viewed.
        axis: The axis of a missing sum; of a `result`, the axes of a missing mean.
        ranks: The ranks of the collective, of the first rank's group; of a `misplaced` part, those that have it.
        inner: The line in a function that `line` calls, if that makes the call; else the same.
        times: By what its result, or what `reader` hands back, is too large, if that is all that is wrong; else 0.
        reader: The line that hands back the whole gradient on every rank, if backward sums that as if it were terms.
        is_own: Whether ranks compute with numbers of their own between the lines, and call no collective.
        operand: What gives the terms to `function`, if one line does both.
        is_beside_whole: Whether `function` also takes what every rank has whole, or its part of.
        moved: Where the numbers of its result stand, if that is all that is wrong with them.
        reads: The function that is given `given`, if `function` is given what that makes: the collective among the
            calls between, or the first of them.
        unlike: The dim along which two inputs have different slices of one size on a rank; empty if there is none.
        split: The axis that splits what `function` is given and whose size, or its root, makes `times`.
        is_root: Whether the root makes it.
        summed: The collective that sums what `function` makes of the terms; empty if nothing does.
        is_mean: Whether the terms are those of a mean.
        numbers: The one plain number that `function` is given and that is not the unsharded model's, and that one.
        caller: In a step around the model, the line that calls the function that `line` stands in.
        times_before: By what a gradient was too large as the backward left it; 0 if it was none.
        count: How many backward passes there were, or how often `line` reduced a gradient that needed it once.
        stretch: The dim of a `shifted` stretch, where it begins, where the rank's part begins, and its length.
        padding: The dim of a `padding`, its size without and its size with it.
        segments: The dim that `function` takes apart, and into how many segments; the rank has one stretch of it.
        copies: The axes of a collective whose ranks have the same term of its sum, if that makes `times`.
    """

    way: Way
    line: FrameRecord
    function: str
    input_text: str
    held: str
    before: FrameRecord | None = None
    axis: str = ""
    ranks: tuple[int, ...] = ()
    inner: FrameRecord | None = None
    times: float = 0
    moved: Moved = ""
    is_own: bool = False
    reader: FrameRecord | None = None
    operand: str = ""
    is_beside_whole: bool = False
    reads: str = ""
    summed: str = ""
    unlike: str = ""
    split: str = ""
    is_root: bool = False
    is_mean: bool = False
    numbers: tuple[float, float] | None = None
    caller: FrameRecord | None = None
    times_before: float = 0
    count: int = 0
    copies: str = ""
    stretch: tuple[int, int, int, int] | None = None
    padding: tuple[int, int, int] | None = None
    segments: tuple[int, int] | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether a call is given what is right, sums nothing, and returns it times a number."""
        return self.way == "result" and bool(self.times) and not (self.reads or self.axis or self.moved)

    @property
    def is_selection(self) -> bool:
        """Whether a call selects slices of what is right, and no other part of it that is known."""
        return self.way == "result" and self.function in SELECTS and not (self.moved or self.times or self.axis)

    @property
    def is_forward(self) -> bool:
        """Whether a number that the loss is made of goes wrong, before any backward."""
        return self.way in ("result", "unsummed", "collective")

    @property
    def is_torchs(self) -> bool:
        """Whether the line is one of torch's own modules, which has no line of the user's in it."""
        return self.line.file.startswith("torch/")


def fault_at(
    way: Way,
    call: Call,
    input_text: str,
    held: State,
    before: FrameRecord | None = None,
    axis: str = "",
    ranks: tuple[int, ...] = (),
) -> Fault:
    """Return the fault that a call is."""
    frames, own = call.first.frames, call.first.own
    caller = frames[own - 1] if call.is_around and own and frames[own].function not in ENTRIES else None
    sides = input_text, held.text, before, axis, ranks
    return Fault(way, call.line, call.first.function, *sides, inner=frames[-1], caller=caller)
