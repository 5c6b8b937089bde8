"""Records of a step's trace: every module's inputs and outputs, here and unsharded, and the lines of one module.

Ranks write lines only when a step's first wrong module has no named cause. The values stand among the activations,
under `of_value`: those of the sharded module of the moment `step`, those of the unsharded one `reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from shardviz.dump.records.base import MAX_NUMBER, Count, Record, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.layout.layout import Placements


def of_point(module: str, what: str, call: int, index: int) -> str:
    """Return the activation name of the values of a trace point."""
    number = f" {index + 1}" if index else ""
    return f"{module}: {what}{number}" + (f" of call {call + 1}" if call else "")


def is_point(name: str) -> bool:
    """Whether values are those of a point of a step's trace."""
    return ": " in name


What = Literal["input", "output", "gradient of input", "gradient of output"]
"""What of a module's call is compared with the unsharded model's."""

Again = Literal["", "inputs", "outputs"]
"""What differs where backward runs a call again, as activation checkpointing does; empty if nothing is known to."""

State = Literal["right", "pending", "moved", "repeated", "odd", "cut", "none"]
"""What a rank has of the unsharded model's values."""


class Place(NamedTuple):
    """A place in a step: an input or output of one call of a module, or its gradient.

    Attributes:
        module: The module; empty for the model itself.
        call: The number of the call, micro-batches counted as one.
        what: Input, output, or the gradient of either.
        tensor: Which of several tensors.
    """

    module: str
    call: int
    what: What
    tensor: int

    @property
    def is_gradient(self) -> bool:
        """Whether it is the gradient of an activation."""
        return self.what.startswith("gradient")

    @property
    def forward(self) -> Place:
        """The place of the activation itself."""
        return self._replace(what="input" if self.what.endswith("input") else "output")

    @property
    def values_name(self) -> str:
        """The name of its values, recorded in the role of an activation."""
        return of_point(self.module, self.what, self.call, self.tensor)


class PointRecord(Record, frozen=True):
    """This rank's part of a module's input or output, compared with the unsharded model's.

    Attributes:
        module: The module; empty for the model itself.
        what: Input, output, or the gradient of either.
        order: When the unsharded model's call of the module ended, counted from 0.
        call: The number of the call, if the module has several; micro-batches count as one.
        index: Which of several tensors.
        tensor: A number that points of one tensor share.
        state: `right`, a part of the unsharded model's; `pending`, a term of a sum; `moved`, its slices in another
            order or on other ranks; `repeated`, the same, with slices that no rank has; `odd`, something else; `cut`,
            a gradient that cannot come, because the tensor needs none; `none`, one that did not come.
        layout: Which part, in the notation, if it is `right` or `pending`.
        type: The module's class in the unsharded model.
        near: How far an element was allowed to be off.
        scale: What all gradients of this rank's activations are the unsharded model's times.
        added: What an `odd` output has too often: `input`, or a module within, whose output it is; of an input's
            gradient, the module beside it whose output's gradient is in it too often; else empty.
        times: How many times too often, -1 if it is not there at all.
        skipped: A module that no rank calls: an `odd` input is what the unsharded model gives it, or it alone reads the
            output whose gradient is `odd`; else empty.
        is_overwritten: Whether something wrote into the tensor between forward and backward.
        is_without_graph: Whether gradients were switched off in the call, and not in the unsharded model's.
        again: What differed as backward ran the call again, and not in the unsharded model.
    """

    module: str
    what: What
    order: Count
    state: State
    call: Count = 0
    index: Count = 0
    tensor: Count = 0
    layout: str = ""
    type: str = ""
    near: float = 0.0
    scale: float = 1.0
    added: str = ""
    times: Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)] = 0
    skipped: str = ""
    is_overwritten: bool = False
    is_without_graph: bool = False
    again: Again = ""


class KeptRecord(Record, frozen=True):
    """A tensor at a place of a job's own step; its values are in an activation named `of_point`.

    Attributes:
        module: The module; empty for the model itself.
        what: Input, output, or the gradient of either; `batch` for whole numbers that the model was given, `argument`
            for any number, mask or tensor of whole numbers that a module was.
        order: When the call of the module ended, counted from 0.
        call: The number of the call.
        index: Which of several tensors.
        tensor: A number that places of one tensor share.
        needs_grad: Whether a gradient can flow back to the tensor.
        same_as: The name under which its values stand, where they were kept at an earlier place.
        type: The module's class.
        draws: Whether the call drew random numbers.
        is_overwritten: Whether something wrote into the tensor between forward and backward.
        argument: How the module's forward calls an argument: `docs`, `lengths[0]`.
        is_without_graph: Whether gradients were switched off in the call.
        again: What differed as backward ran the call again.
    """

    module: str
    what: What | Literal["batch", "argument"]
    order: Count
    call: Count = 0
    index: Count = 0
    tensor: Count = 0
    needs_grad: bool = False
    same_as: str = ""
    type: str = ""
    draws: bool = False
    is_overwritten: bool = False
    argument: str = ""
    is_without_graph: bool = False
    again: Again = ""


