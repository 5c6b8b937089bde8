"""Causes that concern a whole run: missing files and tensors, groups, gathering, suspects."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class DamagedFile(Cause, kind="incomplete"):
    """A rank's file cannot be read, so nothing that the rank holds was checked.

    The file was copied before it was complete, or was cut off by a full disk. All other ranks are still checked.
    """

    why = (
        "The file was copied before it was complete",
        "A full disk cut the file off",
    )
    how = "copy the rank's files again, or write the dump again"


class RefusedFile(Cause, kind="incomplete"):
    """A rank's file is there and was not read, so nothing that the rank holds was checked.

    A dump comes from other machines: a link may lead anywhere, and is not followed. Another user's job may have written
    the file for itself alone. All other ranks are still checked.
    """

    why = "The file is a link or no plain file, or this user may not read it"
    how = "give the user the right to read it, or put a copy of what the link leads to in its place"


class DamagedNumbers(Cause, kind="incomplete"):
    """A rank's file was changed or replaced after it was written, so none of it was checked.

    Each file has a checksum, and names the rank and the run that wrote it. Each tensor in a file of numbers has a
    checksum, too. One of them no longer fits: a disk, a copy over a network or another program changed bytes, or gave
    a file another's name. The model is not to blame. All other ranks are still checked.
    """

    why = "A disk, a copy or another program changed or replaced the file; this says nothing of the model"
    how = "copy the file again from the machine that wrote it, or write the dump again"


class RankWithoutFile(Cause, kind="incomplete"):
    """The dump has no file of some ranks.

    Each rank writes its own file, so a rank that dies or hangs, or a disk that is not collected, leaves a gap. All
    other ranks are still checked.
    """

    why = (
        "A rank died or hung",
        "A rank wrote to a disk that was not collected",
    )
    how = (
        "run again",
        "copy the rank_* files of every rank into the folder",
    )


class ModuleAbsentOnRanks(Cause, kind="incomplete"):
    """Some ranks of a tensor's mesh do not have the tensor.

    A condition on the rank drops or renames the module there. The ranks disagree on what the model is, and the
    first collective on the tensor hangs or pairs it with a different tensor.
    """

    why = "The code drops or renames the module on these ranks"
    how = "build the same modules on every rank"


class TensorAbsentEverywhere(Cause, kind="incomplete"):
    """No rank has a tensor of the unsharded model, under any name.

    Its module was renamed, replaced or dropped while the model was sharded. The model runs without it.
    """

    why = "The code renames, replaces or drops the module when it shards the model"
    how = "keep the module's name, or leave the module out of the stamped model"


class SameModules(Cause, kind="incomplete"):
    """All ranks along an axis keep the same of several numbered modules, and no rank the others.

    Each rank is to have modules of its own, such as experts or the layers of a stage. The code that chooses them uses
    a coordinate that is the same on all ranks.

    Attributes:
        modules: What they are called, as `experts`.
        kept: The numbers of those that every rank has.
        axis: The axis that has as many ranks as there would be shares.
    """

    modules: str
    kept: str
    axis: str
    why = (
        "Every rank keeps {modules} {kept}, and no rank keeps the others. Most likely the code that chooses a rank's "
        "own ignores its coordinate on {axis}"
    )
    how = "choose each rank's modules by mesh.get_local_rank({axis!r})"


class MeshNotRising(Cause, kind="rank-order"):
    """The mesh lists its ranks in an order that does not rise; process groups go by rank.

    Placements count along the mesh, and collectives count along the group. If the two orders differ, every gather along
    the axis returns permuted shards, with the right shape.
    """

    why = "The mesh lists its ranks in an order that doesn't rise, and process groups number their ranks by rank"
    how = "build the mesh with init_device_mesh, or pass DeviceMesh ranks that rise along every axis"


class GroupAgainstMesh(Cause, kind="rank-order"):
    """A hand-made process group has its ranks in a different order than the mesh.

    Placements count along the mesh, and collectives count along the group. If the two orders differ, every gather along
    the axis returns permuted shards, with the right shape.
    """

    axis: str
    why = (
        "The process group along {axis} lists its ranks in a different order than the mesh (new_group with "
        "sort_ranks=False, or DeviceMesh.from_group)"
    )
    how = "build the mesh with init_device_mesh, or make the group along {axis} from its ranks in the mesh's order"


class GatheredOutOfOrder(Cause, kind="collective-mismatch"):
    """The shards are right, and torch gathers them in the wrong order.

    The ranks of a process group are in a different order than those of the mesh, or torch's collective is wrong for
    this layout: torch pads uneven shards before it, and cuts the padding off in the wrong place. The result has the
    right shape.

    Attributes:
        is_uneven: Whether the shards differ in size.
    """

    is_uneven: bool
    why = (
        (
            "{is_uneven:?torch's collective is wrong for shards of different sizes in this layout|The process groups "
            "aren't in the mesh's order}"
        ),
        "{is_uneven:?The process groups aren't in the mesh's order|torch's collective is wrong for this layout}",
    )
    how = (
        (
            "{is_uneven:?choose sizes that the axes divide, or redistribute one axis at a time; shardviz audit gives a "
            "repro to report|build the mesh with init_device_mesh}"
        ),
        (
            "{is_uneven:?build the mesh with init_device_mesh|redistribute one axis at a time; shardviz audit gives a "
            "repro to report}"
        ),
    )


class OtherNumbersInBuffer(Cause):
    """A buffer that is computed again has other numbers than the unsharded model's.

    A model from the meta device has no values: buffers that no checkpoint has, such as rotary frequencies or masks, are
    computed again. If that takes a default in place of the model's own base, length or dtype, every rank has the same
    wrong numbers.

    Attributes:
        held: The number of all ranks that is farthest off.
        wanted: The unsharded model's.
    """

    buffer: str
    held: float
    wanted: float
    why = (
        "{buffer} is computed again after build(), with other numbers on every rank: {held:.5g}, and the unsharded "
        "model has {wanted:.5g}"
    )
    how = "compute {buffer} with the settings that build() uses, such as base, length and dtype, or load its values"


class UncheckedWeights(Cause):
    """The step is wrong for no known reason, and some weights could not be checked.

    Plain tensors that every rank computes again, or that are zero on some ranks, have no ids to compare. If they are
    wrong, the step's results are wrong and name the first module that shows it.

    Attributes:
        odd: For each of these weights its name, what is odd about it, and what to compare.
        step: The cause of the step's finding.
    """

    odd: tuple[tuple[str, str, str], ...]
    step: Cause
    why = "{step.cause}. Some of its weights could not be checked: {odd_weights:3}"
    how = "compare first {to_compare:3}; if that is right, {step.fix}"

    @property
    def odd_weights(self) -> tuple[str, ...]:
        """The weights, each with what is odd about it."""
        return tuple(f"{name} is {what}" for name, what, _ in self.odd)

    @property
    def to_compare(self) -> tuple[str, ...]:
        """What to compare of each of the weights."""
        return tuple(f"{name}'s {what}" for name, _, what in self.odd)
