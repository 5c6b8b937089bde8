"""Refusals of meshes that a probe cannot take, with the arithmetic, before torch fails on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.errors import ProbeError

if TYPE_CHECKING:
    from shardviz.layout.mesh import Mesh


def refuse_uneven(mesh: Mesh, axis: str, size: int, what: str, reason: str) -> None:
    """Refuse a mesh whose axis does not divide a size evenly.

    Args:
        axis: The axis that splits it.
        size: The size that it splits.
        what: What is counted: `attention heads`.
        reason: Why torch needs it to divide, in torch's own words if it has any.

    Raises:
        ProbeError: The axis does not divide the size.
    """
    ranks = mesh.axis_size(axis)
    if size % ranks:
        fitting = [str(parts) for parts in range(1, size + 1) if size % parts == 0]
        raise ProbeError(
            f"{size} {what} do not divide over {axis}({ranks}): {size} % {ranks} = {size % ranks}; {reason}",
            f"choose {axis} from {', '.join(fitting)}",
        )


def refuse_empty(mesh: Mesh, axis: str, size: int, what: str, reason: str) -> None:
    """Refuse a mesh on which `torch.chunk` leaves a rank with nothing; arguments as in `refuse_uneven`.

    Raises:
        ProbeError: Some rank would get nothing.
    """
    ranks = mesh.axis_size(axis)
    chunk = -(-size // ranks)
    used = -(-size // chunk)
    if used < ranks:
        fitting = [str(parts) for parts in range(1, size + 1) if -(-size // -(-size // parts)) == parts]
        raise ProbeError(
            f"{size} {what} over {axis}({ranks}) make chunks of {chunk}, which leaves {ranks - used} of {ranks} ranks "
            f"with none: {used} * {chunk} >= {size}; {reason}",
            f"choose {axis} from {', '.join(fitting)}",
        )
