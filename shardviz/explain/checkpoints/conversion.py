"""Causes of checkpoint conversions that differ from the other side."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class ForgottenFactor(Cause):
    """All values of a tensor are those of the original times one number.

    One format stores a scale in its weights, and the other applies it in its code. The conversion applied it twice or
    never.

    Attributes:
        undo: One over the factor, as it is printed.
    """

    undo: str
    factor: float = 0.0
    why = "The conversion multiplies by a factor, or leaves one out"
    how = "multiply by {undo} in the conversion"


class SummedReplicas(Cause):
    """A merge of ranks' files added up a tensor that each rank has whole.

    Tensor parallelism cuts matrices, and keeps norms and the biases of row-parallel layers whole on every rank. A
    merge that sums these multiplies them by the number of ranks.

    Attributes:
        ranks: How many ranks were merged: the factor.
        side: Which of the two has the sum.
    """

    ranks: int
    side: str
    why = "The merge of {ranks} ranks into the {side} sums a tensor that every rank holds whole"
    how = "take it from one rank"


class ForgottenOffset(Cause):
    """All values of a tensor are those of the original plus one number.

    Some models store the weights of a norm around 0 and add 1 when they compute, others store them around 1. The shapes
    are the same, so a conversion that forgets this loads.

    Attributes:
        undo: What takes it back: `add` or `subtract`.
        size: The number, as it is printed.
    """

    undo: str
    size: str
    why = "The conversion adds a number or leaves one out, such as the 1 of a norm's weights that are stored around 0"
    how = "{undo:add?add|subtract} {size} in the conversion"


class FunctionOfOther(Cause):
    """All values of a tensor are a function of the original's, such as its exponential.

    One format stores A, and another its logarithm, since the model computes A of that: Mamba's `A_log`, a logit scale,
    a width before softplus. A conversion that forgets the function, or applies it twice, loads.

    Attributes:
        function: It in torch's words, of `x`.
        inverse: What takes it back, of `y`.
    """

    function: str
    inverse: str
    why = "The conversion applies {function}, or leaves out what takes it back"
    how = "take {inverse} in the conversion, of the values y that it has now"


class NarrowedOnTheWay(Cause):
    """Values were rounded to a narrower dtype on their way, and cast back.

    A file, a buffer for sending or a staging copy had a narrower dtype. A cast to a wider dtype succeeds without a
    warning, and the lost digits are zeros. The dtype of the result is right.

    Attributes:
        dtype: The dtype before; empty if it is the target's.
        to: The dtype now, if it differs.
        trip: `load` or `sync`, if a test recorded the trip.
    """

    narrow: str
    dtype: str = ""
    to: str = ""
    trip: str = ""
    why = "The values were saved, sent or received in {narrow}, and cast back without a warning"
    how = (
        "{to:?round once, from {dtype} to {to}|{dtype:?keep {dtype} all the way|{trip:sync?send it in its own dtype, "
        "or, if {narrow} is meant, let the target be {narrow} too|save in the dtype of the model and its optimizer, "
        "and load into tensors of that dtype}}}"
    )


class CutOffDigits(Cause):
    """A float32 became a bfloat16 by its upper half instead of by rounding.

    The upper 16 bits of a float32 are a bfloat16 that is nearly the value, but always nearer to zero. The bias of half
    a digit is small enough to pass a loose comparison.
    """

    why = "The code takes the upper 16 bits of each value instead of rounding"
    how = "cast with Tensor.to(torch.bfloat16), which rounds"


class OverflowInFloat16(Cause):
    """Values became infinite in a cast to float16.

    float16 has more digits than bfloat16 and a much smaller range. torch casts without a warning.
    """

    dtype: str
    why = "{dtype} ends at 65,504, and larger values become infinite"
    how = "save in bfloat16, which has the range of float32, or in the wider type"


class LostInFloat16(Cause):
    """Values that were not zero are zero after a cast to float16.

    The squares of gradients that Adam keeps are far smaller than weights. A step divides by what is left of them, so it
    is as large as its eps lets it be. The rest of the state looks right.
    """

    dtype: str
    why = "{dtype} has no number between 0 and 6e-08, and what is nearer to zero than to that becomes zero"
    how = "keep float32, which the state of an optimizer needs"


class CutOffEnd(Cause, kind="missing"):
    """One side lacks the last indices of a dim, and all others are equal.

    A vocabulary that was cut to the size of its tokenizer looks like this, and so does a last shard that was lost.
    """

    why = "A save or a conversion cut off the end of the dim"
    how = "keep the end, unless it is padding"


class KeptOneShard(Cause, kind="missing"):
    """One side has one of the equal parts that the other side is made of.

    A merge keeps one copy of what is equal on all ranks, and joins what differs. The shards of a norm of ones, or of a
    bias of zeros, are equal too, so the merge keeps one of them. A weight that is cut off at its end looks the same.
    """

    parts: int
    why = "A merge took {parts} equal shards for replicas, and kept one of them"
    how = "join the parts of a weight that is sharded even if they are equal: its placements say that it is"

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """Return that it may be cut off as well."""
        return (CutOffEnd(),)


class PaddedEnd(Cause, kind="wrong-shape"):
    """One side has more indices at the end of a dim, and all others are equal.

    Frameworks round a vocabulary up to a multiple that shards evenly. Tokens never point at the padding, so it does no
    harm until a model of the other size loads it.

    Attributes:
        is_plain: Whether all added values are one number, as padding is.
        call: How a map makes the longer tensor; empty if that is not known.
    """

    is_plain: bool
    call: str = ""
    why = "The dim was padded, as a vocabulary that must shard evenly{is_plain:?|, or extended with new rows}"
    how = (
        "cut the padding off in the conversion, or load it into a model of that size"
        "{call:?; if it is meant, say so in a map: NAME = {call}}"
    )


class PaddedParts(Cause, kind="misordered"):
    """Each rank's own part of a tensor has padding at its end, instead of the whole tensor.

    Ranks padded their shards to one size. The shape is that of a tensor with padding at its end, but rows behind the
    first shard are shifted.

    Attributes:
        ranks: How many ranks padded their parts, if the parts were joined; else 0.
    """

    ranks: int = 0
    why = (
        "{ranks:?Each of {ranks} ranks padded its own part, and the padded parts were joined|The tensor was cut for "
        "the ranks before it was padded}"
    )
    how = (
        "pad the whole at its end, then cut it for the ranks{ranks:?; or cut each rank's padding off before the parts "
        "are joined}"
    )


class LostSlices(Cause, kind="misordered"):
    """Some indices of a dim are missing, and what follows them is at other places.

    Whoever joins or cuts parts of a padded dim must know how long each part is. If the padding is thought to be in
    every part and is only in the last, rows of the first parts are dropped and padding is kept. Every shape fits.

    Attributes:
        parts: How many shards of its length the whole has, if one side is one of these; else 0.
    """

    dim: int
    parts: int = 0
    why = (
        "{parts:?One side is one of {parts} shards along dim {dim}, and the other is all of them|An offset or a length "
        "along dim {dim} is wrong: for example, padding that only the last part has was cut off of every part}",
        "Indices were removed or inserted on purpose, such as tokens of a vocabulary",
    )
    how = (
        "{parts:?join the shards of all ranks|cut and join along dim {dim} where the parts end, and cut padding off "
        "the end of the whole}",
        "renumber what points at these indices",
    )


class RepeatedHeads(Cause, kind="duplicated"):
    """One side has every block of a dim several times.

    With grouped queries, or more ranks than heads of k and v, a framework repeats heads so that each rank has one. A
    save that doesn't undo this makes the tensor longer.

    Attributes:
        or_else: What else it may be, if all its values are one number.
    """

    times: int
    or_else: PaddedEnd | None = None
    why = "The save keeps repeated parts, such as heads of k and v that several ranks or queries share"
    how = "take one of each {times}, or repeat them on load and not in the file"


class AveragedWeights(Cause):
    """A tensor lies between those of two other checkpoints.

    Averaging checkpoints is a method of its own, and a LoRA that is merged with a smaller scale does the same to the
    numbers.
    """

    why = (
        "The checkpoint is an average of others",
        "The conversion merged a change, such as a LoRA, with a smaller scale",
    )
    how = (
        "save the weights of one step",
        "merge the change with the scale that it was trained with",
    )


class AdapterScaled(Cause):
    """A checkpoint has the other side's adapter with another scale.

    A LoRA's change is B A times alpha / r, or alpha / sqrt(r) if it is rank-stabilized. A merge that takes the other
    scale gives weights of the right shape, near the right values.

    Attributes:
        side: The side whose scale is smaller.
        factor: Its scale, relative to the other side's.
    """

    side: str
    factor: str
    base: str
    why = (
        "The {side} has {factor} times the change from {base}, which is of low rank, as a LoRA's: it was merged with "
        "another scale"
    )
    how = "merge it with the scale that it was trained with: alpha / r, or alpha / sqrt(r) if use_rslora is set"


class MergedWithAnotherScale(Cause):
    """An adapter was merged with a scale that its settings don't have.

    A merge with alpha / r in place of alpha / sqrt(r), or without a scale, gives weights near the right values.

    Attributes:
        factor: The scale that it was merged with.
        due: The scale that its settings make.
        how_made: How they do, as `alpha / r`.
    """

    adapter: str
    factor: str
    due: str
    how_made: str
    why = (
        "The merge multiplied the product of the matrices in {adapter} by {factor}, and its adapter_config.json makes "
        "it {due}: {how_made}"
    )
    how = "merge it with the scale {due}"


class AdapterMergedAgain(Cause):
    """A tensor has the change between two checkpoints more than once.

    A LoRA was merged into weights that already have it, or with a different scale than in training. Shapes do not
    change, so any number of merges succeeds.
    """

    why = (
        "The adapter (a LoRA, for example) was merged again",
        "The adapter was merged with a different scale",
    )
    how = (
        "merge it once, into weights that don't have it",
        "merge it with the scale that it was trained with",
    )


class AdaptersPiledUp(Cause):
    """A tensor has more than the base and the other side's adapter: further changes of low rank.

    An engine that adds each new adapter to weights that still have the earlier ones piles them up. Each sum has the
    right shape.

    Attributes:
        side: Which side has more.
        low: The rank of the other side's change from the base.
        high: That of this side's.
    """

    side: str
    low: int
    high: int
    base: str
    why = "The {side} has the other side's adapter and more: adapters that were merged before are still in its weights"
    how = "merge each adapter into the weights of {base}, or take the earlier adapter out before the next is merged"


class RenumberedLayers(Cause, kind="foreign"):
    """Layers or experts have different numbers in the second checkpoint than in the first.

    All layers have the same shapes, so any order of them loads. In an interleaved pipeline each stage has several
    chunks of layers, and the stages take turns: stage 0's second chunk comes behind the first ones of all stages.

    Attributes:
        what: What is numbered: `layers`, `experts`.
        chunks: Which stages' chunks were put one behind the other; empty if that is not how they are renumbered.
    """

    what: str
    chunks: str = ""
    why = "The conversion {chunks:?puts {chunks} one behind the other, as if they were neighbors|renumbers the {what}}"
    how = (
        "{chunks:?take the first chunk of every stage, then the second of every stage|number {what} as the first "
        "checkpoint does}"
    )


class OneShardRepeated(Cause, kind="duplicated"):
    """One shard of a dim stands there several times, in place of as many different ones.

    Ranks that share heads of k and v hold copies of one shard. If their files are joined as if each had a part of its
    own, the shards of other ranks are left out. Shapes are right, so nothing raises.

    Attributes:
        dim: The dim.
        times: How often the shard is there.
    """

    dim: int
    times: int
    why = (
        "The files of {times} ranks that hold one shard of dim {dim} were joined as if each had a part of its own",
        "{times} ranks loaded the shard of one of them",
    )
    how = (
        "take each different shard once, from one of the ranks that share it",
        "load each rank's own shard, by its coordinate on the mesh",
    )


class ReorderedInConversion(Cause, kind="misordered"):
    """All indices of a dim are there, in different orders on the two sides.

    Rows of one length can change places without any change of shape, so a conversion or a load that reorders them
    raises nothing.

    Attributes:
        kind: What the order looks like: `text`, `flip`, `roll`, `halves`, `rotary`, `segments` or `blocks`.
        undo: What makes the first of the second, called w.
    """

    kind: str
    undo: str
    why = (
        "{kind:text?Parts were joined in the order of their numbers as text, as sorted(names) and glob give them, so "
        "10 comes before 2|{kind:flip?A flip, or a sort in descending order, reversed the dim|{kind:roll?torch.roll, "
        "or parts that were cut at different places, moved the start of the dim|{kind:halves?Two parts of equal size "
        "were joined in the other order, such as gate and up or the shards of 2 ranks|{kind:rotary?One side has the "
        "rows of each head in pairs and the other in halves, for rotary embeddings|{kind:segments?Ranks' parts were "
        "joined whole, one behind the other. Each is made of segments, as of a fused projection, and these belong "
        "together|Parts or ranks' shards were joined in a different order, or rows of two parts in turns}}}}}}"
    )
    how = "to have the first's order: {undo}"


class RenamedInPart(Cause, kind="incomplete"):
    """Some tensors have another name in the second checkpoint, and most names are equal.

    A load by name finds the equal ones. It raises for the rest, or leaves them as they were with strict=False.

    Attributes:
        words: What the names have more, or less.
        is_wrapper: Whether libraries put these words into names.
    """

    words: str
    is_wrapper: bool = False
    why = (
        "{is_wrapper:?The state_dict of a wrapper was saved, such as DDP's (module.) or torch.compile's (_orig_mod.)|"
        "The save or the model renames some of its tensors}"
    )
    how = (
        "{is_wrapper:?save the state_dict of the model within the wrapper, or take {words} out of these names|rename "
        "them back before a load by name}"
    )


class RowsUnderOtherNames(Cause, kind="misordered"):
    """Tensors of one module have each other's rows, and each row is there once.

    Queries, keys and values of one attention, or gate and up, were joined in one tensor and cut apart by a different
    rule: group by group when joined, part after part when cut. The sizes are right, so every shape is.
    """

    why = (
        "The conversion doesn't cut a fused tensor apart as it was joined: group by group, rank by rank, or part after "
        "part"
    )
    how = (
        "cut it as it was joined: for q, k and v of groups, view the rows as [groups, rows of a group], and take each "
        "group's queries, key and value"
    )


class OneSidedTie(Cause, kind="untied"):
    """Two names are one tensor on one side, and two different tensors on the other.

    Tied embeddings share their values as long as both names lead to one parameter. Sharding, or a load of one name
    alone, gives each its own, and they drift apart.

    Attributes:
        of_job: Whether the tie is in a job, compared with a checkpoint.
    """

    of_job: bool = False
    why = (
        "{of_job:?The two are tied in the job, and the checkpoint has different values for one of them|The two are "
        "tied in the first, and only one of them changed in the second}"
    )
    how = "{of_job:?save both again, or leave one of them out|tie them before the save, or leave out the unused one}"


class HeadOverwritten(Cause, kind="incomplete"):
    """The second checkpoint has the embedding under the head's name, too, and the head nowhere.

    An export takes the two for tied, as a config says by default, and writes one of them under both names.

    Attributes:
        other: The name of the embedding.
    """

    other: str
    why = "The save writes {other} under both names, as if the two were tied. The first's own weights are lost"
    how = "save the tensor's own weights, and set tie_word_embeddings to false in the config"


class UnsavedHead(Cause, kind="incomplete"):
    """The second checkpoint lacks a matrix that is not a copy of another tensor.

    A save leaves out the head of a model whose embeddings are tied, because a loader makes it from the embedding. If
    they are not tied, the head's own weights are lost.
    """

    why = "The save leaves the head out, as if it were tied to the embedding"
    how = "write the head too: a loader fills it at random, or ties it to the embedding"
