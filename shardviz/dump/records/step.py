"""Records of one training step: collectives, masks, and rounding noise of its results."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shardviz.dump.records.base import Count, NumRanks, Record, Role
from shardviz.dump.records.trace import FrameRecord
from shardviz.layout.mesh import MAX_AXES

WHOLE_LOSS = "loss.whole"
"""The unsharded model's loss of the whole batch, if its step was compared over the ranks' parts of the batch."""


def of_micro_batch(name: str, number: int) -> str:
    """Return the activation name of the unsharded gradient of one micro-batch."""
    return f"{name}.grad of micro-batch {number}"


def of_loss_term(name: str, number: int) -> str:
    """Return the activation name of the unsharded gradient, or value, of one term of the loss."""
    return f"{name}.grad of term {number} of the loss"


def of_replay(name: str) -> str:
    """Return the activation name of the gradient that a module's own activations give."""
    return f"{name}.grad by its module's activations"


class RaisedRecord(Record, frozen=True, array_like=True):
    """What only the sharded model raised; an array in the file.

    Attributes:
        what: `step` or `optimizer`.
        error: The error in a line, with the rank that raised it.
        module: The innermost module with parameters in whose forward it was; empty if in none, or in an older dump.
    """

    what: str
    error: str
    module: str = ""


class CollectiveRecord(Record, frozen=True):
    """A rank's collectives of one training step; equal ones are counted together.

    Attributes:
        op: What it is, as torch names the function: `all_gather`, `reduce_scatter`, `send`, ...
        axes: The axes of the run's mesh that its group runs along; empty if it runs along none.
        size: The number of ranks in its group.
        module: The module that ran; empty for the model itself, or between modules.
        backward: Whether it ran in the backward pass.
        outside: Whether it ran in neither pass of any module: the training loop called it, or a library after backward.
        count: How many there were.
        bytes: What they were about, together: the whole tensor that was gathered, reduced or sent.
        ranks: In a plan, the ranks of its group if it runs along no axis.
    """

    op: str
    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    size: NumRanks
    module: str = ""
    backward: bool = False
    count: Count = 1
    bytes: Count = 0
    outside: bool = False
    ranks: tuple[Count, ...] = ()

    @property
    def when(self) -> str:
        """Say in a word when it ran."""
        return "outside" if self.outside else "backward" if self.backward else "forward"


class ReductionRecord(Record, frozen=True):
    """Reductions that the step called outside of modules, before its first backward.

    They make the loss. Equal ones are counted together.

    Attributes:
        axes: The axes of the run's mesh that the group runs along; empty if it runs along none.
        dtype: The dtype of what was reduced.
        size: How many elements it has on this rank.
        count: How many there were.
    """

    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    dtype: str
    size: Count
    count: Count = 1


FROM_ONE_RANK = ("scatter", "broadcast")
"""Collectives that give ranks what one rank has."""


class MoveRecord(Record, frozen=True):
    """A collective that moves floats without a backward, before the step's first backward.

    It ran with gradients on, outside of all modules and of every torch.autograd.Function; a scatter or a broadcast may
    have run anywhere, of numbers of any dtype.

    Attributes:
        op: What it is: `all_gather`, `scatter`, ...
        place: The user's line that calls it, as `loss.py:31`.
    """

    op: str
    place: str


class CastRecord(Record, frozen=True):
    """A cast to float8; a module's casts are in execution order.

    Attributes:
        module: The module that ran; empty for the model itself, or between modules.
        dtype: The dtype that the numbers got.
        size: How many numbers there were.
        largest: The largest magnitude of them before the cast, which their scale made.
        unsharded: Whether the unsharded model made the cast; rank 0 writes those.
    """

    module: str
    dtype: str
    size: Count
    largest: float
    unsharded: bool = False


class UnreadRecord(Record, frozen=True):
    """A sum over ranks that nothing read: a new tensor, or written into a copy.

    Attributes:
        op: What it is, as torch names the function.
        axes: The axes of the run's mesh that its group runs along; empty if it runs along none.
        line: The line of the user's code that calls it.
        gradient: The parameter whose gradient it was given, or a copy of it; empty if it was something else.
        is_forward: Whether it ran in a forward pass.
        is_in_place: Whether it wrote the sum into what it was given.
    """

    op: str
    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    line: FrameRecord
    gradient: str = ""
    is_forward: bool = False
    is_in_place: bool = False


STATES, STEPS = "kept states", "kept step"
"""Options that are none: what kinds of states an optimizer keeps of a parameter before the step, and its count."""


