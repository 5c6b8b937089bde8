"""The content of a dump's files, version 1. Reading validates against these types, their bounds included.

Numbers are JSON numbers; ids count from 1 over the whole model, so that 0 is never an id. Unknown fields are refused:
a file with them was written by another version.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardviz.layout.mesh import MAX_AXES, MAX_RANKS
from shardviz.layout.region import MAX_DIMS

SCHEMA = 1
MAX_NUMBER = 1 << 62
DIGEST_LENGTH = 16

RunId = Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=32)]
"""The id that files of one run share: hex digits drawn once per run; empty in dumps of older versions."""

Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""A size, an index or an offset."""

NumRanks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]
PerAxis = Annotated[tuple[Count, ...], Meta(max_length=MAX_AXES)]
Span = tuple[Count, Count]
Held = Annotated[tuple[tuple[Span, ...], ...], Meta(max_length=MAX_DIMS)]
"""Index ranges in each dim, half-open."""

IdRun = tuple[
    Annotated[int, Meta(ge=-1, le=MAX_NUMBER)],
    Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)],
    Annotated[int, Meta(ge=1, le=MAX_NUMBER)],
]
"""Ids `first`, `first + step`, ... to a number of `count`."""

Role = Literal["param", "buffer", "grad", "optim", "activation", "output", "scalar"]
WEIGHTS: tuple[Role, ...] = ("param", "buffer")
"""Roles of the tensors that make up a model; those of the other roles come from a step."""
WHOLE_LOSS = "loss.whole"
"""The unsharded model's loss of the whole batch, where its step was compared over the ranks' parts of the batch."""

Moment = Literal["initial", "stamped", "step", "reference", "updated", "training"]
"""When it was captured: the model's own values after sharding, the ids after sharding, after one training step, or
after the same step of the unsharded model, which rank 0 writes; `updated` is the unsharded model after its own
optimizer, where there is one; `training` is one more step of a model that draws random numbers in training, whose
other steps are in `eval()`. Parameters of a step are those that a probe's own optimizer has updated; its gradients
are as backward left them, but for those that ranks then scaled each by a number of its own."""


def of_micro_batch(name: str, number: int) -> str:
    """Return the name of the unsharded model's gradient of one micro-batch, recorded in the role of an activation."""
    return f"{name}.grad of micro-batch {number}"


def of_replay(name: str) -> str:
    """Return the name of the gradient that a module's own activations make, recorded in the role of an activation."""
    return f"{name}.grad by its module's activations"


def of_point(module: str, what: str, call: int, index: int) -> str:
    """Return the name of the values of a point of a step's trace, recorded in the role of an activation."""
    number = f" {index + 1}" if index else ""
    return f"{module}: {what}{number}" + (f" of call {call + 1}" if call else "")


def is_point(name: str) -> bool:
    """Whether values are those of a point of a step's trace."""
    return ": " in name


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a dump's file."""


What = Literal["input", "output", "gradient of input", "gradient of output"]
"""What of a module's call is compared with the unsharded model's."""

State = Literal["right", "pending", "moved", "repeated", "odd", "cut", "none"]
"""What a rank has of the unsharded model's values."""


class MeshRecord(Record, frozen=True):
    """A device mesh: `axes` with their sizes, and the global rank at each coordinate, row-major."""

    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    shape: PerAxis
    ranks: tuple[Count, ...]


class FlatRecord(Record, frozen=True):
    """Where a parameter of `shape` is in FSDP1's flattened concatenation."""

    shape: Shape
    offset: Count


class LayoutRecord(Record, frozen=True):
    """What the placements claim.

    Attributes:
        mesh: Index into the rank file's `meshes`.
        placements: One for each axis of the mesh, as `shardviz.layout.placements` writes them.
        shape: The global shape; with `flat`, the one size of the whole concatenation.
        flat: Set for FSDP1's parameters.
        own_axes: The axes of the tensor's own mesh, where that is a part of `mesh`; empty where it is all of it.
    """

    mesh: Count
    placements: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    shape: Shape
    flat: FlatRecord | None = None
    own_axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)] = ()


