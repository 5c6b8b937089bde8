"""The content of a dump's files, version 1, and of a plan's. Unknown fields mean a later version: refused."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from shardviz.dump.records.base import Count, NumRanks, Record, RunId
from shardviz.dump.records.step import (
    CallRecord,
    CastRecord,
    ClipRecord,
    CollectiveRecord,
    GivenRecord,
    MaskRecord,
    MoveRecord,
    NoiseRecord,
    OptionsRecord,
    RaisedRecord,
    ReductionRecord,
    StageRecord,
    UnreadRecord,
    WrapperRecord,
)
from shardviz.dump.records.tensors import (
    Body,
    FragmentRecord,
    GatherRecord,
    LayoutRecord,
    MeshRecord,
    Position,
    SentRecord,
    Stamp,
    TensorRecord,
)
from shardviz.dump.records.trace import ArgumentRecord, KeptRecord, LinesRecord, PointRecord, SketchRecord

MEANT = "whether this is meant: "
"""How ranks begin a note on a tensor that is in order, and is not what a file has that the job opened."""


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
        reductions: What the step reduced over ranks to make its loss.
        moves: What the step moved between ranks without a backward.
        casts: What the step cast to float8.
        unread: Sums over ranks whose results nothing read.
        schedule: What this rank's stages of a pipeline ran, in order.
        stages: The numbers that the probe gives this rank's stages.
        calls: Collectives that are to be compared with their definition.
        runs: How often the step ran the model, or this rank's last stage: the number of its micro-batches.
        is_own_step: Whether the probe has a step of its own, which runs backward; None if that was not recorded.
        narrowed_to: Element types to which the step rounded numbers of a wider one.
        narrow_sums: Element types in which it summed numbers over ranks in backward or after it, if a policy of FSDP
            sums gradients in a wider one.
        raised: What only the sharded model's step or optimizer raised.
        held_back: Parameters whose gradient FSDP keeps to itself after the step, for a later backward to reduce.
        kept_gradients: Parameters of a job that still had the gradient of the step before as backward began.
        module_settings: The numbers, flags, words and functions that modules of a job were made with, by module.
        buffers_beside: Those of these of a job that are in a module beside the model, such as a loss.
        stepped_copies: Parameters in whose place a job's optimizer steps copies that its own code makes.
        stale_copies: Those of these whose copies have other values than they before the step.
        not_stepped: Parameters that are in no group of the probe's own optimizer, or have a learning rate of zero.
        not_saved: Buffers that are in no checkpoint.
        not_due: Parameters that the unsharded model's optimizer, in a job of one process, leaves as they are.
        written_gathered: Parameters whose gathered copy the optimizer wrote to before FSDP2 freed it.
        read_buffers: Buffers that a step changes and whose values the model's output depends on in training; of a job
            those that its forward writes, and reads before it does.
        written_buffers: Buffers that the traced forward of a job wrote, each with the line that writes it; the line is
            empty if it is not known.
        kept_buffers: Buffers that no forward of the traced step of a job wrote.
        other_settings: What the probe's own optimizer keeps besides tensors and the unsharded model's keeps otherwise:
            `lr of group 1 of 2`.
        other_options: Parameters that the probe's own optimizer steps with another option than the unsharded model's:
            `(parameter, option, value, the unsharded model's value)`.
        options: With which numbers the optimizers of a job step its parameters, at the end of the traced step.
        clips: By which norms `clip_grad_norm_` clipped gradients of a job's step.
        given: With what the traced step of a job, and those after it, began, and with what they were stepped.
        as_built: Tensors of which parts were equal before sharding, and whose part here is as it was built.
        made_of: Tensors that the unsharded model doesn't have, and of which of its tensors they have elements here:
            `(tensor, tensors)`.
        filled: Parameters whose elements are one number here, and differ in the model that was sharded.
        unwritten: Parameters that still hold what their memory held when `to_empty` allocated it.
        replaced: Parameters of which the optimizer has the tensor from before sharding, and none has the model's own.
        skipped_keys: Parameters that no load wrote to, with the key under which a load with strict=False was given
            their values: `(parameter, key)`. The key is the parameter's name if a load was into copies that are gone.
        rounded: Weights that some ranks hold rounded and others do not: the name, the narrower dtype, and a digest of
            what this rank holds once rounded to it.
        sent: Tensors that hold what a rank sent while the model was sharded.
        without_ids: Tensors whose element type holds no ids: a mask or a flag has no order that they could show.
        wrappers: What reduces gradients by itself; None if that was not recorded.
        masks: The masks that a step in training mode drew, in order.
        fragments: What it says that it has of tensors that ranks do not divide among themselves.
        noise: Of a step in narrow numbers, what rounding alone does to its results; rank 0 writes it.
        trace: What went in and out of every module of the step, in the order in which this rank came to it.
        sketches: What the unsharded model has of its weights and at every point of its step; rank 0 writes it.
        kept: What a job's own step had at each place, with nothing beside it.
        arguments: What modules of the step were given that is no tensor of floating point, and not the unsharded
            model's.
        steps_before: How many optimizer steps a job made before the one that was traced.
        lines: The calls inside of the first wrong module, if no rule named the cause; rank 0 also has those of the
            unsharded model's.
        run_id: That of its run.
        crc32: The CRC-32 of the file without this field; empty once a file is read, or if another program wrote it.
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
    reductions: tuple[ReductionRecord, ...] = ()
    moves: tuple[MoveRecord, ...] = ()
    casts: tuple[CastRecord, ...] = ()
    schedule: tuple[StageRecord, ...] = ()
    stages: tuple[int, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    runs: Count = 0
    is_own_step: bool | None = None
    narrowed_to: tuple[str, ...] = ()
    narrow_sums: tuple[str, ...] = ()
    raised: tuple[RaisedRecord, ...] = ()
    held_back: tuple[str, ...] = ()
    kept_gradients: tuple[str, ...] = ()
    module_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    buffers_beside: tuple[str, ...] = ()
    stepped_copies: tuple[str, ...] = ()
    stale_copies: tuple[str, ...] = ()
    not_stepped: tuple[str, ...] = ()
    not_saved: tuple[str, ...] = ()
    not_due: tuple[str, ...] = ()
    written_gathered: tuple[str, ...] = ()
    read_buffers: tuple[str, ...] = ()
    written_buffers: tuple[tuple[str, str], ...] = ()
    kept_buffers: tuple[str, ...] = ()
    other_settings: tuple[str, ...] = ()
    other_options: tuple[tuple[str, str, str, str], ...] = ()
    options: tuple[OptionsRecord, ...] = ()
    clips: tuple[ClipRecord, ...] = ()
    given: tuple[GivenRecord, ...] = ()
    as_built: tuple[str, ...] = ()
    made_of: tuple[tuple[str, tuple[str, ...]], ...] = ()
    filled: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    skipped_keys: tuple[tuple[str, str], ...] = ()
    rounded: tuple[tuple[str, str, str], ...] = ()
    sent: tuple[SentRecord, ...] = ()
    without_ids: tuple[str, ...] = ()
    wrappers: tuple[WrapperRecord, ...] | None = None
    masks: tuple[MaskRecord, ...] = ()
    fragments: tuple[FragmentRecord, ...] = ()
    noise: tuple[NoiseRecord, ...] = ()
    trace: tuple[PointRecord, ...] = ()
    sketches: tuple[SketchRecord, ...] = ()
    kept: tuple[KeptRecord, ...] = ()
    arguments: tuple[ArgumentRecord, ...] = ()
    steps_before: Count = 0
    lines: tuple[LinesRecord, ...] = ()
    unread: tuple[UnreadRecord, ...] = ()
    run_id: RunId = ""
    crc32: str = ""


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
        reference: The checkpoint in which values were looked up; empty if ids were written into the weights.
        crc32: The CRC-32 of the file without this field; empty once a file is read, or if another program wrote it.
    """

    schema: Count
    shardviz: str
    torch: str
    num_ranks: NumRanks
    command: tuple[str, ...] = ()
    probe: str = ""
    mesh: MeshRecord | None = None
    stamps: tuple[Stamp, ...] = ()
    intended: dict[str, str] = field(default_factory=dict)
    sequence: dict[str, Count] = field(default_factory=dict)
    run_id: RunId = ""
    reference: str = ""
    crc32: str = ""


