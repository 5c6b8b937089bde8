"""The content of a plan's file: representative ranks, and the ranks they stand for."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardviz.dump.records.base import Count, Record, RunId
from shardviz.dump.records.files import RankRecord

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
