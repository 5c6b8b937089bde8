"""Causes of outputs that have right parts, on the wrong rank, out of order or several times; and of wrong pipelines."""

from __future__ import annotations

from itertools import pairwise

from shardviz.explain.cause import Cause


class JoinedOutOfOrder(Cause):
    """A result has the right slices along a dim, in another order.

    Parts are gathered in the order in which they arrive, or tokens are put back by the permutation that sorted them
    instead of its inverse. A loss that does not depend on the order is right, which hides it.
    """

    kinds = ("misordered",)
    why = (
        "Parts were put together in another order than they were cut in: gathered as they came, or put back by a "
        "permutation where its inverse belongs"
    )
    how = "concatenate parts by their rank in the group; undo x[order] by y[order.argsort()]"


class RepeatedParts(Cause):
    """Ranks have the same part of a result or of the batch, and another part is on no rank.

    A sampler is given the wrong rank or number of ranks, or every rank reads the first part. All parts have the same
    shape, and each rank's loss is that of real rows, so training continues on a part of the data.

    Attributes:
        axes: The axes along which ranks have the same.
        is_batch: Whether it is the batch.
    """

    axes: str
    is_batch: bool
    kinds = ("wrong-value",)
    why = (
        "Ranks along {axes} {is_batch:?computed the same part of the batch and left another out|have the same part "
        "where each should have its own, and nobody has another part}: the part was chosen by a coordinate that is not "
        "the rank's own, or all ranks read the first one"
    )
    how = (
        "choose each rank's part by its coordinate along {axes}, mesh.get_local_rank{is_batch:?, as DistributedSampler "
        "does given num_replicas and rank of that axis}"
    )


class PartOfAnotherRank(Cause):
    """Ranks along an axis have another rank's part of an activation, often the first's.

    Positions or indices are counted from 0 again on each rank, or a gather is indexed by another rank than its own.
    Parts have equal shapes, so nothing notices.

    Attributes:
        axis: The axis.
        is_first: Whether every rank has the part of the first.
    """

    axis: str
    is_first: bool
    kinds = ("misordered",)
    why = (
        "{is_first:?Every rank along {axis} has the part of the first: positions, or an index into a table or a "
        "sequence, are counted from 0 again on every rank, or the same part was sent to all|The parts along {axis} are "
        "exchanged: heads, rows or tokens of another rank's part, as of a gather that is indexed by the wrong rank or "
        "put together in another order}"
    )
    how = "take the part of the rank's own coordinate, mesh.get_local_rank({axis!r})"


class WrongOutputLabel(Cause):
    """The output is right under other placements than those of its label.

    A label is not compared with the data. Code that trusts it puts the parts together wrongly.

    Attributes:
        labeled: The placements of the label, with commas.
        due: Those under which the values are the unsharded model's.
    """

    labeled: str
    due: str
    kinds = ("wrong-placement",)
    why = (
        "The output is labeled ({labeled}), which is not how it is split: DTensor.from_local puts on the label that "
        "it is given, and a plain output is taken to be split by rows over BATCH_AXES and no other axis"
    )
    how = "label it ({due}); of a plain output, gather what another axis splits, or mend BATCH_AXES"


class PositionsStartAgain(Cause):
    """Ranks compute the same slices of a sequence, because positions start at 0 on each.

    Positions are counted within the rank's own tokens. An embedding or rotary table accepts them, and every rank gets
    the slices that belong to the first.

    Attributes:
        module: The first module whose output shows it.
        axis: The axes that fit: `cp or tp`.
    """

    module: str
    axis: str
    kinds = ("wrong-value",)
    why = (
        "The input of {module} starts again on every rank of {axis}: positions counted from 0 of the rank's own tokens "
        "in place of the sequence's, or the same part of the sequence on every rank"
    )
    how = (
        "give {module} the positions that the rank's tokens have in the whole sequence, cut and ordered as the tokens "
        "are"
    )


