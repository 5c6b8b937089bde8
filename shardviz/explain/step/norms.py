"""Causes in numbers of a rank's own that its gradients are multiplied by: a norm, or shares of its own rows."""

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


class BalanceOfOwnRows(Cause):
    """A balance term takes each expert's share of the tokens from a rank's own rows.

    The term multiplies the shares by the experts' mean probabilities. The mean of the ranks' products is not the
    product of the means, so each router's gradient is off, while the main loss and the outputs stay right.

    Attributes:
        router: The module whose output's gradient shows it.
        axes: The axes along which ranks have their own shares.
    """

    router: str
    axes: str
    why = (
        "The loss has a term of each expert's share of tokens, such as a balance loss, and each rank along {axes} "
        "takes the shares of its own rows. What this sends back to {router} is off by the difference of the shares"
    )
    how = (
        "all_reduce the counts of tokens per expert over {axes} before the term divides or multiplies them; leave the "
        "mean of the probabilities to each rank if gradients are averaged over {axes}"
    )


class BalanceScaled(Cause, kind="wrong-scale"):
    """A balance term counts more or less than it should, alike on all ranks.

    Attributes:
        router: The module whose output's gradient shows it.
    """

    router: str
    why = (
        "A term of the loss of each expert's share of tokens and mean probability, such as a balance loss, has another "
        "factor. What this sends back to {router} is off by the same multiple of it on all ranks"
    )
    how = (
        "look at the numbers that the term divides by: shares that are summed over ranks need the number of all ranks' "
        "tokens, and a term that is added for each rank or micro-batch needs their number"
    )
