"""Causes in a gradient's scale that each rank chooses by itself."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class ScaledBeforeReduction(Cause, kind="unreduced-gradient"):
    """Nothing reduces gradients before each rank scales its own.

    Clipping divides a rank's gradients by their norm, a loss scaler by its scale. Ranks' gradients are of their own
    rows, and so are the norms. After that no sum or mean of the gradients is right.

    Attributes:
        axes: The axes along which ranks have their own terms of the gradients.
        op: The reduction that is missing, as torch calls it.
        scales: What each rank multiplies its gradients by, relative to the unsharded model's, as `0.61 on rank 0`.
    """

    axes: tuple[str, ...]
    op: str
    scales: str
    why = (
        "Each rank along {axes} has its own gradients, of its own rows, and multiplies them by a number of its own, as "
        "clipping to a norm does. Nothing reduces them over {axes} before"
    )
    how = (
        "all_reduce the gradients over {axes} with ReduceOp.{op} after backward, and store the result in .grad, before "
        "anything clips or scales them"
    )
