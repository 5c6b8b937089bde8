"""Records of a module's lines: every call that it makes in one forward, with its values.

Ranks write them only when a step's first wrong module has no named cause. The values stand among the activations,
under `of_value`: those of the sharded module of the moment `step`, those of the unsharded one `reference`.
"""

from __future__ import annotations

import msgspec

from shardviz.dump.records.base import Count, Record, Shape

COMPARED_OVER_PARTS = "the step on the whole batch"
"""How ranks begin a note that a step is compared with the unsharded model's on parts of the batch, not on all of it."""

NO_MEAN = "the loss is not a mean over rows"
"""What such a note says if it is the loss that differs."""

STEP = "step()"
"""What stands for a module's name if the lines are those of the step around the model."""

TO_LOCAL = "to_local of a weight"
"""The function of a call in which a step takes this rank's part of a weight and names no placements of its gradient."""


def of_value(module: str, number: int, *, gradient: bool = False) -> str:
    """Return the name of a value in a module's lines; its colon makes it a trace point."""
    return f"{module}: {'gradient of value' if gradient else 'value'} {number}"


def is_value(name: str) -> bool:
    """Whether a name is that of a value, or of its gradient, in a module's lines."""
    return name.rpartition(": ")[2].startswith(("value ", "gradient of value "))


class FrameRecord(Record, frozen=True):
    """A line of the user's code on the stack of a call.

    Attributes:
        file: Its file, relative to the folder that the program is imported from.
        line: Its number.
        function: The function that it stands in.
        source: Its text, without the spaces around it.
    """

    file: str
    line: Count
    function: str
    source: str


class LineRecord(Record, frozen=True):
    """One call inside of a module.

    Attributes:
        call: Which call of the module, counted from 0.
        function: What is called: `linear`, `all_reduce`, an `autograd.Function` or a compiled module by its class.
        frames: The user's frames from the module's call inwards.
        innermost: The index in `frames` of the innermost line that stands in a module's own method.
        inputs: The numbers of the tensors that it is given.
        outputs: The numbers of the tensors that it returns or writes into.
        ranks: The ranks of the collective that it is or makes; empty if there is none.
        is_collective: Whether the call is itself a collective, and not one that makes some.
        numbers: The numbers among its arguments, those of slices too: they differ if a rank counts from its own.
        since: The line of the same function that begins to compute the numbers which the innermost line reads; None if
            that is the line itself.
    """

    call: Count
    function: str
    frames: tuple[FrameRecord, ...]
    innermost: Count = msgspec.field(name="own")
    inputs: tuple[Count, ...] = ()
    outputs: tuple[Count, ...] = ()
    ranks: tuple[Count, ...] = ()
    is_collective: bool = False
    numbers: str = ""
    since: FrameRecord | None = None


class ValueRecord(Record, frozen=True):
    """One tensor that a call inside of a module is given or returns.

    Attributes:
        number: Counts the tensors of a side on this rank.
        shape: The shape of this rank's part.
        origin: `input 0` of the module, `weight up` or `buffer mask`; empty for what a call returned.
        needs_grad: Whether a gradient can flow back to it.
        placements: Of a DTensor, as torch writes them.
        left_out: Whether its values were not kept, because too many were kept before or it has too many.
        has_gradient: Whether a gradient came back.
        memory: Which memory it stands in, with its shape; 0 if that is not known. Counted only in a whole step.
        axes: Of a DTensor, the axes of its mesh.
    """

    number: Count
    shape: Shape
    origin: str = ""
    needs_grad: bool = False
    placements: str = ""
    left_out: bool = False
    has_gradient: bool = False
    memory: Count = 0
    axes: tuple[str, ...] = ()


class LinesRecord(Record, frozen=True):
    """The calls that a rank recorded inside one module.

    Attributes:
        module: The module; empty for the model itself, `STEP` for the step around it.
        lines: Its calls, in order.
        values: Their tensors.
        returned: The numbers of the tensors that each call of the module returned.
        is_unsharded: Whether these are the unsharded model's; rank 0 writes them.
        why: Why the step could not be run again; empty if it could.
        asked: The module that was asked for: one of torch's own has no lines of the user's, so the one around it is
            taken.
        results: Of the step around the model: what it leaves, with the number of the tensor: `loss`, `gradient NAME`,
            and after the optimizer `stepped gradient NAME` and `stepped NAME`.
    """

    module: str
    lines: tuple[LineRecord, ...] = ()
    values: tuple[ValueRecord, ...] = ()
    returned: tuple[tuple[Count, ...], ...] = ()
    is_unsharded: bool = False
    why: str = ""
    asked: str = ""
    results: tuple[tuple[str, Count], ...] = ()
