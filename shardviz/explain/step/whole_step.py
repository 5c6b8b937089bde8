"""Causes of a wrong step as a whole: labels, draws or programs differ."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class UncheckedLabel(Cause, kind="wrong-shape"):
    """A result's local shape is not the one that its placements give.

    `DTensor.from_local` believes the placements that it is given. A label that does not fit the data makes every later
    operation read the wrong elements.
    """

    why = "Code labels the result without looking at its shape, as DTensor.from_local does"
    how = "pass the placements that fit the local shape"


class CopiesSideBySide(Cause, kind="wrong-shape"):
    """A result is larger than it should be, because copies were gathered as if they were parts.

    An all_gather over an axis whose ranks hold the same puts equal blocks one after the other. Only the size shows it.

    Attributes:
        held: Its size.
        axes: The axes whose size is the factor: `dp or tp`.
        due: The size that the dim should have.
    """

    dim: int
    held: int
    axes: str
    size: int
    due: int
    why = (
        "Dim {dim} is {held}, {axes}={size} times {due}: the code puts copies along {axes} side by side as if they "
        "were different parts"
    )
    how = "gather dim {dim} over {axes} once, or not at all if every rank along {axes} has all of it"


class SplitTwice(Cause, kind="wrong-shape"):
    """A result is smaller than it should be, because a part was split again.

    A sampler or the launcher splits the batch, and the step splits its part once more. Each rank then works on a part
    of a part, and the rest is never computed.

    Attributes:
        held: The size that its parts make together.
        due: The size that the dim should have.
    """

    dim: int
    axis: str
    held: int
    size: int
    due: int
    why = (
        (
            "The parts of dim {dim} over {axis} make {held} together, 1/{size} of {due}: the step splits a part that "
            "BATCH_AXES or a sampler already split"
        ),
        "Each rank returns only some of its part",
    )
    how = (
        "split dim {dim} over {axis} once",
        "return all of the rank's part",
    )


class PartLabeledWhole(Cause, kind="wrong-shape"):
    """A result is one rank's part and is labeled as the whole.

    A plain local tensor was returned, or labeled as replicated. Its size along one dim is that of a shard.

    Attributes:
        held: Its size.
        axes: The axes that may split it: `dp or tp`.
        due: The size that the dim should have.
    """

    dim: int
    held: int
    axes: str
    size: int
    due: int
    why = (
        "Dim {dim} is {held}, and {axes}={size} such parts make {due}: the code labels a part along {axes} as the whole"
    )
    how = "gather dim {dim} over {axes}, or label it as split over {axes}"


class DifferentOutput(Cause, kind="wrong-shape"):
    """The sharded model returns a tensor of a different shape than the unsharded one.

    No axis explains the sizes. The two models return different tensors, or different parts of one.
    """

    why = "The sharded model returns a different tensor than the unsharded model, or a different part of it"
    how = "return the same tensor from both, or put the parts in order with whole_output(output, mesh) in the probe"


class IdenticalMasks(Cause, kind="identical-shards"):
    """Ranks that hold different parts of an activation drop the same elements of each.

    The model seeds all ranks alike before it draws a dropout mask. Each rank's mask looks random, and only a comparison
    between ranks shows that they are equal.
    """

    axes: str
    why = "{axes} splits the activation, and the model seeds its ranks alike before it draws the mask"
    how = (
        "seed by the coordinate along {axes} for split activations (a separate generator, or Megatron-LM's "
        "get_cuda_rng_tracker), and alike for copies"
    )


class DifferentMasks(Cause):
    """Ranks that hold copies of an activation drop different elements of it in training.

    Their random states differ, because they were seeded by rank or drew different amounts before. In `eval()` there is
    no dropout, so the copies agree there.
    """

    axes: str
    kinds = ("unreplicated", "wrong-value")
    why = (
        (
            "Ranks along {axes} draw different dropout masks for copies of one activation: the ranks are seeded "
            "differently"
        ),
        "Some ranks drew more random numbers before the mask",
    )
    how = (
        "give ranks along {axes} the same seed before they drop copies: torch.manual_seed, or a separate generator",
        "draw the same amount on every rank, or drop copies with a separate generator",
    )


class WeightOnSomeRanks(Cause):
    """Wrong ranks lack a weight or buffer that the right ranks compute with.

    The module that has it was made or loaded on some ranks only. The others compute without it instead of raising.

    Attributes:
        ranks: The ranks that lack it.
    """

    ranks: tuple[int, ...]
    weight: str
    why = "{weight} is missing on {ranks:ranks}, and the ranks that are right compute with it"
    how = "put {weight} on every rank"


class RankDependentCode(Cause):
    """Some ranks compute something different from the others, which are right.

    Code depends on the rank: a branch, a seed, an input or a buffer that is computed again. Ranks with equal shapes
    still work together without an error.
    """

    ranks: tuple[int, ...]
    kinds = ("wrong-value", "wrong-scale")
    why = "The code on {ranks:ranks} computes something different from the other ranks, which are right"
    how = "look for code that depends on the rank: an input, a seed, a branch, a buffer that the rank computes again"


class UnexplainedCopies(Cause):
    """Copies of a result differ between ranks, and no reduction of them is right.

    Each rank computes something of its own. Nothing compares copies in a running job.

    Attributes:
        place: What is known of the place where the step goes wrong.
    """

    axes: str
    place: Cause
    why = "Copies differ from rank to rank along {axes}, and no sum or mean of them is right"
    how = "{place.fix}"


class MemoryNeverWritten(Cause):
    """A result is larger than any sum of right numbers could be.

    Memory from torch.empty holds whatever stood there before. If the collective or the copy that should fill it is
    missing, writes into another tensor, or is not waited for, the step computes with that.
    """

    why = (
        "The step reads memory that nothing was written to: a torch.empty whose all_gather, recv or copy_ is missing, "
        "fills another tensor, or is not waited for",
        "A number overflows on the way, such as an exp from which the maximum over all ranks was not subtracted",
    )
    how = (
        "look for torch.empty, empty_like and new_empty, and for async_op=True without wait()",
        "subtract the maximum over all ranks before exp",
    )


class UnexplainedForward(Cause):
    """The forward of the sharded model goes wrong, and no rule explains how.

    No module is clearly the first wrong one: the model's own code goes wrong, or the two models call different
    modules.
    """

    why = "No rule explains how the sharded step differs from the unsharded model"
    how = "compare the outputs module by module, first to last, and look at the first that differs"


class UnexplainedBackward(Cause):
    """A gradient is wrong although outputs and loss are right, and no rule explains it.

    Only backward can have done that: a collective whose backward does not match its forward, or a term of the loss
    that the sharded step scales differently.

    Attributes:
        is_of_loss: Whether the gradient that comes back to the model's output is wrong already.
        moved: A collective that moves numbers between the model and the loss and has no backward: `all_gather`.
        place: The line that calls it, as `loss.py:31`.
        is_unseen: Whether nobody recorded the loss: it may be wrong itself.
    """

    is_of_loss: bool = False
    moved: str = ""
    place: str = ""
    is_unseen: bool = False
    why = (
        "{moved:?The loss is right, and {moved} in {place} has no backward: what ranks compute from other ranks' "
        "numbers sends no gradient back to those ranks|}",
        "{is_of_loss:?{is_unseen:?The model's outputs are right, and the loss, which was not recorded, sends a wrong "
        "gradient back to them|The loss is right, and it sends a wrong gradient back to the model's output}|The "
        "sharded step goes wrong in backward, although the outputs{is_unseen:?| and the loss} are right}",
    )
    how = (
        "{moved:?in {place}, use torch.distributed.nn.functional, or a torch.autograd.Function whose backward sums the "
        "gradients and returns the rank's own part|}",
        "{is_of_loss:?look between the model's output and backward(): {is_unseen:?at what each rank computes from its "
        "own rows alone, such as a mean, a variance or a count, |}at a replaced backward (in loss_parallel, every "
        "log_softmax), a collective without a backward, a detached or scaled term|look for a collective without a "
        "backward, or with one that doesn't match its forward, and for a loss term that the step scales differently}",
    )


class UnexplainedWeightGradients(Cause):
    """Gradients of weights are wrong, although all that their modules get is right.

    So the gradients of activations are not at fault. What makes a weight's gradient of them, or changes it afterwards,
    differs, and no rule explains how.
    """

    why = (
        "The modules of these weights get the right inputs and the right gradients. The step does something else with "
        "the weights' own gradients"
    )
    how = (
        "look at reductions and hooks of these gradients, at how micro-batches add up, at what writes into .grad, and "
        "at uses of the weights outside of their modules"
    )


class MisplacedWeights(Cause, kind="misordered"):
    """Two jobs start from the same numbers, at different places or under different names.

    One of them loads or shards rows in a different order than its placements say, or gives a weight to a second name.

    Attributes:
        is_exchanged: Whether a weight has all values of a different weight.
    """

    is_exchanged: bool = False
    why = (
        "{is_exchanged:?One job loads a weight under a different name than the other|A loader or the sharding puts "
        "rows in different places than the placements say}"
    )
    how = (
        "{is_exchanged:?compare the keys that both jobs load, and run shardviz check on each|run shardviz check on "
        "each job: it names the order}"
    )


class WeightsDrawnAfterSharding(Cause):
    """Two runs on different meshes start from weights that were drawn after sharding.

    A random tensor that each rank draws for its own shard depends on how many ranks there are. Neither run is wrong.
    """

    why = "Both runs drew their weights after sharding, so the values depend on the mesh. No step is at fault"
    how = "load the same weights into both runs to compare the steps"


class RowsSentByOneRank(Cause, kind="wrong-value"):
    """All ranks are given the rows of one rank, and the rows of the others are dropped.

    `distribute_tensor` takes the whole tensor from the first rank of a mesh and sends it to the others: each rank's own
    argument is ignored. Given a rank's part of the batch, it splits the first rank's part once more.

    Attributes:
        axis: The axis along which ranks have different rows.
        place: The line that sends them, as `train.py:43`; empty if it is not known.
        is_scattered: Whether each rank gets a piece of the rows, not all of them.
    """

    axis: str
    place: str
    is_scattered: bool
    why = (
        "{place:?{place}|A collective} {is_scattered:?splits one rank's rows over all ranks along {axis}|sends one "
        "rank's rows to all ranks along {axis}}, and drops the rows that the others had. distribute_tensor does this: "
        "it takes its tensor from the first rank"
    )
    how = (
        "each rank has its rows already: {is_scattered:?label them, DTensor.from_local(rows, mesh, (Shard(0),))|gather "
        "them, DTensor.from_local(rows, mesh, (Shard(0),)).full_tensor()}"
    )


class RowsOfPeers(Cause):
    """Ranks that share a layer's weights are given different rows of the batch.

    Tensor-parallel ranks must be given the same rows: each computes a part of the features, and a later sum joins the
    parts. With rows of their own the sum adds features of different rows. Shapes fit, and the loss still falls. A
    DistributedSampler numbers all ranks unless it is given the data-parallel ones.

    Attributes:
        module: The first module whose weights the ranks share.
        is_only_axis: Whether all ranks are along the axis, so that no axis is left to number a sampler by.
    """

    module: str
    axis: str
    is_only_axis: bool = False
    why = (
        "Ranks along {axis} are given different rows of the batch, and {axis} also splits the features of "
        "{module:called}: the parts that belong together are of different rows"
    )
    how = (
        "give all ranks along {axis} the same rows: {is_only_axis:?DistributedSampler(num_replicas=1, rank=0), or no "
        "such sampler|number the sampler by the other axes alone, num_replicas=dp.size() and rank=dp.get_local_rank()}"
    )


class DifferentProgram(Cause):
    """The unsharded models of two runs differ, from the same weights and the same rows.

    Sharding has no part in it. Options, dtypes, kernels and versions of torch change what a module computes.
    """

    why = (
        "Both models are unsharded, so no sharding is at fault: the program, its options, a kernel or the torch "
        "version differs"
    )
    how = "compare the options, dtypes, kernels and torch versions of both runs"