class UngatheredKeys(Cause):
    """Attention over a split sequence uses each rank's own keys, or positions that do not fit.

    Queries need the keys and values of the whole sequence. With local keys attention runs without an error and attends
    to a part of the text.

    Attributes:
        before: The last right module.
        module: The first wrong one.
        axis: The axis that splits the sequence.
    """

    before: str
    module: str
    axis: str
    kinds = ("wrong-value",)
    why = (
        "If what stands between {before} and {module} is attention, it reads keys and values of the whole sequence: "
        "each rank of {axis} used only its own (they were not gathered), or the mask or rotary positions are of "
        "another order than the gathered keys or start at 0 on every rank"
    )
    how = (
        "gather keys and values over {axis} (or pass them around, as ring attention does) before {module}, and take "
        "rotary positions and the mask from where the keys and the rank's own queries are in the whole sequence"
    )


class SegmentsInOneStretch(Cause):
    """A fused weight is cut in one stretch, so a rank lacks some of its segments.

    Gate and up, or q, k and v, are one weight that the model splits into segments. Each segment must be cut by itself.
    One stretch has the same shape, and the model reads segments in it that are not there.

    Attributes:
        tensor: The weight.
        shape: Its shape.
        sizes: The rows of each segment.
        axis: The axis that cuts it.
        reader: The module that reads a segment.
    """

    tensor: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    axis: str
    reader: str
    kinds = ("wrong-segment",)
    why = (
        "The model reads {tensor} as {count} fused segments ({sizes:sum}, {called}), and one stretch gives a rank all "
        "of one segment and nothing of another"
    )
    how = (
        "cut every segment by itself, which is {due}, here and in layers cut alike: torch.cat([segment.chunk(n)[rank] "
        "for segment in weight.{has_equal_segments:?chunk({count})|split({sizes:list})}]){has_equal_segments:?|, and "
        "let the model split each rank's output by the sizes of its own segments}. If the model reads segments side by "
        "side (head by head, unflatten), the cut is right: then look at {reader} and what it is given"
    )

    @property
    def count(self) -> int:
        """The number of segments."""
        return len(self.sizes)

    @property
    def called(self) -> str:
        """What a model may call so many segments."""
        return {2: "as gate and up", 3: "as q, k and v"}[self.count]

    @property
    def due(self) -> str:
        """How the weight should be cut; in the notation if the segments are equal."""
        rest = ", ".join(map(str, self.shape[1:]))
        if self.has_equal_segments:
            return f"[{self.shape[0]}/{self.count}/{self.axis}, {rest}]"
        return f"each of {' + '.join(map(str, self.sizes))} rows split over {self.axis}"

    @property
    def has_equal_segments(self) -> bool:
        """Whether all segments have the same number of rows."""
        return len(set(self.sizes)) == 1


