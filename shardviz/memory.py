"""What a run's tensors take on every rank, by role and name, and what the schemes of data parallel would take.

A probe is stepped in float64 for the sake of comparison; its gradients, optimizer state and activations are counted in
the element type that the model itself has. Of a pipeline the activations of one micro-batch are captured; they are
counted as often as a rank has micro-batches under way at once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from shardviz.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardviz.dump.records import Role, StageRecord
    from shardviz.dump.tensors import Model, Tensor

ROLES: tuple[Role, ...] = ("param", "buffer", "grad", "optim", "activation")
"""What stays in memory, in the order of tables."""


@dataclass(frozen=True, slots=True)
class Use:
    """What one tensor takes.

    Attributes:
        name: Its name.
        role: What it is to the model.
        bytes: For every rank that has it, its bytes there.
        whole: Bytes of the unsharded tensor.
    """

    name: str
    role: Role
    bytes: dict[int, int]
    whole: int


def uses(model: Model) -> list[Use]:
    """Return what every tensor takes: parameters and buffers as they were sharded, the rest as a step left it."""
    before = model.stage("initial") or model.stage("stamped")
    step = [tensor for tensor in model.stage("step") if tensor.role in ("grad", "optim", "activation")]
    widths = {name: itemsize(tensor.dtype) for tensor in before for name in tensor.names}
    common = Counter(widths.values()).most_common(1)[0][0] if widths else 0
    leaves = _leaves(name for tensor in step if tensor.role == "activation" for name in tensor.names)
    found = [use for tensor in before for use in _of_tensor(tensor, widths, common)]
    at_once = {rank: under_way(record.schedule) for rank, record in model.dump.ranks.items()}
    for tensor in step:
        for use in _of_tensor(tensor, widths, common):
            if tensor.role != "activation":
                found.append(use)
            elif use.name in leaves:
                found.append(replace(use, bytes={rank: round(n * at_once[rank]) for rank, n in use.bytes.items()}))
    return [use for use in found if use.role in ROLES and not _is_tied(model, use)]


def under_way(schedule: Sequence[StageRecord]) -> float:
    """Return how many micro-batches of a stage wait for their backward at once, at most; 1 where no pipeline ran.

    Args:
        schedule: What a rank's stages ran, in order; of several stages, the mean of them at the worst moment.
    """
    waiting = accumulate((-1 if one.backward else 1 for one in schedule), initial=0)
    stages = len({one.stage for one in schedule})
    return max(waiting) / stages if stages else 1.0


def total(found: Sequence[Use], rank: int, role: str | None = None) -> int:
    """Return the bytes on a rank, of one role or of all."""
    return sum(use.bytes.get(rank, 0) for use in found if role in (None, use.role))


def _of_tensor(tensor: Tensor, widths: dict[str, int], common: int) -> Iterator[Use]:
    for name in tensor.names:
        owner = name if name in widths else name.rpartition(".")[0]
        width = widths.get(owner) or common if tensor.stage == "step" else itemsize(tensor.dtype)
        by_rank = {rank: math.prod(shard.body.local_shape) * width for rank, shard in tensor.shards.items()}
        yield Use(name, tensor.role, by_rank, math.prod(tensor.shape) * width)


def _leaves(names: Iterable[str]) -> set[str]:
    """Return the modules without modules of their own among them: a block's output is its last layer's."""
    known = set(names)
    parents = {name[:at] for name in known for at in range(len(name)) if name[at] == "."}
    return known - parents


def _is_tied(model: Model, use: Use) -> bool:
    """Whether the tensor shares another one's storage, which was counted."""
    return use.role == "param" and any(
        use.name in group[1:] for rank in use.bytes for group in model.dump.ranks[rank].tied
    )


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a scheme of data parallel takes with Adam, by the closed formula.

    Attributes:
        name: What it is called.
        formula: For parameters of P bytes over N ranks.
        bytes: The formula's value.
    """

    name: str
    formula: str
    bytes: int


def schemes(params: int, num_ranks: int) -> list[Scheme]:
    """Return parameters, gradients and Adam's two numbers a parameter, a rank, by scheme (Rajbhandari et al. 2020).

    Args:
        params: Bytes of all parameters.
        num_ranks: Ranks that they are dealt out to, evenly.
    """
    share = params / num_ranks
    return [
        Scheme("DDP", "P + P + 2P", 4 * params),
        Scheme("ZeRO 1", "P + P + 2P/N", math.ceil(2 * params + 2 * share)),
        Scheme("ZeRO 2", "P + P/N + 2P/N", math.ceil(params + 3 * share)),
        Scheme("ZeRO 3, FSDP", "P/N + P/N + 2P/N", math.ceil(4 * share)),
    ]