StepFails = Literal["no", "perhaps", "yes"]
"""Whether a step fails on real ranks, too; `perhaps` if it was tried on tensors without values only."""


class UnitRecord(Record, frozen=True):
    """Parameters that FSDP gathers together on one rank.

    Attributes:
        name: The module that was wrapped; empty for the model itself.
        bytes: Bytes of the gathered parameters, in the dtype in which they are gathered.
        stays: Whether they stay gathered from their forward to their backward.
        on_cpu: Whether their shards, with gradients and optimizer state, are in the CPU's memory.
    """

    name: str
    bytes: Count
    stays: bool = False
    on_cpu: bool = False


class BucketRecord(Record, frozen=True):
    """Gradients that DistributedDataParallel reduces together, on one rank.

    Attributes:
        bytes: Their bytes.
        is_gradients: Whether the gradients lie in the bucket, instead of being copied into it.
    """

    bytes: Count
    is_gradients: bool = False


class SavedRecord(Record, frozen=True):
    """What autograd saves of a module's forward for its backward, on one rank.

    Attributes:
        module: The module that ran; empty for the model itself.
        bytes: Bytes of the tensors that are neither weights nor kept for another module before it.
    """

    module: str
    bytes: Count


class PeakRecord(Record, frozen=True):
    """A rank's peak memory in a step, without weights, gradients and optimizer state.

    Attributes:
        activations: Bytes of what modules made: kept for backward, or used at this moment.
        gathered: Bytes of what FSDP made: gathered weights, gradients that are not reduced yet, what it sends.
        module: The module that runs; empty for the model itself.
        in_backward: Whether it runs in backward.
        scores: Bytes of activations that are scores of attention, as kernels make that are not fused.
        fused: Bytes of activations and of what FSDP made at the fullest moment that a step without scores has; 0 if
            there are none at this moment.
    """

    activations: Count = 0
    gathered: Count = 0
    module: str = ""
    in_backward: bool = False
    scores: Count = 0
    fused: Count = 0


