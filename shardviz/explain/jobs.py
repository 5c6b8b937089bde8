"""Steps of two jobs or runs that differ: by where they begin, by what they draw, and by how losses are averaged."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class UnexplainedJobStep(Cause):
    """A module's result in one job is not the other job's, and nothing more is known of it.

    shardviz looks for the cause at the first module that differs. This is what remains if no rule fits.
    """

    kinds = ("wrong-value",)


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
