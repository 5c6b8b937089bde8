"""What torch refuses, said before it does: which meshes a probe cannot take, with the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.errors import ProbeError

if TYPE_CHECKING:
    from shardviz.layout.mesh import Mesh


def refuse_uneven(mesh: Mesh, axis: str, size: int, what: str, reason: str) -> None:
    """Refuse a mesh whose axis does not divide something.

    Args:
        mesh: The mesh that was asked for.
        axis: The axis that splits it.
        size: How long it is.
        what: What it is: `attention heads`.
        reason: Why torch needs it to divide, in its own words where it has any.

    Raises:
        ProbeError: It does not divide.
    """
    ranks = mesh.axis_size(axis)
    if size % ranks:
        fitting = [str(parts) for parts in range(1, size + 1) if size % parts == 0]
        raise ProbeError(
            f"{size} {what} do not divide over {axis}({ranks}): {size} % {ranks} = {size % ranks}; {reason}",
            f"take {axis} of {', '.join(fitting)}",
        )


def refuse_empty(mesh: Mesh, axis: str, size: int, what: str, reason: str) -> None:
    """Refuse a mesh with a rank that `torch.chunk` would leave with nothing; arguments as in `refuse_uneven`.

    Raises:
        ProbeError: There is such a rank.
    """
    ranks = mesh.axis_size(axis)
    chunk = -(-size // ranks)
    used = -(-size // chunk)
    if used < ranks:
        fitting = [str(parts) for parts in range(1, size + 1) if -(-size // -(-size // parts)) == parts]
        raise ProbeError(
            f"{size} {what} over {axis}({ranks}) are chunks of {chunk}, which leaves {ranks - used} of {ranks} ranks "
            f"with none: {used} * {chunk} >= {size}; {reason}",
            f"take {axis} of {', '.join(fitting)}",
        )
