"""Values that a trip (a checkpoint's load, a sync of weights) did not bring, changed, or put in the wrong places.

The field `trip` of these causes is the word for what should have written the values: `load` or `sync`.
"""

from __future__ import annotations

from shardviz.explain.cause import Cause

TO_WRITE = (
    "{trip:sync?copy what arrives into the target's own tensors, on every rank, and wait for the transfer to finish|"
    "write what was read into the tensors that are there: load_state_dict(...), set_state_dict(...) or copy_ under "
    "torch.no_grad(), on every rank}"
)

TO_PLACE = (
    "{trip:sync?cut what is sent by the target's layout: the whole tensor, or each part of a fused one, narrowed to "
    "this rank's rows|save and load DTensors, whose placements say which rows a rank has "
    "(torch.distributed.checkpoint), or the whole tensor, cut by distribute_tensor(whole, mesh, placements)}"
)

TO_MATCH = "match by name, and move each name with its tensor; never by position"


class PartialWrite(Cause):
    """Only some elements of a rank's shard were written.

    Tensors travel in pieces. If pieces are computed for another size or offset than the receiver has, the rest of the
    shard keeps what was there before.
    """

    trip: str
    kinds = ("write-not-applied",)
    why = "Only a part of these ranks' shards is written: the pieces that arrive are fewer or smaller than the shard"
    how = "compare the offsets and lengths of the pieces that arrive with the rows named here; " + TO_PLACE


class MisplacedByTrip(Cause):
    """A trip put values in the wrong places; which order they are in has a cause of its own.

    The sender and the receiver cut the tensor by different layouts. Shapes agree, so nothing raises. A finding keeps
    the name of the order, and its fix is the trip's.

    Attributes:
        order: The cause that names the order.
        trip: The word for what should have written the values.
    """

    order: Cause
    trip: str
    kinds = ("misordered", "misordered-within-shard", "duplicated", "missing", "wrong-segment", "wrong-placement")
    why = "{order.cause}"
    how = TO_PLACE

    @property
    def id(self) -> str:
        """The name of the order."""
        return self.order.id


class SkippedRanks(Cause):
    """A tensor was written on some ranks and not on the others.

    The write ran under a condition on the rank, or a rank had other keys. Each rank by itself sees no error.
    """

    trip: str
    kinds = ("write-not-applied",)
    why = "The {trip} left it alone on these ranks, and wrote it on the others"
    how = "run the {trip} on every rank, with the same keys, or broadcast from a rank that did"


class WriteIntoCopies(Cause):
    """No tensor of the model has what it should have been given.

    `full_tensor()`, `.to(...)` and a state_dict of another wrapper return copies. A write into them succeeds and
    reaches no parameter.

    Attributes:
        is_reset: Whether tensors are one number throughout, as they are made or reset for the write.
    """

    trip: str
    is_reset: bool = False
    kinds = ("write-not-applied", "foreign")
    why = (
        "{is_reset:?It was made or reset, and never written|The {trip} wrote into copies, under other names, or not at "
        "all}"
    )
    how = TO_WRITE


class SkippedRole(Cause):
    """No tensor of one role was written, and the others were.

    The roles are parameters, buffers and optimizer state. A transfer over named_parameters() has no buffers, and one
    over a module's state_dict no optimizer state.

    Attributes:
        role: `param`, `buffer` or `optim`.
    """

    trip: str
    role: str
    kinds = ("write-not-applied",)
    why = (
        "{role:param?Parameters are|{role:buffer?Buffers are|The optimizer's state is}} left out: none of them was "
        "written"
    )
    how = (
        "{role:buffer?{trip:sync?send|save and load} model.state_dict(), which has persistent buffers too, not "
        "named_parameters()|" + TO_WRITE + "}"
    )


class SkippedKey(Cause):
    """One tensor was not written, and others of its role were.

    Its key was filtered out or renamed. load_state_dict with strict=False reports that only in what it returns.
    """

    kinds = ("write-not-applied",)
    why = "It is not among what was written: a filter, a missing or renamed key with strict=False, or it was not sent"
    how = (
        "list the keys that were missing or unexpected (load_state_dict returns them; strict=True raises), and send it"
    )