class Body(Record, frozen=True):
    """Everything that a rank writes about a tensor except its name: identical layers share one body.

    Attributes:
        role: What the tensor is to the model.
        moment: When it was captured; `stage` in the file.
        shape: The global shape as this rank sees it.
        local_shape: The shape of what this rank holds.
        dtype: The element type, without `torch.`.
        device: `cpu`, `cuda:3`, ...
        layout: Index into the rank file's `layouts`; None for a plain tensor, which claims nothing.
        held: The ids as index ranges in each dim of the tensor itself, where they are such a product.
        runs: The ids otherwise, in memory order, as runs `(first id, step, count)`; 0 for zeros, -1 for no id.
        values: The values as nested lists, where they are few. `"nan"`, `"inf"` and `"-inf"` are strings.
        dense: The values are in the safetensors file, under `moment/role/name`.
        grad: Whether `.grad` was there: `none` or `here`. None where it was not looked at.
        constant: Every element is the same number, as in a fresh bias: equal shards of it say nothing.
    """

    role: Role
    moment: Moment = msgspec.field(name="stage")
    shape: Shape
    local_shape: Shape
    dtype: str
    device: str = "cpu"
    layout: Count | None = None
    held: Held | None = None
    runs: tuple[IdRun, ...] | None = None
    values: Any = None
    dense: bool = False
    grad: Literal["none", "here"] | None = None
    constant: bool = False


class TensorRecord(Record, frozen=True):
    """One tensor, or several whose names differ in one number only and that share a body.

    Attributes:
        name: The name; the part before the number where `numbers` is set.
        body: Index into the rank file's `bodies`.
        numbers: Half-open ranges of the numbers.
        suffix: The part after the number.
        digests: For every name in order, 16 hex digits: the BLAKE2b hash of its bytes, dtype and shape.
    """

    name: str
    body: Count
    numbers: tuple[Span, ...] = ()
    suffix: str = ""
    digests: Annotated[str, Meta(pattern="^[0-9a-f]*$")] = ""


class FragmentRecord(Record, frozen=True):
    """The elements of a flattened tensor that a rank says it has, where ranks do not divide it among themselves.

    Attributes:
        name: The tensor.
        ranks: The ranks that are to divide it.
        start: The first element.
        size: How many.
    """

    name: str
    ranks: tuple[Count, ...]
    start: Count
    size: Count


class Position(Record, frozen=True):
    """This rank on one mesh: its coordinate, and its rank within the process group along each axis."""

    mesh: Count
    coord: PerAxis
    group_ranks: PerAxis


class GatherRecord(Record, frozen=True):
    """The result of a torch collective for a stamped tensor: the ids, as in a `Body`, or the error it raised."""

    name: str
    collective: str
    held: Held | None = None
    runs: tuple[IdRun, ...] | None = None
    error: str = ""


class CollectiveRecord(Record, frozen=True):
    """Collectives of one training step that this rank took part in; those that are alike are counted together.

    Attributes:
        op: What it is, as torch names the function: `all_gather`, `reduce_scatter`, `send`, ...
        axes: The axes of the run's mesh that its group runs along; empty where it runs along none.
        size: The number of ranks in its group.
        module: The module that ran; empty for the model itself, or between modules.
        backward: Whether it ran in the backward pass.
        outside: Whether it ran in neither pass of any module: the training loop called it, or a library after backward.
        count: How many there were.
        bytes: What they were about, together: the whole tensor that was gathered, reduced or sent.
    """

    op: str
    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_AXES)]
    size: NumRanks
    module: str = ""
    backward: bool = False
    count: Count = 1
    bytes: Count = 0
    outside: bool = False

    @property
    def when(self) -> str:
        """Say in a word when it ran."""
        return "outside" if self.outside else "backward" if self.backward else "forward"


class CallRecord(Record, frozen=True):
    """A collective that a module called once, and that is to be compared with its definition.

    What this rank had before and after is among the activations, as `module.before` and `module`.

    Attributes:
        module: The module.
        op: What it is: `all_reduce`, `send_recv`, ...
        ranks: The ranks of its group, in the group's order.
    """

    module: str
    op: str
    ranks: tuple[Count, ...]


