"""Causes of values that a checkpoint's load or a weight sync lost, changed or misplaced.

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


class PartialWrite(Cause, kind="write-not-applied"):
    """Only some elements of a rank's shard were written.

    Tensors travel in pieces. If the sender computes the pieces for a different size or offset than the receiver has,
    the rest of the shard keeps its old values.
    """

    trip: str
    why = (
        "The {trip} writes only a part of these ranks' shards: the pieces that arrive are fewer or smaller than the "
        "shard"
    )
    how = "compare the offsets and lengths of the pieces that arrive with the rows named here; " + TO_PLACE


class MisplacedByTrip(Cause, listed=False):
    """A trip put values in the wrong places: the name, page and words are those of their order, the fix is the trip's.

    Attributes:
        order: The cause that names the order.
        trip: The word for what should have written the values.
    """

    order: Cause
    trip: str
    why = "{order.cause}"
    how = TO_PLACE

    @property
    def id(self) -> str:
        """The name of the order."""
        return self.order.id


class SkippedRanks(Cause, kind="write-not-applied"):
    """A tensor was written on some ranks and not on the others.

    The write ran under a condition on the rank, or a rank had different keys. No rank sees an error on its own.
    """

    trip: str
    why = "The {trip} wrote this tensor on the other ranks and skipped these"
    how = (
        "run the {trip} on every rank with the same keys, or torch.distributed.broadcast from a rank that has the "
        "values"
    )


class WriteIntoCopies(Cause):
    """No tensor of the model has the values that it should have received.

    `full_tensor()`, `.to(...)` and a state_dict of another wrapper return copies. A write into them succeeds and
    reaches no parameter.

    Attributes:
        is_reset: Whether each tensor is one number throughout, as after a reset.
    """

    trip: str
    is_reset: bool = False
    kinds = ("write-not-applied", "foreign")
    why = (
        (
            "{is_reset:?The tensors were made or reset, and never written|The {trip} wrote into copies, such as "
            "full_tensor() or .to(...)}"
        ),
        "{is_reset:?|The {trip} used different names, or never ran}",
    )
    how = TO_WRITE


class SkippedRole(Cause, kind="write-not-applied"):
    """No tensor of one role was written, and the others were.

    The roles are parameters, buffers and optimizer state. A transfer over named_parameters() has no buffers, and one
    over a module's state_dict no optimizer state.

    Attributes:
        role: `param`, `buffer` or `optim`.
    """

    trip: str
    role: str
    why = (
        "The {trip} leaves out {role:param?the parameters|{role:buffer?the buffers|the optimizer's state}}: none of "
        "them was written"
    )
    how = (
        "{role:buffer?{trip:sync?send|save and load} model.state_dict(), which has persistent buffers too, not "
        "named_parameters()|" + TO_WRITE + "}"
    )


class SkippedKey(Cause, kind="write-not-applied"):
    """One tensor was not written, and others of its role were.

    A filter or a rename changed its key. load_state_dict with strict=False reports that only in its return value.
    """

    why = (
        "A filter leaves out the key, or strict=False skips it because it is missing or renamed",
        "The sender never sent it",
    )
    how = (
        "load with strict=True, which raises and lists missing and unexpected keys",
        "send it with the others",
    )


class EndNotWritten(Cause, kind="write-not-applied"):
    """The last tensors were not written, of several modules, and all before them were.

    Weights are sent in buckets, and a bucket is sent when the next tensor doesn't fit. After the loop the last one is
    still to be sent. How many tensors are in it depends on the bucket's size, so a small model may lose all of them.

    Attributes:
        first: The first tensor that was not written.
    """

    first: str
    why = (
        "The sync ends before {first}: every tensor from there on is not written, and all before it are. A last "
        "bucket that isn't full is never sent, or the loop ends early"
    )
    how = "after the loop, send the bucket that is left, and compare the number of tensors sent with the model's"


class ReplacedDtype(Cause):
    """A tensor has a different dtype than before.

    assign=True and setattr put the arriving tensor in the place of the model's, with the dtype in which it was sent.
    """

    trip: str
    why = "The {trip} replaced the tensor by one of a different dtype (assign=True or setattr)"
    how = "copy_ into the tensors that are there, or cast the new tensor to the saved dtype"


class PartTakenForWhole(Cause, kind="wrong-shape"):
    """A tensor does not have the shape that was sent.

    One side has a rank's shard and the other has the whole, or one of them is padded. With assign=True, or by hand,
    nothing compares the shapes.
    """

    trip: str
    why = (
        "The {trip} takes one rank's part for the whole",
        "A different tensor has its name",
        (
            'One side is padded{trip:sync?; a map says so with "pad(NAME, rows)" if it is the target, "slice(NAME, 0, '
            'rows)" if it is the source}'
        ),
    )
    how = TO_PLACE


class FileOfAnotherRank(Cause, kind="foreign"):
    """A rank has the values that a different rank saved under this name.

    Some tensors are each rank's own, such as the state of a random generator. If files are numbered differently after a
    restart, ranks read each other's files.
    """

    why = "Every rank saves its own values under this name, and these ranks read the file of another rank"
    how = "let each rank load the file that it saved"


class ChangedInTransfer(Cause):
    """A tensor has values that are neither what was sent nor what was there before.

    Something computed the values on the way or afterwards, or they come from elsewhere.

    Attributes:
        is_padded: Whether a map pads the tensor, so that the values may be padding.
    """

    is_padded: bool = False
    kinds = ("foreign", "name-collision")
    why = (
        "{is_padded:?The values are padding in the place of rows}",
        "Code computed the values on the way or changed them since",
        "The values come from a different tensor or file",
    )
    how = (
        "{is_padded:?put the padding at the place in the map, and compare the rows that each rank cuts from the whole}",
        "remove the code that writes this tensor on the way or afterwards",
    )


class FusedCutOtherwise(Cause):
    """A fused tensor was cut in one piece, or with its parts interleaved or reordered.

    A rank of a tensor-parallel layer needs a piece of each part (of q, k and v), in the order in which the model reads
    them. A plain chunk of the fused tensor, interleaved parts and reordered parts have the same shape.

    Attributes:
        manner: What the rank's rows show: `piece`, `turns`, `joined` or `order`; empty if both a piece and a different
            order fit.
    """

    manner: str = ""
    kinds = ("foreign", "misordered", "name-collision")
    why = (
        (
            "{manner:turns?The sender interleaves the parts|{manner:joined?The sender puts the parts one after the "
            "other, and the map interleaves them|{manner:order?The sender joins the parts in a different order|The "
            "sender cuts the fused tensor in one piece}}}"
        ),
        "{manner:?|The sender joins the parts in a different order}",
    )
    how = (
        (
            "{manner:joined?let the rows of this rank's pieces alternate, as the map says|cut each part alone, and "
            "join this rank's pieces in the order of the fused tensor}"
        ),
        "{manner:?|join the pieces in the order of the fused tensor}",
    )


class StateByNumber(Cause):
    """A parameter has a different parameter's optimizer state, or one that it should not have.

    torch.optim numbers parameters in the order in which they were passed. After a reshard, a freeze or a new grouping
    the numbers mean different parameters, and equal shapes load. A parameter without gradients has no state, so the
    next one's state moves up to it.
    """

    kinds = ("foreign", "name-collision")
    why = (
        "The load matches states by position, and the parameters come in a different order",
        "The load matches states by position, and some parameters are left out or had no state in the save",
    )
    how = "match states by the parameter's name: torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"


class SwappedTensors(Cause):
    """A tensor has a different tensor's values, or two states of a parameter are exchanged.

    The code walks a list of tensors and a list of names side by side, and the lists have different orders. Equal shapes
    and dtypes load, such as Adam's two moments.

    Attributes:
        states: The keys of the exchanged states, if they are one parameter's.
    """

    states: tuple[str, ...] = ()
    kinds = ("foreign", "name-collision")
    why = (
        "{states:?The states {states} of one parameter changed places|The names are matched by position, or two names "
        "changed places}"
    )
    how = TO_MATCH


class WrongOnDisk(Cause):
    """A save wrote different values than the model has.

    A load with the same mistake in reverse restores the model, so a test that only compares before and after passes.
    Every other reader of the checkpoint gets wrong weights.
    """

    kinds = ("wrong-value", "misordered", "foreign")
    why = (
        "The save itself writes these values. A load with the same mistake in reverse would hide it from every round "
        "trip"
    )
    how = (
        "save every tensor under its own name, whole or as a DTensor; if the format has a different order, pass "
        "names={{...}}"
    )
