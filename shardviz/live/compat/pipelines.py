"""Pipeline stages, even if no other rank is there."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardviz.live.compat.modules import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


INFERENCE = ("_shape_inference", "_forward_metadata_inference")
"""Where a stage is run for the shapes of its outputs alone: in torch 2.6.0 and 2.9.1, and in 2.13.0 and 2.15.0."""


def stages_of(schedule: Any) -> list[tuple[nn.Module, Any]]:
    """Return a schedule's stages on this rank, each with its pipeline's process group.

    `_stage` of a schedule with one stage a rank, `_stages` of one with several, in torch 2.6.0 to 2.15.0.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return [(stage.submod, stage.group) for stage in stages]


def asks_for_shapes(inputs: tuple[Any, ...]) -> bool:
    """Whether torch is running a pipeline's stage only to infer the shapes of its outputs.

    torch 2.6.0 does so on meta tensors, 2.9.1 on zeros, 2.13.0 and 2.15.0 on uninitialized ones, in `INFERENCE`.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in INFERENCE:
        frame = frame.f_back
    return frame is not None or any(torch.is_tensor(tensor) and tensor.is_meta for tensor in inputs)


class _Vote:
    """A stage's vote, which is read as a number."""

    def __init__(self, vote: int) -> None:
        self.vote = vote

    def item(self) -> int:
        return self.vote


def let_stages_meet() -> None:
    """Let the first messages between pipeline stages be as long as gloo expects; without pipelines, do nothing.

    `_get_init_p2p_neighbors_ops` of torch 2.9.1 sends an int64 and receives a float32, and gloo aborts the job. The one
    of 2.13.0 sends a float32; 2.6.0 and 2.15.0 have none.
    """
    stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
    kind = getattr(stages, "_PipelineStageBase", None)
    before = getattr(kind, "_get_init_p2p_neighbors_ops", None)
    if kind is None or before is None or hasattr(before, "__wrapped__"):
        return

    @wraps(before)
    def meet(stage: Any) -> list[Any]:
        ops: list[Any] = before(stage)
        for op in ops:
            op.tensor = op.tensor.float()
        return ops

    kind._get_init_p2p_neighbors_ops = meet


@contextmanager
def pipelines_alone() -> Iterator[None]:
    """Let a pipeline stage take its own vote on known input shapes for that of all stages.

    `PipelineStage._warmup_backward_result`, which sends and receives votes, and `_user_meta`, in torch 2.13.0; where
    there are none, as in 2.6.0 and 2.15.0, nothing is done.

    Raises:
        RuntimeError: A stage was not given the shapes, which only the stage before it knows.
    """
    from torch.distributed.pipelining import stage as pipelining

    kind: Any = pipelining.PipelineStage
    before = getattr(kind, "_warmup_backward_result", None)
    if before is None:
        yield
        return

    def alone(self: Any, received_result: Any = None) -> _Vote:
        like = torch.zeros(1, dtype=torch.int32) if isinstance(received_result, _Vote) else received_result
        before(self, like)
        modes: Any = pipelining
        if modes.InferenceMode.needs_dynamic(self._user_meta, True):
            raise RuntimeError(
                "PipelineStage asks the stage before it for shapes: give it input_args and output_args to be planned"
            )
        return _Vote(1)

    with replaced(kind, "_warmup_backward_result", alone):
        yield
