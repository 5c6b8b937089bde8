"""Steps of two jobs or runs that differ: by where they begin, by what they draw, and by how losses are averaged."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class UnexplainedJobStep(Cause):
    """A module's result in one job is not the other job's, and nothing more is known of it.

    shardviz looks for the cause at the first module that differs. This is what remains if no rule fits.
    """

    kinds = ("wrong-value",)


class UnequalLossCounts(Cause):
    """Ranks divide their losses by unequal counts, and the losses are then averaged.

    The mean of the ranks' means is not the loss of the whole batch. A mean over the labels that are not ignored counts
    other numbers on each rank. Averaging the ranks' gradients then weights tokens by the rank that they are on. Every
    number is finite and nearly right.
    """

    kinds = ("wrong-scale",)
    why = (
        "The loss is a mean of means: each rank divides by what it counts in its own part of the batch (labels that "
        "are not ignored, tokens), and these counts are unequal"
    )
    how = (
        "divide each rank's sum by the count of all ranks, all_reduced, and multiply by the number of ranks over which "
        "gradients are averaged"
    )


class CopiesDropDifferently(Cause):
    """Ranks that hold copies of an activation drop different elements of it.

    Dropout draws from each rank's own generator. Seeded by the global rank, copies get different masks, and from there
    on they are not copies any more.

    Attributes:
        axis: The axis along which the copies are.
    """

    axis: str
    kinds = ("wrong-value",)
    why = (
        "Each rank along {axis} draws a mask of its own for what all of them hold alike: the ranks are seeded "
        "differently there"
    )
    how = (
        "seed ranks along {axis} alike where they hold copies, and by their coordinate only where {axis} splits what "
        "is dropped"
    )


class PartsDropAlike(Cause):
    """Ranks that hold different parts of an activation drop the same elements of each.

    With one seed on all ranks, each draws the same mask for its own part. The masks of the parts should be independent,
    and the model learns a little worse.

    Attributes:
        axis: The axis that splits the activation.
    """

    axis: str
    kinds = ("identical-shards",)
    why = "The ranks along {axis} are seeded alike, though {axis} splits what is dropped"
    how = "seed by the coordinate along {axis} where an activation is split over it"


class DifferentWeights(Cause):
    """Two runs do not start from the same weights.

    Everything that they compute differs from the first module on, so their steps cannot be compared.

    Attributes:
        of_jobs: Whether they are jobs of several ranks.
    """

    of_jobs: bool = False
    kinds = ("wrong-value",)
    why = (
        "{of_jobs:?another seed, another order of drawing (as where weights are drawn after sharding) or another "
        "checkpoint: start both jobs from the same weights; the step was not compared|another seed, another order of "
        "drawing, or another checkpoint: start both from the same weights}"
    )


class MisplacedWeights(Cause):
    """Two jobs start from the same numbers, in different places of a weight.

    One of them loads or shards rows in another order than its placements say.
    """

    kinds = ("misordered",)
    why = "A loader or the sharding puts rows elsewhere than placements say: shardviz check finds the order"


class WeightsDrawnAfterSharding(Cause):
    """Two runs on different meshes start from weights that were drawn after sharding.

    A random tensor that each rank draws for its own shard depends on how many ranks there are. Neither run is wrong.
    """

    kinds = ("wrong-value",)
    why = (
        "They were drawn after sharding, so that their values depend on the mesh: no step is at fault. To compare the "
        "steps, load the same weights into both"
    )


class DifferentBatch(Cause):
    """Two runs are not given the same rows.

    Another seed of the sampler, another order of the data or another number of rows for each rank is enough.

    Attributes:
        of_jobs: Whether they are jobs of several ranks.
    """

    of_jobs: bool = False
    kinds = ("wrong-value",)
    why = (
        "{of_jobs:?another batch, another order of data or another batch size per rank: give both jobs the same rows "
        "in all|another batch: give both runs the same rows}"
    )


class DifferentProgram(Cause):
    """The unsharded models of two runs differ, from the same weights and the same rows.

    Sharding has no part in it. Options, dtypes, kernels and versions of torch change what a module computes.
    """

    kinds = ("wrong-value",)
    why = (
        "both are unsharded models, so no sharding is at fault: another program, other options, another kernel or "
        "another torch"
    )