class PlanPart(Record, frozen=True):
    """One rank that was run, and the ranks that it stands for.

    Attributes:
        record: What that rank has. Other ranks have the same, each with its own part of what the placements split.
        at: Positions along the mesh axes of the ranks that it stands for; along an axis that is not here, all of them.
        units: What FSDP gathers.
        buckets: What DistributedDataParallel reduces, the first one first.
        saved: What a step keeps for its backward, at the end of the forward after which that is most.
        peak: The fullest moment of a step; None if no step was planned.
    """

    record: RankRecord
    at: dict[str, Annotated[tuple[Count, ...], Meta(min_length=1)]] = msgspec.field(default_factory=dict)
    units: tuple[UnitRecord, ...] = ()
    buckets: tuple[BucketRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    peak: PeakRecord | None = None


class PlanRecord(Record, frozen=True):
    """`plan.json`: the ranks that were run, and how.

    Attributes:
        schema: The version of the format.
        parts: One for each kind of rank.
        run_id: That of its run.
        node: GPUs of a node; 0 if it is not given.
        optimizer: What the optimizer state is that of: `Adam`, or the classes that the probe uses; empty for none.
        how: How many ranks were asked, and what is to be known of how they were built and stepped, a sentence each.
        without_step: Why no step was planned; empty if one was.
        step_fails: Whether that is because the step fails, on real ranks too.
        crc32: The CRC-32 of the file without this field; empty once a file is read, or if another program wrote it.
    """

    schema: Count
    parts: Annotated[tuple[PlanPart, ...], Meta(min_length=1)]
    run_id: RunId = ""
    node: Count = 0
    optimizer: str = ""
    how: tuple[str, ...] = ()
    without_step: str = ""
    step_fails: StepFails = "no"
    crc32: str = ""