class ReplacedDtype(Cause):
    """A tensor has another dtype than before.

    assign=True and setattr put the tensor that arrived in the place of the model's, with the dtype that it was sent in.
    """

    trip: str
    kinds = ("wrong-value",)
    why = "The {trip} put a tensor of another dtype in its place"
    how = "load into tensors of the dtype that was saved: copy_ into those that are there, or cast what is put there"


class PartTakenForWhole(Cause):
    """A tensor does not have the shape of what was sent.

    One side has a rank's shard and the other the whole, or one of them is padded. With assign=True, or by hand, nothing
    compares the shapes.
    """

    trip: str
    kinds = ("wrong-shape",)
    why = (
        "One rank's part was taken for the whole, another tensor has its name, or one of them is padded{trip:sync?, "
        'which a map says: "pad(NAME, rows)" where the target is, "slice(NAME, 0, rows)" where the source is}'
    )
    how = TO_PLACE


class FileOfAnotherRank(Cause):
    """A rank has the values that another rank saved under this name.

    Some tensors are each rank's own, such as the state of a random generator. If files are numbered otherwise after a
    restart, ranks read each other's.
    """

    kinds = ("foreign",)
    why = "Every rank has values of its own under this name, and these ranks have another's"
    how = "give each rank the file that it saved itself"


class ChangedInTransfer(Cause):
    """A tensor has values that are neither what was sent nor what was there before.

    Something computed them on the way or afterwards, or they come from elsewhere.

    Attributes:
        is_padded: Whether a map pads the tensor, so that they may be padding.
    """

    is_padded: bool = False
    kinds = ("foreign", "name-collision")
    why = (
        "{is_padded:?It is padding in the place of rows. If not: they|They} were computed on the way, come from "
        "elsewhere, or were changed since"
    )
    how = (
        "{is_padded:?put the padding where the map says that it is, and compare which rows each rank cuts from the "
        "whole|find what computes or writes it on the way or afterwards, and leave the values as they were sent}"
    )


class FusedCutOtherwise(Cause):
    """A fused tensor was cut in one piece, or with its parts interleaved or reordered.

    A rank of a tensor-parallel layer needs a piece of each part (of q, k and v), in the order in which the model reads
    them. A plain chunk of the fused tensor, blocks of parts in turns and parts in another order have the same shape.

    Attributes:
        manner: What the rank's rows show: `piece`, `turns` or `order`; empty if a piece and another order would fit.
    """

    manner: str = ""
    kinds = ("foreign", "misordered", "name-collision")
    why = (
        "{manner:turns?The parts were interleaved|{manner:order?Its parts were joined in another order|The fused "
        "tensor is cut in one piece{manner:?|, or its parts are in another order}}}"
    )
    how = "cut each part by itself, in the order of the fused tensor, and put the pieces of this rank together"


class StateByNumber(Cause):
    """A parameter has the optimizer state of another one, or a state that it should not have.

    torch.optim numbers parameters in the order in which they were passed. After a reshard, a freeze or another grouping
    the numbers mean other parameters, and equal shapes load. A parameter without gradients has no state, so the next
    one's moves up to it.
    """

    kinds = ("foreign", "name-collision")
    why = (
        "The optimizer's state is matched by position: its numbers are of parameters in another order, or of others "
        "that are left out or had no state when it was saved"
    )
    how = (
        "match states by the parameter's name, never by position, as "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict does"
    )


class SwappedTensors(Cause):
    """A tensor has the values of another tensor, or two states of a parameter are exchanged.

    Lists of tensors and lists of names were walked side by side and were not in one order. Equal shapes and dtypes
    load, as those of Adam's two moments.

    Attributes:
        states: The keys of the states that were exchanged, if they are one parameter's.
    """

    states: tuple[str, ...] = ()
    kinds = ("foreign", "name-collision")
    why = (
        "{states:?States of one parameter were exchanged: {states}|Another tensor was written under this name: names "
        "were matched by position, or two exchanged}"
    )
    how = TO_MATCH


class WrongOnDisk(Cause):
    """A save wrote other values than the model has.

    A load with the same mistake in reverse restores the model, so a test that only compares before and after passes.
    Anyone else who reads the checkpoint gets wrong weights.
    """

    kinds = ("wrong-value", "misordered", "foreign")
    why = "The save wrote it so; a load that makes the same mistake backwards would hide it from every round trip"
    how = (
        "save every tensor under its own name, whole, or cut and labeled by its placements; where the format is meant "
        "to have it in another order, say so with names={{...}}"
    )
