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
        "They come from another seed, another order of drawing{of_jobs:? (as where weights are drawn after sharding)} "
        "or another checkpoint{of_jobs:?, and the step was not compared}"
    )
    how = "start both {of_jobs:?jobs|runs} from the same weights"


class MisplacedWeights(Cause):
    """Two jobs start from the same numbers, in different places of a weight.

    One of them loads or shards rows in another order than its placements say.
    """

    kinds = ("misordered",)
    why = "A loader or the sharding puts rows elsewhere than placements say"
    how = "find the order with shardviz check"


class WeightsDrawnAfterSharding(Cause):
    """Two runs on different meshes start from weights that were drawn after sharding.

    A random tensor that each rank draws for its own shard depends on how many ranks there are. Neither run is wrong.
    """

    kinds = ("wrong-value",)
    why = "They were drawn after sharding, and their values depend on the mesh: no step is at fault"
    how = "load the same weights into both to compare the steps"


class DifferentBatch(Cause):
    """Two runs are not given the same rows.

    Another seed of the sampler, another order of the data or another number of rows for each rank is enough.

    Attributes:
        of_jobs: Whether they are jobs of several ranks.
    """

    of_jobs: bool = False
    kinds = ("wrong-value",)
    why = "The batch differs, or the order of data{of_jobs:?, or the batch size of a rank}"
    how = "give both {of_jobs:?jobs|runs} the same rows{of_jobs:? in all}"


class DifferentProgram(Cause):
    """The unsharded models of two runs differ, from the same weights and the same rows.

    Sharding has no part in it. Options, dtypes, kernels and versions of torch change what a module computes.
    """

    kinds = ("wrong-value",)
    why = (
        "Both are unsharded models, so no sharding is at fault: another program, other options, another kernel or "
        "another torch"
    )
