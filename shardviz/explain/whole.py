"""Causes that concern a run as a whole: files and tensors that are not there, ranks of groups, gathering, suspects."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class DamagedFile(Cause):
    """A rank's file cannot be read, so nothing that the rank holds was checked.

    The file was copied before it was complete, or was cut off by a full disk. All other ranks are still checked.
    """

    kinds = ("incomplete",)
    why = "It was copied before it was complete, or cut off by a full disk"
    how = "copy the rank's files again, or write the dump again"


class RankWithoutFile(Cause):
    """The dump has no file of some ranks.

    Each rank writes its own file, so a rank that dies or hangs, or a disk that is not collected, leaves a gap. All
    other ranks are still checked.
    """

    kinds = ("incomplete",)
    why = "A rank died, hung or wrote to a disk that was not collected"
    how = "copy the rank_* files of every rank into the folder, or run again"


class ModuleAbsentOnRanks(Cause):
    """Some ranks of a tensor's mesh do not have the tensor.

    A condition on the rank drops or renames the module there. The ranks disagree on what the model is, and the first
    collective on the tensor hangs or pairs it with another one.
    """

    kinds = ("incomplete",)
    why = "The module was dropped or renamed on these ranks"
    how = "build the same modules on every rank"


class TensorAbsentEverywhere(Cause):
    """No rank has a tensor of the unsharded model, under any name.

    Its module was renamed, replaced or dropped while the model was sharded. The model runs without it.
    """

    kinds = ("incomplete",)
    why = "The module was renamed, replaced or dropped when the model was sharded"
    how = "keep the module's name, or leave it out of the model that is stamped"


class MeshNotRising(Cause):
    """The mesh lists its ranks in an order that does not rise; process groups go by rank.

    Placements count along the mesh, and collectives count along the group. If both differ, every gather along the axis
    comes back permuted, with the right shape.
    """

    kinds = ("rank-order",)
    why = "The mesh was built from ranks that do not rise, and process groups number their ranks by rank"
    how = "build the mesh by init_device_mesh, or give DeviceMesh ranks that rise along every axis"


class GroupAgainstMesh(Cause):
    """A process group was made by hand, with its ranks in another order than the mesh has them.

    Placements count along the mesh, and collectives count along the group. If both differ, every gather along the axis
    comes back permuted, with the right shape.
    """

    axis: str
    kinds = ("rank-order",)
    why = (
        "The process group along {axis} was made from its ranks in another order than the mesh has them, as by "
        "new_group with sort_ranks=False or a group that was handed to DeviceMesh.from_group"
    )
    how = (
        "build the mesh by init_device_mesh, which makes its groups itself, or make the group along {axis} from its "
        "ranks in the order of the mesh"
    )


class GatheredOutOfOrder(Cause):
    """The shards are right, and torch gathers them in the wrong order.

    The ranks of a process group are in another order than those of the mesh, or torch's collective is wrong for this
    layout: uneven shards are padded before it, and the padding is cut off in the wrong place. The result has the right
    shape.

    Attributes:
        is_uneven: Whether the shards differ in size.
    """

    is_uneven: bool
    kinds = ("collective-mismatch",)
    why = (
        "{is_uneven:?torch's own collective is wrong for shards of different sizes in this layout, or the process "
        "groups are not in the mesh's order|The process groups are not in the mesh's order, or torch's own collective "
        "is wrong for this layout}"
    )
    how = (
        "{is_uneven:?choose sizes that the axes divide|build the mesh by init_device_mesh, which makes its groups "
        "itself}, or redistribute one axis at a time; shardviz audit gives a repro to report"
    )


class UncheckedWeights(Cause):
    """The step is wrong for no known reason, and some weights could not be checked.

    Plain tensors that every rank computes again, or that are zero on some ranks, have no ids to compare. If they are
    wrong, the step's results are wrong and name the first module that shows it.

    Attributes:
        odd: For each of these weights its name, what is odd about it, and what to compare.
        step: The cause of the step's finding by itself.
    """

    odd: tuple[tuple[str, str, str], ...]
    step: Cause
    kinds = ("wrong-value",)
    why = "{step.cause}, of weights that could not all be checked: {odd_weights:3}"
    how = "compare first {to_compare:3}; where that is right, {step.fix}"

    @property
    def odd_weights(self) -> tuple[str, ...]:
        """The weights, each with what is odd about it."""
        return tuple(f"{name} is {what}" for name, what, _ in self.odd)

    @property
    def to_compare(self) -> tuple[str, ...]:
        """What to compare of each of the weights."""
        return tuple(f"{name}'s {what}" for name, _, what in self.odd)
