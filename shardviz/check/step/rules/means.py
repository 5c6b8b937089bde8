"""A loss that is a mean over each rank's part of the batch, where the mean of these means is not the whole batch's.

The outputs of the parts are those of the whole batch, so no batch statistics explain it, and its loss and gradients are
a weighted mean of theirs: the parts count unequally.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.records.step import WHOLE_LOSS
from shardviz.explain.losses import MeanOfMeans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_mean_of_means(evidence: Evidence) -> Iterator[Finding]:
    """Yield a warning where the ranks' losses have the mean that they should, and the whole batch has another."""
    whole = evidence.dump.find("reference", "scalar", WHOLE_LOSS)
    losses = [one for one in evidence.results if one.role == "scalar" and one.name == "loss"]
    if whole is None or not evidence.loss_is_right:
        return
    mean, due = (float(values) for values in (losses[0].wanted, evidence.dump.values(whole.first, WHOLE_LOSS)))
    yield MeanOfMeans().finding(
        "loss",
        tuple(sorted(losses[0].values)),
        f"the mean of the ranks' losses is {mean:.6g}, the unsharded model's loss of the whole batch is {due:.6g}, of "
        "equal outputs",
        severity="warning",
        details=("it is right if the loss should be the mean of the parts' means, by which gradients were compared",),
    )
