"""Causes in a number that gradients are multiplied by: a rank's own norm or shares, or what backward runs on."""

from __future__ import annotations

import math

from shardviz.explain.cause import AtPlace, Cause
from shardviz.relate.tolerance import SINGLE


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
        "A term of the loss of each expert's share of tokens and mean probability, such as a balance loss, has a "
        "different factor. What this sends back to {router} is off by the same multiple of it on all ranks"
    )
    how = (
        "look at the numbers that the term divides by: shares that are summed over ranks need the number of all ranks' "
        "tokens, and a term that is added for each rank or micro-batch needs their number"
    )


class BackwardLine(AtPlace, kind="wrong-scale"):
    """Backward runs on a number that isn't the loss.

    A loss scale that nothing takes out, losses of micro-batches that nothing divides, or the rank's term of a sum where
    the gradients are averaged. The step returns the right loss, and all gradients have one factor.

    Attributes:
        times: The number by which what it runs on is too large, in the mean over ranks.
        count: How many backward passes the step runs.
        by: The number of ranks that the code multiplies the loss by, a multiple of `times`; 0 if it does not.
    """

    times: float
    count: int = 1
    by: int = 0
    why = (
        "Backward in {place} runs on {is_of_micro_batches:?the losses of {count} micro-batches, and nothing divides "
        "them by {count}|{times:.5g} times the loss, in the mean over ranks, and nothing makes up for it "
        "afterwards{by:?. The code multiplies it by {by}, a number of ranks}}"
    )
    how = (
        "{due:?multiply it by {due}, the number of ranks over which gradients are averaged, not by {by}; or |"
        "{by:?don't multiply it by {by}; or |}}"
        "{is_of_micro_batches:?divide each loss by {count} before {place}|{is_share:?multiply what backward() in "
        "{place} runs on by {inverse:.5g}|call backward() in {place} on the loss itself}, or divide the gradients by "
        "{times:.5g} afterwards}"
    )

    @property
    def is_share(self) -> bool:
        """Whether it is less than the loss, as a rank's term of it is in the mean over ranks."""
        return 0 < self.times < 1

    @property
    def due(self) -> int:
        """The number of ranks by which the code should multiply the loss instead; 0 if by none."""
        number = round(self.by / self.times) if self.times else 0
        return number if number > 1 else 0

    @property
    def inverse(self) -> float:
        """What makes it the loss."""
        return 1 / self.times if self.times else 0.0

    @property
    def is_of_micro_batches(self) -> bool:
        """Whether the number is that of the backward passes."""
        return self.count > 1 and not self.by and math.isclose(self.times, self.count, rel_tol=SINGLE)