class PartsDealtOtherwise(Cause):
    """A weight's parts go to other ranks than the parts of the weights that it meets.

    Each weight may be cut in any order, if all that are multiplied with each other use the same. One that differs
    multiplies features by another rank's rows, with the right shapes.

    Attributes:
        tensor: The weight.
        axis: The axis that cuts it.
        num_ranks: The size of the axis.
        copies: How many ranks share each part.
    """

    tensor: str
    axis: str
    num_ranks: int
    copies: int
    kinds = ("misordered",)
    why = (
        "{is_shared:?Several ranks share a part, as key and value heads that are fewer than {axis} has ranks, and "
        "}{tensor} is dealt out in another order over {axis} than the weights that its output meets: features of rank "
        "r meet those of another rank's part (torch.repeat_interleave and torch.chunk give part r{is_shared:? // "
        "{copies}} to rank r)"
    )
    how = (
        "{is_shared:?give the ranks along {axis} the parts {parts:8} of {tensor}, and sum its gradient over the ranks "
        "that then share a part|cut {tensor} with torch.chunk by mesh.get_local_rank({axis!r})}"
    )

    @property
    def is_shared(self) -> bool:
        """Whether ranks share parts."""
        return self.copies > 1

    @property
    def parts(self) -> tuple[int, ...]:
        """The part that each rank should have."""
        return tuple(rank // self.copies for rank in range(self.num_ranks))


class ExpertsSentElsewhere(Cause):
    """Tokens are sent to ranks as if experts were dealt out in another order than they are.

    Experts lie on the ranks in turn, and tokens are sent in chunks, or the other way around. Every token reaches some
    expert, and few reach their own.

    Attributes:
        tensor: The experts' weight.
        axis: The axis that experts are dealt out over.
        num_ranks: The size of the axis.
        experts_per_rank: How many experts each rank has.
        is_in_turn: Whether the experts are dealt out in turn; else in chunks.
    """

    tensor: str
    axis: str
    num_ranks: int
    experts_per_rank: int
    is_in_turn: bool
    kinds = ("misordered",)
    why = (
        "{tensor} has its experts dealt out in {is_in_turn:?turn|chunks} over {axis}, and which rows are right fits "
        "tokens that are sent as if they were dealt out in {is_in_turn:?chunks|turn}"
    )
    how = (
        "send the tokens of expert e to rank e {is_in_turn:?% {num_ranks}, place e // {num_ranks}|// "
        "{experts_per_rank}, place e % {experts_per_rank}}; or deal the experts out in {is_in_turn:?chunks|turn}, so "
        "that expert e is on rank e {is_in_turn:?// {experts_per_rank}, place e % {experts_per_rank}|% {num_ranks}, "
        "place e // {num_ranks}}"
    )


class LayersDropped(Cause):
    """Some layers are on no stage: a remainder, or a gap between the stages' lists.

    An integer division gives every stage the same number of layers and forgets the remainder, or the end of one stage's
    range and the start of the next leave a gap. The pipeline then runs a shorter model, with the right shapes.

    Attributes:
        size: How many layers the model has.
        num_stages: How many stages there are.
        is_remainder: Whether it is the remainder of a division.
    """

    size: int
    num_stages: int
    is_remainder: bool
    kinds = ("missing",)
    why = (
        "{is_remainder:?{size} layers were divided by {num_stages} stages, and the remainder was dropped|The lists of "
        "the stages' layers do not join: what is between two of them was dropped}"
    )
    how = "give every layer to a stage: torch.arange({size}).tensor_split({num_stages}) leaves none over"


class OverlappingStages(Cause):
    """A layer is on several stages and runs on each of them.

    The ranges of two stages overlap by a layer. What passes through the pipeline passes that layer several times, and
    shapes do not change.

    Attributes:
        tensor: The layer.
        times: How many stages have it.
        size: How many layers the model has.
    """

    tensor: str
    times: int
    size: int
    kinds = ("duplicated",)
    why = (
        "The stages' layers overlap: what passes through the pipeline goes through {tensor} {times} times, once on "
        "each of several stages"
    )
    how = "keep {tensor} on one stage; torch.arange({size}).tensor_split(num_stages) gives each layer once"


class StagesOutOfOrder(Cause):
    """Stages hand their output to a stage that does not have the next layers.

    Layers are dealt out in one order and stages are numbered in another, for instance in turn for one stage a rank.
    Every layer runs once, only not in the model's order.

    Attributes:
        axis: The axis of the pipeline.
        size: How many layers the model has.
        coordinates: The coordinate along the axis of each stage, in the stages' order.
    """

    axis: str
    size: int
    coordinates: tuple[int, ...]
    kinds = ("misordered",)
    why = (
        "The step sends each stage's output to the stage of the next number, which does not have the next layers: "
        "layers and stages are in another order along {axis}"
    )

    how = (
        "{is_shared:?give each rank the layers of its own stages, {coordinates:4} along {axis}|give the {count} stages "
        "layers that follow one another: torch.arange({size}).tensor_split({count})[stage]; or, where ranks run "
        "several stages, list every one in stages() under its number}"
    )

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.coordinates)

    @property
    def is_shared(self) -> bool:
        """Whether a rank has stages that follow one another."""
        return any(stage == following for stage, following in pairwise(self.coordinates))


class StagesMisnumbered(Cause):
    """Ranks with several stages run them in another order than the stages are numbered in.

    An interleaved schedule counts stages in a loop over the ranks, a V schedule forth and back. Layers that were dealt
    out for one of them go wrong in the other, from each rank's second stage on.
    """

    kinds = ("misordered",)
    why = (
        "Stages are run in another order than they are numbered in: numbers in a loop (interleaved 1F1B: rank r of p "
        "has r, p + r, ...) do not fit a step that comes back the way it went (a V: r and 2p - 1 - r), nor the "
        "reverse; or a stage was sent another stage's output"
    )
    how = (
        "number the stages in the order in which the step hands activations from one to the next, in a loop or in a V, "
        "and give each its layers by that number"
    )