class OptionsRecord(Record, frozen=True):
    """Numbers with which the job's optimizers step some parameters.

    Attributes:
        options: Each option with its number as text, such as `("lr", "0.1")`, and what is kept before the step.
        names: The parameters.
    """

    options: tuple[tuple[str, str], ...]
    names: tuple[str, ...]


class ClipRecord(Record, frozen=True):
    """A call in a job's step that clips gradients to a norm.

    Attributes:
        norm: The norm that it clips by, or this rank's part of it.
        limit: The most that it leaves.
        ranks: The ranks whose norms make the whole norm, if this is a part.
        order: The order of that norm of norms: 2 or 1; None for the largest.
    """

    norm: float
    limit: float
    ranks: tuple[int, ...] = ()
    order: float | None = 2


class GivenRecord(Record, frozen=True):
    """What a step of a job begins with and is stepped with; the first is the traced one.

    Attributes:
        shapes: The shape of each tensor that the model was given, in all of its calls.
        rows: The CRC-32 of each of its rows; none of what another model that the job trains may have made.
        options: With which numbers the optimizers step the model's parameters.
        is_of_new_model: Whether the job goes on with it in a model that it made in the place of the one before.
        draws_after: Of the traced step: whether random numbers were drawn between its forward and that of the next.
        followed_by: Of the traced step: the module with whose call the next one began, empty for the whole model; None
            if no call was seen.
        outputs: Of rows of the model's first output: the CRC-32 of what it was given for the row and of the output's
            width, a sum of the output's elements with fixed weights, and their size.
        kept_gradients: Of a later step: how many parameters have a gradient as its first backward begins.
    """

    shapes: tuple[tuple[Count, ...], ...]
    rows: tuple[tuple[Count, ...], ...]
    options: tuple[OptionsRecord, ...] = ()
    is_of_new_model: bool = False
    draws_after: bool = False
    followed_by: str | None = None
    outputs: tuple[tuple[Count, float, float], ...] = ()
    kept_gradients: Count = 0


class CallRecord(Record, frozen=True):
    """A collective that a module called once, to be compared with its definition.

    What this rank had before and after is among the activations, as `module.before` and `module`.

    Attributes:
        op: What it is: `all_reduce`, `send_recv`, ...
        ranks: The ranks of its group, in the group's order.
    """

    module: str
    op: str
    ranks: tuple[Count, ...]


class StageRecord(Record, frozen=True):
    """One pass of a pipeline stage over a micro-batch; a rank's records are in execution order."""

    stage: Count
    microbatch: Count
    backward: bool = False


class NoiseRecord(Record, frozen=True):
    """How far an unsharded result moves if weights and batch are perturbed by one rounding.

    Attributes:
        role: Gradient, output or scalar.
        largest: The largest change of an element.
        typical: The root of the mean square of all changes.
    """

    role: Role
    name: str
    largest: float
    typical: float


class MaskRecord(Record, frozen=True):
    """A mask that this rank drew in training mode, as dropout does.

    Attributes:
        mask: A digest of the elements that it keeps, if all ranks were seeded alike.
        again: The same, if each rank was seeded differently.
        given: A digest of what it was laid on.
        size: How many elements it has.
        num_kept: How many of them it keeps.
        whole: How many elements the unsharded model's has.
    """

    mask: str
    again: str
    given: str
    size: Annotated[int, Meta(ge=1)]
    num_kept: Count
    whole: Count


Wrapper = Literal["bypassed", "unfrozen", "no_sync", "ddp", "fsdp", "zero"]


class WrapperRecord(Record, frozen=True):
    """A wrapper that reduces the gradients of some parameters over one group.

    Attributes:
        kind: DistributedDataParallel, or FSDP of either version; `bypassed` if the forward of DistributedDataParallel,
            which arms its reduction, was not called in the step; `no_sync` if its last forward ran under no_sync();
            `unfrozen` if it reduces fewer parameters than require gradients now; `zero` for DeepSpeed's engine.
        ranks: The ranks of its group.
        names: The parameters.
        divides_by: What it divides the sum of the group's gradients by; None if that was not recorded.
        keeps_buffers: Whether it is DistributedDataParallel with `broadcast_buffers=False`, which sends no buffers.
        finds_unused: Whether it is DistributedDataParallel that doesn't wait for parameters without a gradient.
        casts_to: The dtype to which FSDP2 casts numbers that the model itself is given; empty if it casts none.
    """

    kind: Wrapper
    ranks: tuple[Count, ...]
    names: tuple[str, ...]
    divides_by: float | None = None
    keeps_buffers: bool = False
    finds_unused: bool = False
    casts_to: str = ""