class StageRecord(Record, frozen=True):
    """A pipeline's stage running one micro-batch, forward or backward; a rank's records are in the order they ran."""

    stage: Count
    microbatch: Count
    backward: bool = False


class NoiseRecord(Record, frozen=True):
    """How far the unsharded model's result moved when its weights and batch were moved by a rounding of the step.

    Attributes:
        role: Gradient, output or scalar.
        name: Its name.
        largest: The largest change of an element.
        typical: The root of the mean square of all changes.
    """

    role: Role
    name: str
    largest: float
    typical: float


class PointRecord(Record, frozen=True):
    """What this rank has of what went in or out of a module, beside the unsharded model's.

    Attributes:
        module: The module; empty for the model itself.
        what: Input, output, or the gradient of either.
        order: When the unsharded model's call of the module ended, counted from 0.
        call: The number of the call, where the module has several; micro-batches count as one.
        index: Which of several tensors.
        tensor: A number that points of one tensor share.
        state: `right`, a part of the unsharded model's; `pending`, a term of a sum; `moved`, its slices in another
            order or on other ranks; `repeated`, the same, with slices that no rank has; `odd`, something else; `cut`,
            a gradient that cannot come, because the tensor needs none; `none`, one that did not come.
        layout: Which part, in the notation, where it is `right` or `pending`.
        type: The module's class in the unsharded model.
        near: How far an element was allowed to be off.
        scale: What all gradients of this rank's activations are the unsharded model's times.
        added: What an `odd` output has too often: `input`, or a module within, whose output it is; of an input's
            gradient, the module beside it whose output's gradient is in it too often; else empty.
        times: How many times too often, -1 where it is not there at all.
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


class KeptRecord(Record, frozen=True):
    """What a job's own step had at a place, on this rank; its values are those of an activation named `of_point`.

    Attributes:
        module: The module; empty for the model itself.
        what: Input, output, or the gradient of either; `batch` for whole numbers that the model was given.
        order: When the call of the module ended, counted from 0.
        call: The number of the call.
        index: Which of several tensors.
        tensor: A number that places of one tensor share.
        needs_grad: Whether a gradient can flow back to the tensor.
        same_as: The name under which its values stand, where they were kept at an earlier place.
        type: The module's class.
        draws: Whether the call drew random numbers.
    """

    module: str
    what: What | Literal["batch"]
    order: Count
    call: Count = 0
    index: Count = 0
    tensor: Count = 0
    needs_grad: bool = False
    same_as: str = ""
    type: str = ""
    draws: bool = False


class SketchRecord(Record, frozen=True):
    """What the unsharded model has of a weight or at a point of its step, in few numbers, beside another run's.

    Attributes:
        name: The weight, or the module; empty for the model itself.
        what: Input, output, or the gradient of either; or a weight before the step.
        dtype: Its element type.
        shape: Its shape.
        numbers: Sixteen numbers, by `shardviz.dump.sketch`; none where one of its elements is NaN or infinite.
        order: When the call of the module ended, counted from 0.
        call: The number of the call.
        index: Which of several tensors.
        noise: How far rounding alone moved it, relative to its size; 0 where that was not tried.
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


