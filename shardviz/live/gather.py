"""Torch's own reassembly of a sharded tensor, run only where it can be: on misshapen shards gloo aborts the process."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import distributed

from shardviz.errors import ShardvizError
from shardviz.layout import Layout
from shardviz.live.compat import DTensor, placement_of, quiet_redistribution
from shardviz.live.meshes import plain_mesh
from shardviz.live.world.stacks import Frame, user_frames

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

Sent = TypeVar("Sent")
Described = dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]
"""By name: why a rank's tensor must not be gathered, the ranks of its mesh, and the global shape that the rank sees."""

PATIENCE = 5.0
"""Seconds that a rank whose step raised gives the others to come to the same end."""

MAX_ELEMENTS = 1 << 26
"""Tensors of more elements than this are not gathered whole on every rank."""


def refused(tensors: Mapping[str, DTensor]) -> dict[str, str]:
    """Return the tensors that must not be gathered, with the reason. Every rank calls this, and gets the same.

    Args:
        tensors: This rank's DTensors by name.
    """
    mine = {
        name: (_reason(tensor), plain_mesh(tensor.device_mesh).ranks, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    of_all = of_all_ranks(mine)
    found = {name: reason for one in reversed(of_all) for name, (reason, _, _) in one.items() if reason}
    return _of_other_shapes(of_all) | found


def _of_other_shapes(of_all: list[Described]) -> dict[str, str]:
    """Return the tensors of which two ranks of one mesh see different global shapes."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
    found: dict[str, str] = {}
    for rank, described in enumerate(of_all):
        for name, (_, ranks, shape) in described.items():
            at, other = first.setdefault((name, ranks), (rank, shape))
            if other != shape:
                found.setdefault(name, f"rank {at} sees shape {list(other)}, rank {rank} {list(shape)}")
    return found


def refuse_without_group(hint: str) -> None:
    """Refuse to go on where there are no ranks to ask.

    Raises:
        ShardvizError: No process group is initialised; the hint says what to do.
    """
    if not distributed.is_initialized():
        raise ShardvizError("no process group is initialised: there are no ranks to compare", hint)


def of_all_ranks(mine: Sent) -> list[Sent]:
    """Return what every rank passes, in rank order. Every rank calls this."""
    of_all: list[Sent] = [mine] * distributed.get_world_size()
    distributed.all_gather_object(of_all, mine)
    return of_all


def agreed_errors(error: Exception | None, folder: Path, phase: str) -> list[str]:
    """Return what every rank raised in a phase, in words; empty for ranks that raised nothing. Every rank calls this.

    A rank that raised while others wait for it in a collective cannot ask them. So each leaves a mark in the dump's
    folder first, and a rank that raised goes on only once all are there.

    Args:
        error: What this rank raised.
        folder: A folder that all ranks reach.
        phase: A name for the marks, another for each call.

    Raises:
        Exception: This rank's own error, where some rank does not come: it waits for what this one will not do.
    """
    mark = folder / f".{phase}_{distributed.get_rank():05d}.tmp"
    mark.touch()
    if error is not None and not _all_come(folder, phase):
        raise error
    errors = of_all_ranks(_told(error) if error else "")
    mark.unlink()
    return errors


def _told(error: Exception) -> str:
    """Say in a line what was raised, and where in the user's own code."""
    frames = [Frame(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in user_frames(tuple(frames)) if Path(frame.file).parent != Path(__file__).parent]
    place = f" in {own[-1].function} ({Path(own[-1].file).name}:{own[-1].line})" if own else ""
    return f"{type(error).__name__}{place}: {str(error).strip().partition(chr(10))[0]}"


def _all_come(folder: Path, phase: str) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if len(list(folder.glob(f".{phase}_*.tmp"))) == distributed.get_world_size():
            return True
        time.sleep(0.05)
    return False


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Return what torch's `full_tensor` makes of the shards."""
    with quiet_redistribution():
        full: torch.Tensor = tensor.full_tensor()
    return full.detach()


def _reason(tensor: DTensor) -> str:
    if any(placement.is_partial() for placement in tensor.placements):
        return "a sum is pending"
    if tensor.numel() > MAX_ELEMENTS:
        return f"{tensor.numel():,} elements are more than {MAX_ELEMENTS:,}"
    mesh = plain_mesh(tensor.device_mesh)
    rank = distributed.get_rank()
    if rank not in mesh:
        return ""
    claimed = Layout.from_placements(mesh, tuple(tensor.shape), [placement_of(p) for p in tensor.placements])
    wanted, local = claimed.region(mesh.coord_of(rank)).shape, tuple(tensor.to_local().shape)
    if wanted != local:
        return f"rank {rank} has a shard of {list(local)} where its placements say {list(wanted)}"
    return ""