class ArgumentRecord(Record, frozen=True):
    """A number, a mask or whole numbers that a module is given on this rank, and not in the unsharded model.

    Attributes:
        module: The module; empty for the model itself.
        call: The number of the call.
        name: How the module's forward calls it: `docs`, `lengths[0]`.
        at: The first place at which it differs.
        held: What the rank has there.
        expected: What the unsharded model has there.
        count: How many elements differ; 0 if there is no part of this rank's shape to compare with.
        size: How many elements the rank has.
        is_shifted: Whether each row lacks what the ranks before have counted.
        dtype: Its dtype; `float64` for a number.
        lacking: Who gives the module no number here: this `rank`, or the unsharded model, the `whole`; else empty.
    """

    module: str
    call: Count
    name: str
    at: tuple[Count, ...] = ()
    held: float = 0.0
    expected: float = 0.0
    count: Count = 0
    size: Count = 0
    is_shifted: bool = False
    dtype: str = ""
    lacking: Literal["", "rank", "whole"] = ""

    @property
    def differs(self) -> str:
        """Where it differs, in a few words: `16 of 16 elements, the first at [0, 0]: 0 for 2`."""
        if not self.at:
            held = "none" if self.lacking == "rank" else self._shown(self.held)
            return f"{held} for {'none' if self.lacking == 'whole' else self._shown(self.expected)}"
        where = f"{self.count:,} of {self.size:,} elements, the first at [{', '.join(map(str, self.at))}]"
        return f"{where}: {self._shown(self.held)} for {self._shown(self.expected)}"

    def _shown(self, value: float) -> str:
        return str(bool(value)) if self.dtype == "bool" else f"{value:.10g}"


class SketchRecord(Record, frozen=True):
    """A sketch of the unsharded model's weight or point of a step, to compare two runs.

    Attributes:
        name: The weight, or the module; empty for the model itself.
        what: Input, output, or the gradient of either; or a weight before the step.
        numbers: Sixteen numbers, by `shardviz.dump.arrays`; none if an element is NaN, infinite or too large.
        order: When the call of the module ended, counted from 0.
        call: The number of the call.
        index: Which of several tensors.
        noise: How far rounding alone moved it, relative to its size; 0 if that was not tried.
        is_drawn: Whether a weight's values were drawn after sharding, so that they depend on the mesh.
    """

    name: str
    what: What | Literal["weight"]
    dtype: str
    shape: Shape
    numbers: Annotated[tuple[float, ...], Meta(max_length=16)] = ()
    order: Count = 0
    call: Count = 0
    index: Count = 0
    noise: float = 0.0
    is_drawn: bool = False


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The verdict on a step, sent to the ranks that made it; they write it into the dump.

    Attributes:
        points: What each rank has at every place.
        wrong: The first wrong places.
        layouts: The placements of places at which one set of them fits all ranks.
        num_right: How many inputs and outputs are right before the first that is not, on all ranks together.
        is_called_otherwise: Whether the model was given anything but parts of the batch.
        arguments: Each rank's arguments of modules that are not the unsharded model's, and no tensors of floating
            point.
    """

    points: Mapping[int, tuple[PointRecord, ...]]
    wrong: tuple[Place, ...]
    layouts: Mapping[Place, Placements]
    num_right: int = 0
    is_called_otherwise: bool = False
    arguments: Mapping[int, tuple[ArgumentRecord, ...]] = field(default_factory=dict)


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

    @property
    def place(self) -> str:
        """The line as `moe.py:83`."""
        return f"{self.file}:{self.line}"


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
        sent: Of tensors that several calls read: the number of each, and of what this call sends back to it.
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
    sent: tuple[tuple[Count, Count], ...] = ()


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
        is_recomputed: Whether activation checkpointing made it without a graph first, and again in backward.
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
    is_recomputed: bool = False


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
