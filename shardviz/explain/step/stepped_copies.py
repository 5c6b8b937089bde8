"""Causes of steps of copies that a job's own code makes of weights."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class StaleCopies(Cause, kind="write-not-applied"):
    """The optimizer steps copies of weights that had other values before the step.

    Masters in float32 are copied before weights are broadcast, loaded or initialized, or an earlier step wasn't copied
    back on a rank. The step goes on from the copies, and what the forward computed its gradients with is lost.

    Attributes:
        steps: How many steps were made before.
    """

    steps: int = 0
    why = (
        "The copies were made before the weights got their values on this rank: by a broadcast, a load or an "
        "initialization",
        "{steps:?An earlier step wasn't copied into the weights|}",
    )
    how = (
        "copy the weights again after the last broadcast or load, and before the first step",
        "{steps:?copy what is stepped into the weights on every rank|}",
    )


class StepNotCopied(Cause, kind="write-not-applied"):
    """The optimizer steps copies of a weight, and the weight becomes something else.

    A loop that copies masters in float32 into the weights runs on some ranks only, or leaves weights out. Gathered
    parts are joined in another order, or with offsets that leave out the padding.

    Attributes:
        is_other: Whether the weight changes, too.
    """

    is_other: bool = False
    why = (
        "The optimizer steps copies of the weights, with right gradients, and {is_other:?what is written into this "
        "weight afterwards is something else|nothing copies the result into this weight on these ranks}",
        "{is_other:?The optimizer steps the copies in different parameter groups, or several times|The ranks receive "
        "the result from a rank that doesn't step it}",
        "{is_other:?Something else changes the weights or the copies before the next forward|}",
    )
    how = (
        "{is_other:?look at the order in which gathered parts are joined, at offsets and padding, and at the source of "
        "each broadcast|after the step copy every copy into its weight, on every rank}",
        "{is_other:?make the groups of the copies as those of the weights|broadcast each weight from the rank that has "
        "the copy of it}",
        "{is_other:?look at what prunes, clamps or averages weights between steps|}",
    )
