"""Bounded types that the records of a dump are made of; reading validates against them."""

from __future__ import annotations

from typing import Annotated, Literal

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

Role = Literal["param", "buffer", "grad", "optim", "activation", "output", "scalar"]
WEIGHTS: tuple[Role, ...] = ("param", "buffer")
"""Roles of the tensors that make up a model; those of the other roles come from a step."""

Moment = Literal["initial", "stamped", "step", "reference", "updated", "training", "next"]
"""When it was captured: the model's own values after sharding, the ids after sharding, after one training step, or
after the same step of the unsharded model, which rank 0 writes; `updated` is the unsharded model after its own
optimizer, if there is one; `training` is one more step of a model that draws random numbers in training, whose
other steps are in `eval()`; `next` is a job's weight as its next step begins, if something changed it since `updated`.
Parameters of a step are those that a probe's own optimizer has updated; its gradients are as backward left them, but
for those that ranks then scaled each by a number of its own."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything that is written into a dump's files."""
