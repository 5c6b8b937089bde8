"""Causes that all tensors of two checkpoints show together: what training, an average or a transfer did otherwise."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class LeftAsMade(Cause, kind="write-not-applied"):
    """Tensors still are the number that they were made with, and all others are equal.

    A transfer that goes over `named_parameters()` leaves out buffers, and a load with strict=False takes what is given.
    The receiver keeps its initial values.

    Attributes:
        side: Which checkpoint has it.
        equal: How many tensors are equal.
    """

    number: str
    side: str
    equal: int
    why = (
        "Nothing sent or loaded these tensors: the {side} has {number} everywhere, their initial value, and {equal} "
        "others are equal. Buffers are not in named_parameters()",
        "The code sets them to {number}",
    )
    how = (
        "send and load the whole state_dict(), which has buffers too, with strict=True",
        "compare what resets them",
    )


class ShardsOfOneRank(Cause, kind="write-not-applied"):
    """Each of these tensors differs in one of several equal parts: the shard of one rank.

    Code that only one rank runs, as `if rank == 0`, is right for replicas. Once tensors are sharded it updates, loads
    or saves that rank's shards alone.

    Attributes:
        number: Which part, counted from 0.
        initial: Which checkpoint still has initial values there; empty if that is not seen.
    """

    number: int
    parts: int
    initial: str = ""
    why = (
        "The part that differs is rank {number}'s shard of each tensor if {parts} ranks share them: {initial:?the "
        "{initial} has initial values there, so that rank never updated, loaded or sent its shards|that rank updated, "
        "loaded or saved its shards differently from the rest}"
    )
    how = (
        "run the update, the load and the save on every rank: code under `if rank == 0` reaches that rank's shards only"
    )


class DecayDiffers(Cause):
    """Matrices of two checkpoints differ by one factor near 1, and by other small changes.

    Weight decay multiplies by 1 - lr * weight_decay in each step. Parameter groups are often chosen by p.dim() or by
    name. Once FSDP1 has flattened parameters none has two dims, and a wrapper changes names.

    Attributes:
        factor: By how much matrices of one are larger.
        larger: Which checkpoint.
        smaller: The other one.
    """

    factor: str
    larger: str
    smaller: str
    why = (
        "All matrices of the {larger} are about {factor} times those of the {smaller}, and biases and "
        "norms are not: weight decay shrinks them less there, or not at all"
    )
    how = (
        "compare weight_decay and the learning rate of both, and which parameters are in each group: choose groups "
        "before the model is wrapped or sharded, or by name"
    )


class UpdatesDiffer(Cause):
    """Every tensor differs by about as much in each element, however large its values are.

    Adam and its relatives move each element by about the learning rate in each step. Roundings and wrong factors grow
    with the values instead.

    Attributes:
        most: The largest difference of an element.
    """

    most: str
    why = (
        "Elements of every tensor differ by up to about {most}, large and small ones alike, as optimizer steps make "
        "it: the two are a step or a few apart, as if a snapshot shares memory with the weights and is written later",
        "Both are of one step, and gradients or the learning rate of a few steps before differ",
    )
    how = (
        "compare the steps at which both were saved, and clone() the snapshot: cpu() and detach() of a CPU tensor copy "
        "nothing",
        "trace a step of both jobs and compare them (shardviz run --trace)",
    )


class RoundingDifference(Cause):
    """A tensor differs by no more than a few roundings of its dtype.

    Two right runs differ like this. Another number of ranks, another kernel or another machine sums in a different
    order, each sum is rounded differently, and the optimizer passes that on. It grows with every step.
    """

    dtype: str
    why = (
        "The two runs rounded differently, as sums in a different order do in {dtype}: the difference is as small as a "
        "few roundings. Different numbers of ranks, kernels or machines are enough",
        "One optimizer step with a learning rate near zero lies between the two",
    )
    how = (
        "accept it, or compare with a tolerance; equal bits need the same number of ranks and deterministic kernels",
        "compare the steps that the two were saved at",
    )
