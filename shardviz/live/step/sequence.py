"""The positions of the sequence that this rank has, for tokens, labels and masks, as a probe defines them.

Context parallel splits tokens, not weights, and may reorder them; labels and masks must be split in the same way. A
probe may define:

    sequence(mesh)             by name, the positions that this rank has: the result of passing torch.arange(length)
                               through the code that splits the batch
    SEQUENCE                   the dim that is the same sequence, by pattern over the names of parameters and buffers
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records import Stamp
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.locals import Local

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.stamp import Stamped


def add_sequence(stamped: Stamped, probe: ModuleType, mesh: DeviceMesh, capture: Capture) -> Stamped:
    """Capture the positions that this rank has, as ids. Every rank calls this.

    Args:
        stamped: The model's stamps; the ids of positions follow them.
        probe: The probe's module.
        mesh: The run's mesh, as torch's object.
        capture: The capture of this rank, to which the positions are added.

    Returns:
        The stamps, plus one for every name, as long as the sequence.

    Raises:
        ProbeError: `sequence(mesh)` did not return positions, or used the name of one of the model's tensors.
    """
    if not hasattr(probe, "sequence"):
        return stamped
    positions = _positions(probe.sequence(mesh))
    highest = max((int(of.max()) for of in positions.values() if of.numel()), default=-1)
    length = max(of_all_ranks(highest)) + 1
    stamps = {stamp.name: stamp for stamp in stamped.stamps}
    first = max((stamp.first + torch.Size(stamp.shape).numel() for stamp in stamped.stamps), default=1)
    for name, held in positions.items():
        if name in stamps:
            raise ProbeError(
                f"sequence(mesh) returned {name!r}, which is the name of a tensor in the model", "choose another name"
            )
        stamps[name] = Stamp(name, first, (length,), "activation")
        capture.stamps = stamps
        capture.add_ids(Local(name, "activation", (length,), held), (held + first).cpu().numpy())
        first += length
    return replace(stamped, stamps=tuple(stamps.values()))


def sequence_dims(probe: ModuleType, stamped: Stamped) -> dict[str, int]:
    """Return the dim that is the sequence, by pattern over the names of stamped tensors."""
    own = {stamp.name: 0 for stamp in stamped.stamps if stamp.role == "activation"}
    return own | getattr(probe, "SEQUENCE", {})


def _positions(returned: Any) -> Mapping[str, torch.Tensor]:
    if not isinstance(returned, dict):
        raise ProbeError(
            f"sequence(mesh) returned {type(returned).__name__}", "return a dictionary of positions by name"
        )
    return {name: _row(name, held) for name, held in returned.items()}


def _row(name: str, held: Any) -> torch.Tensor:
    """Return positions as a row of whole numbers from 0."""
    if not torch.is_tensor(held) or held.is_floating_point() or held.numel() != max(held.shape, default=0):
        what = f"{held.dtype}{list(held.shape)}" if torch.is_tensor(held) else type(held).__name__
        raise ProbeError(
            f"sequence(mesh) returned {what} as {name!r}",
            "pass torch.arange(length) through your split of the batch, and return the result",
        )
    row: torch.Tensor = held.detach().flatten().to(torch.int64)
    if row.numel() and int(row.min()) < 0:
        raise ProbeError(f"sequence(mesh) returned position {int(row.min())} in {name!r}", "positions count from 0")
    return row