class MaskRecord(Record, frozen=True):
    """A mask that this rank drew in training mode, as dropout does.

    Attributes:
        mask: A digest of the elements that it keeps, where all ranks were seeded alike.
        again: The same, where each rank was seeded differently.
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


class RankRecord(Record, frozen=True):
    """`rank_00003.json`: the record of one rank.

    Content that several places share is written once and named by its index: meshes by positions and layouts, layouts
    by bodies, bodies by tensors.

    Attributes:
        schema: The version of the format.
        rank: The global rank.
        num_ranks: The world's size.
        hostname: The machine that it ran on.
        meshes: The meshes that its tensors are on.
        positions: Its place on each of them.
        layouts: What its DTensors claim.
        bodies: What tensors have in common: shape, dtype, layout and content.
        tensors: Name and digest of every tensor, with its body.
        tied: Groups of names that share storage on this rank.
        gathered: What torch's own collectives returned here.
        not_checked: What this rank could not look at, and why: `(name, reason)`.
        not_applied: Tensors that did not read back as they were filled, and how: `(name, reason)`.
        collectives: What the training step sent between ranks, in the order in which it began.
        schedule: What this rank's stages of a pipeline ran, in order.
        calls: Collectives that are to be compared with their definition.
        narrowed_to: Element types to which the step rounded numbers of a wider one.
        raised: What only the sharded model's step raised, and where: `(what, error)`.
        held_back: Parameters whose gradient FSDP keeps to itself after the step, for a later backward to reduce.
        not_stepped: Parameters that are in no group of the probe's own optimizer, or have a learning rate of zero.
        unwritten: Parameters that still hold what their memory held when `to_empty` allocated it.
        without_ids: Tensors whose element type holds no ids: a mask or a flag has no order that they could show.
        masks: The masks that a step in training mode drew, in order.
        fragments: What it says that it has of tensors that ranks do not divide among themselves.
        noise: Of a step in narrow numbers, what rounding alone does to its results; rank 0 writes it.
        trace: What went in and out of every module of the step, in the order in which this rank came to it.
        sketches: What the unsharded model has of its weights and at every point of its step; rank 0 writes it.
        kept: What a job's own step had at each place, with nothing beside it.
        run_id: That of its run.
    """

    schema: Count
    rank: Count
    num_ranks: NumRanks
    hostname: str
    meshes: tuple[MeshRecord, ...] = ()
    positions: tuple[Position, ...] = ()
    layouts: tuple[LayoutRecord, ...] = ()
    bodies: tuple[Body, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()
    tied: tuple[Annotated[tuple[str, ...], Meta(min_length=2)], ...] = ()
    gathered: tuple[GatherRecord, ...] = ()
    not_checked: tuple[tuple[str, str], ...] = ()
    not_applied: tuple[tuple[str, str], ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()
    schedule: tuple[StageRecord, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    narrowed_to: tuple[str, ...] = ()
    raised: tuple[tuple[str, str], ...] = ()
    held_back: tuple[str, ...] = ()
    not_stepped: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    without_ids: tuple[str, ...] = ()
    masks: tuple[MaskRecord, ...] = ()
    fragments: tuple[FragmentRecord, ...] = ()
    noise: tuple[NoiseRecord, ...] = ()
    trace: tuple[PointRecord, ...] = ()
    sketches: tuple[SketchRecord, ...] = ()
    kept: tuple[KeptRecord, ...] = ()
    run_id: RunId = ""


class Stamp(Record, frozen=True):
    """One tensor of the unsharded model: its ids are `first` to `first + numel - 1`, row-major.

    Attributes:
        name: Its fully qualified name.
        first: The id of its first element; ids count from 1 over the whole model.
        shape: Its global shape.
        role: Parameter or buffer.
        tied_to: The name of the tensor whose storage it shared in the unsharded model.
    """

    name: str
    first: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    shape: Shape
    role: Role = "param"
    tied_to: str = ""

    @property
    def last(self) -> int:
        """Its last id; one less than `first` where it has no elements."""
        return self.first + math.prod(self.shape) - 1


class RunRecord(Record, frozen=True):
    """`run.json`: the record of the whole run.

    Attributes:
        schema: The version of the format.
        shardviz: The version that wrote it.
        torch: The version that it ran with.
        num_ranks: The world's size.
        command: What was typed, a word each.
        probe: The name of the probe; empty for a training job.
        mesh: The mesh that the run was asked for.
        stamps: The stamped tensors in model order.
        intended: The layouts that the author wants, in the notation, by pattern over names.
        sequence: The dim of stamped tensors that is the one sequence they share, by pattern over names.
        run_id: What every rank's file of this run names too.
        reference: The checkpoint in which values were looked up; empty where ids were written into the weights.
    """

    schema: Count
    shardviz: str
    torch: str
    num_ranks: NumRanks
    command: tuple[str, ...] = ()
    probe: str = ""
    mesh: MeshRecord | None = None
    stamps: tuple[Stamp, ...] = ()
    intended: dict[str, str] = {}
    sequence: dict[str, Count] = {}
    run_id: RunId = ""
    reference: str = ""
