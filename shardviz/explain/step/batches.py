"""Causes in the rows that ranks or jobs are given: other rows, another order, own normalization, equal draws."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class DrawnAlike(Cause):
    """Every rank draws the same random numbers for rows of its own.

    Timesteps, noise or masks that a job draws for its rows must differ by rank, as the rows do. With one seed on all
    ranks, each draws what one process draws for the first rows, and rows of different ranks share their noise.

    Attributes:
        size: How many rows each rank draws for.
    """

    size: int
    why = (
        "All ranks seed the generator alike, and each draws for its own {size} rows what one process draws for the "
        "first {size} of all rows"
    )
    how = (
        "draw for all rows on every rank, and take the part of the rank's own rows; or seed the generator by the "
        "rank's coordinate along the axes that split the rows"
    )


class OtherRowLength(Cause):
    """The rows of a later step differ in length from those of the other job.

    A curriculum lengthens the sequences as training goes on. If it counts the rows or tokens that one rank has seen,
    it goes on more slowly on more ranks.

    Attributes:
        step: The step.
        length: How long the rows are.
        wanted: How long those of the other job are.
        as_in: Another step, in which the other job's are as long as these.
    """

    step: int
    length: int
    wanted: int
    as_in: int
    why = (
        "In step {step} the rows have a length of {length}, and the other job's {wanted}: the other job has {length} "
        "in step {as_in}. What chooses the length depends on a rank's own count of rows, tokens or batches"
    )
    how = "choose the length by the optimizer's steps, or by a count that is the same on all ranks and in one process"


class RowsSplitTwice(Cause):
    """The ranks of a job never read some of the rows that one process reads.

    Data that a data set splits between ranks is split once more by a sampler, or by a loader that sends the first
    rank's rows to all: accelerate and transformers' Trainer do so with an iterable data set. Each rank then has as many
    rows as it should, and an epoch ends early.

    Attributes:
        times: Of so many rows one is read.
        is_every: Whether these are so many apart.
        is_of_ranks: Whether there are as many ranks with rows of their own.
    """

    times: int
    is_every: bool
    is_of_ranks: bool
    why = (
        "Only one row of {times} is read{is_every:?, at equal distances|}: {is_of_ranks:?the data is split between the "
        "ranks twice, by the data set or its sampler and once more by the loader|a sampler counts more ranks than "
        "there are}"
    )
    how = (
        "{is_of_ranks:?split it once: give accelerate or the Trainer a data set that each process reads whole, or turn "
        "their split off, and give a sampler a data set that is not sharded|give the sampler the number of ranks that "
        "read data, and the rank's place among them}"
    )


class WholeBatchPerRank(Cause):
    """Each rank's loader has the batch size that was meant for all ranks.

    The batch size of most loaders counts for one process. The step then trains on as many times the rows as there are
    ranks, with a learning rate that was chosen for fewer.
    """

    why = "The loader's batch size counts for each rank, and is that of the other job's whole batch"
    how = "divide it by the number of ranks that split the batch (accelerate: split_batches=True)"


class NormalizedByOwnRows(Cause):
    """Each rank normalizes what it reads by the mean and deviation of its own rows.

    A scaler that is fitted on a rank's part of the data, or statistics of the rank's own batch, give every rank numbers
    of another scale. They are near the right ones, so training goes on and is only a little worse.

    Attributes:
        is_own: Whether ranks differ from each other, too.
    """

    is_own: bool = True
    why = (
        "{is_own:?Each rank normalizes columns by its own numbers, such as its rows' mean and deviation|The jobs "
        "normalize columns by different means and deviations}"
    )
    how = (
        "{is_own:?all_reduce the sums, the sums of squares and the counts before you divide, or take statistics that "
        "were made once of all rows|take the same statistics in both jobs}"
    )


class FilledBatch(Cause):
    """A loader fills the last batch of an epoch with rows of an earlier step.

    Each rank then has equally many, and none waits for the others. DistributedSampler without drop_last and accelerate
    (even_batches) take the first rows of the epoch for it. These count twice in the epoch, and the last step's mean is
    of other rows than in one process.
    """

    why = "The loader fills up the epoch's last batch with rows that were already read, so that ranks have equally many"
    how = (
        "leave the incomplete batch out in both jobs (drop_last=True of DataLoader, and of DistributedSampler), or "
        "don't fill it up (accelerate: even_batches=False, with join_uneven_inputs)"
    )


class DifferentBatch(Cause):
    """Two runs do not get the same rows.

    A different sampler seed, order of the data or number of rows per rank is enough.

    Attributes:
        of_jobs: Whether they are jobs of several ranks.
        is_resumed: Whether it goes on from a checkpoint there: it made fewer steps before, or made a new model.
    """

    of_jobs: bool = False
    is_resumed: bool = False
    why = (
        "{is_resumed:?A job that goes on from a checkpoint doesn't begin with the rows that come next|The "
        "{of_jobs:?jobs|runs} read different batches, or the same rows in a different order{of_jobs:?, or a rank's "
        "batch size differs}}"
    )
    how = (
        "{is_resumed:?save how many rows all ranks together have read, with the sampler's epoch and seed, and "
        "skip as many|give both "
        "{of_jobs:?jobs|runs} the same rows{of_jobs:? in total}}"
    )


class OrderBeginsAgain(Cause):
    """Ranks are given an earlier step's rows again in their order; another job has others.

    A DistributedSampler shuffles by its seed and the number of the epoch, which only `set_epoch` gives it. If one rank
    alone is not given it, ranks have rows of different shuffles: some rows twice in an epoch, and others not at all.

    Attributes:
        step: The earlier step.
        who: The ranks, in words: `rank 1`; empty if it is all of them.
    """

    step: int
    who: str = ""
    why = (
        "{who:?On {who} nothing|Nothing} gives the sampler the number of the epoch, so its order begins again",
        "The data of {who:?{who}|the ranks} ends earlier than in the other job, and begins again",
    )
    how = ("call sampler.set_epoch(epoch) on every rank, before each epoch", "give each rank as many rows")


class OwnOrder(Cause):
    """Some ranks shuffle the data in an order of their own.

    Some rows then come on several ranks, and others on none. A shuffle that draws from the global random state has
    another order on each rank, if that is seeded with the rank, as for augmentation or dropout. Each rank takes every
    n-th row of its own order.

    Attributes:
        who: The ranks that have another order, in words; empty if it is all of them.
    """

    who: str = ""
    why = (
        "{who:?The data is shuffled in a different order on {who}|Each rank shuffles the data in an order of its own}: "
        "by the global random state, or by a seed that depends on the rank"
    )
    how = (
        "draw the order from a generator with one seed for all ranks, such as torch.randperm(n, generator=generator), "
        "or use DistributedSampler, and seed each rank differently only for what comes after it"
    )


class SharedRows(Cause):
    """Several ranks are given the same rows of the batch, and no rank is given others.

    A sampler, or a slice of the batch, is made for fewer ranks than there are: it uses one coordinate of the mesh and
    leaves out another, or its stride is smaller than the rows that it takes. The loss looks right, and the job learns
    from less data.

    Attributes:
        axes: The axes along which all ranks have the same rows; empty if only some rows of neighbors are the same.
    """

    axes: tuple[str, ...] = ()
    why = (
        "{axes:?What chooses a rank's rows leaves out its coordinate along {axes}|The slices of the batch overlap: "
        "one begins before the one before ends}"
    )
    how = (
        "{axes:?number the ranks of the sampler over all axes that split the batch, {axes} included|start each "
        "slice where the one before ends}"
    )


class RowsPairedOtherwise(Cause):
    """Ranks are given rows of two inputs that do not belong together.

    Images and texts, or tokens and masks, come from two samplers or slices that divide the rows differently. Each input
    alone is the other job's in another order.
    """

    why = "The code chooses a rank's rows of the two inputs differently: by two samplers, seeds, slices or strides"
    how = "choose the rows once, and take the same ones of every input: keep the inputs in one data set"
