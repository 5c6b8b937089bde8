"""Causes of outputs whose parts are misplaced or repeated, and of wrong pipelines."""

from __future__ import annotations

from itertools import pairwise

from shardviz.explain.cause import Cause


class JoinedOutOfOrder(Cause, kind="misordered"):
    """A result has the right slices along a dim in the wrong order.

    Code gathers parts in the order in which they arrive, sorts each part by itself, or puts tokens back by the
    permutation that sorted them instead of its inverse. A loss that doesn't depend on the order stays right and hides
    the error.
    """

    why = (
        "The code joins the parts in a different order than it cut them, such as the order of their arrival",
        "The code flips, sorts or rolls each part before it joins them",
        "The code undoes a permutation with the permutation itself instead of its inverse",
    )
    how = (
        "concatenate parts by their rank in the group",
        "join the parts first, then flip, sort or roll the whole",
        "undo x[order] by y[order.argsort()]",
    )


class RepeatedParts(Cause):
    """Ranks have the same part of a result or of the batch, and the rest is on no rank.

    A sampler is given the wrong rank or number of ranks, or every rank reads the first part. All parts have the same
    shape, and each rank's loss is that of real rows, so training continues on a part of the data.

    Attributes:
        axes: The axes along which ranks have the same part.
        is_batch: Whether it is a part of the batch.
    """

    axes: str
    is_batch: bool
    why = (
        "Ranks along {axes} {is_batch:?compute the same part of the batch|have the same part}, and no rank has the "
        "rest. The code doesn't choose the part by the rank's own coordinate"
    )
    how = (
        "choose each rank's part by its coordinate along {axes}, mesh.get_local_rank(){is_batch:?: pass it to "
        "DistributedSampler as rank, and the axis's size as num_replicas}"
    )


class PartOfAnotherRank(Cause, kind="misordered"):
    """Ranks along an axis have another rank's part of an activation, often the first's.

    Each rank counts positions or indices from 0, or indexes a gather by the wrong rank. Parts have equal shapes, so
    nothing raises.

    Attributes:
        is_first: Whether every rank has the part of the first.
    """

    axis: str
    is_first: bool
    why = (
        "{is_first:?Every rank along {axis} has the first rank's part: positions or indices start at 0 on every "
        "rank|Ranks along {axis} have each other's parts: a gather or an index uses the wrong rank}"
    )
    how = "take the part of the rank's own coordinate, mesh.get_local_rank({axis!r})"


class WrongOutputLabel(Cause, kind="wrong-placement"):
    """The output is right under other placements than those of its label.

    torch does not compare a label with the data. Code that trusts the label joins the parts wrongly.

    Attributes:
        labeled: The placements of the label, with commas.
        due: The placements under which the values match the unsharded model's.
    """

    labeled: str
    due: str
    why = (
        "The output is labeled ({labeled}), and its values are split differently. DTensor.from_local accepts any "
        "label; a plain output counts as split by rows over BATCH_AXES only"
    )
    how = "label it ({due}); if the output is plain, gather what other axes split, or correct BATCH_AXES"


class PositionsStartAgain(Cause):
    """Ranks compute the same slices of a sequence, because positions start at 0 on each.

    Each rank counts positions within its own tokens. An embedding or rotary table accepts them, and every rank gets
    the slices that belong to the first.

    Attributes:
        module: The first module whose output shows it.
        axis: The axes that fit: `cp or tp`.
        are_tokens_right: Whether ranks are known to have different tokens.
    """

    module: str
    axis: str
    are_tokens_right: bool = False
    why = (
        "Every rank along {axis} counts the positions for {module:called} from 0",
        "{are_tokens_right:?|Every rank gets the same part of the sequence}",
    )
    how = (
        "give {module:called} the tokens' positions in the whole sequence",
        "{are_tokens_right:?|cut the sequence by the rank's own coordinate along {axis}}",
    )


class UngatheredKeys(Cause):
    """Attention over a split sequence uses each rank's own keys, or mismatched positions.

    Queries need the keys and values of the whole sequence. With local keys attention runs without an error and attends
    to a part of the text.

    Attributes:
        before: The last right module.
        module: The first wrong one.
        exchange: A collective that ran between the two over that axis; empty if none was seen.
    """

    before: str
    module: str
    axis: str
    exchange: str = ""
    why = (
        (
            "{exchange:?|If attention runs between {before:called} and {module:called}, it uses only each rank's own "
            "keys and values}"
        ),
        "{exchange:?The code joins the results of {exchange} over {axis} in the wrong order of tokens or heads}",
        "Rotary positions or the mask don't match the order of the {exchange:?exchanged|gathered} keys",
    )
    how = (
        "{exchange:?|gather keys and values over {axis}, or use ring attention}",
        (
            "{exchange:?join the results of {exchange} in the order of the ranks along {axis}, along the dim that was "
            "split}"
        ),
        "compute both from the tokens' positions in the whole sequence",
    )


class SegmentsInOneStretch(Cause, kind="wrong-segment"):
    """A fused weight is cut in one stretch, so a rank lacks some of its segments.

    Gate and up, or q, k and v, are one weight that the model splits into segments. Each segment must be cut separately.
    A single stretch has the same shape, and the model reads segments in it that aren't there.

    Attributes:
        reader: The module that reads a segment.
        num_ranks: How many ranks there are along the axis, if the weight's placements claim the stretch; else 0.
        expect: The layout to expect in a probe of such a weight with its rows in rank order; empty if there is none.
    """

    tensor: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    axis: str
    reader: str
    num_ranks: int = 0
    expect: str = ""
    why = (
        (
            "The code cuts the {count} fused segments of {tensor} ({sizes:sum}, {called}) in one stretch over {axis}, "
            "so a rank lacks some segments"
        ),
        "If the model reads the segments head by head (unflatten), the cut is right",
    )
    how = (
        (
            "{num_ranks:?give each segment a Linear of its own{expect:?; or put the rows in rank order before they are "
            "sharded, torch.cat([segment.chunk({num_ranks})[rank] for rank in range({num_ranks}) for segment in "
            "weight.chunk({count})]), and say so in the probe: {expect_line}}|cut every segment separately, as {due}: "
            "torch.cat([segment.chunk(n)[rank] for segment in "
            "weight.{has_equal_segments:?chunk({count})|split({sizes:list})}]){has_equal_segments:?|, and split each "
            "rank's output by the sizes of its own segments}}"
        ),
        "in that case, look for the mistake in {reader:called} and in what makes its input",
    )

    @property
    def count(self) -> int:
        """The number of segments."""
        return len(self.sizes)

    @property
    def called(self) -> str:
        """An example of so many segments."""
        return {2: "such as gate and up", 3: "such as q, k and v"}[self.count]

    @property
    def expect_line(self) -> str:
        """The line of a probe that expects the layout for this weight in every layer."""
        return f"expect = {{'*.{'.'.join(self.tensor.split('.')[-2:])}': '{self.expect}'}}"

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


class PartsDealtOtherwise(Cause, kind="misordered"):
    """A weight's parts are on different ranks than the matching parts of other weights.

    Weights may be cut in any order if all weights that are multiplied with each other use the same order. A weight
    that differs multiplies features by another rank's rows, with the right shapes.

    Attributes:
        copies: How many ranks share each part.
    """

    tensor: str
    axis: str
    num_ranks: int
    copies: int
    why = (
        "{is_shared:?Several ranks along {axis} share a part of {tensor}, such as a key head. }The ranks along {axis} "
        "have the parts of {tensor} in a different order than those of the weights that it is multiplied with"
    )
    how = (
        "{is_shared:?give the ranks along {axis} the parts {parts:8} of {tensor} (torch.repeat_interleave), and sum "
        "its gradient over the ranks that share a part|cut {tensor} with torch.chunk by mesh.get_local_rank({axis!r})}"
    )

    @property
    def is_shared(self) -> bool:
        """Whether ranks share parts."""
        return self.copies > 1

    @property
    def parts(self) -> tuple[int, ...]:
        """The part that each rank should have."""
        return tuple(rank // self.copies for rank in range(self.num_ranks))


class ExpertsSentElsewhere(Cause, kind="misordered"):
    """Tokens are sent to ranks by a different placement of the experts than the real one.

    The experts are placed round-robin and tokens are sent as if in chunks, or the reverse. Every token reaches some
    expert, and few reach their own.

    Attributes:
        experts_per_rank: How many experts each rank has.
        is_in_turn: Whether the experts are placed round-robin; else in chunks.
    """

    tensor: str
    axis: str
    num_ranks: int
    experts_per_rank: int
    is_in_turn: bool
    why = (
        "The experts of {tensor} are placed {is_in_turn:?round-robin|in chunks} over {axis}, and the code sends tokens "
        "as if they were placed {is_in_turn:?in chunks|round-robin}"
    )
    how = (
        "send the tokens of expert e to rank e {is_in_turn:?% {num_ranks}, place e // {num_ranks}|// "
        "{experts_per_rank}, place e % {experts_per_rank}}"
    )


class LayersDropped(Cause, kind="missing"):
    """Some layers are on no stage: a remainder, or a gap between the stages' lists.

    An integer division gives every stage the same number of layers and forgets the remainder, or two stages' ranges
    leave a gap. The pipeline then runs a shorter model, with the right shapes.

    Attributes:
        size: How many layers the model has.
        is_remainder: Whether it is the remainder of a division.
    """

    size: int
    num_stages: int
    is_remainder: bool
    why = (
        "{is_remainder:?The code divides {size} layers by {num_stages} stages and drops the remainder|The stages' "
        "lists of layers leave a gap between two stages}"
    )
    how = "give every layer to a stage: torch.arange({size}).tensor_split({num_stages}) drops none"


class OverlappingStages(Cause, kind="duplicated"):
    """A layer is on several stages and runs on each of them.

    The ranges of two stages overlap by a layer. Each activation passes that layer several times, and shapes don't
    change.

    Attributes:
        tensor: The layer.
        times: How many stages have it.
        size: How many layers the model has.
    """

    tensor: str
    times: int
    size: int
    why = "{times} stages have {tensor}, so each activation goes through {tensor} {times} times"
    how = "keep {tensor} on one stage: torch.arange({size}).tensor_split(num_stages) gives each layer once"


class StagesOutOfOrder(Cause, kind="misordered"):
    """Stages hand their output to a stage that does not have the next layers.

    Layers are placed in one order and stages are numbered in another, for instance round-robin with one stage a rank.
    Every layer runs once, but not in the model's order.

    Attributes:
        size: How many layers the model has.
        coordinates: The coordinate along the axis of each stage, in the stages' order.
    """

    axis: str
    size: int
    coordinates: tuple[int, ...]
    why = "The step sends each stage's output along {axis} to the next stage number, which doesn't have the next layers"

    how = (
        "{is_shared:?give each rank the layers of its own stages, {coordinates:4} along {axis}|give the {count} stages "
        "consecutive layers: torch.arange({size}).tensor_split({count})[stage]; if a rank runs several stages, list "
        "each in stages() under its number}"
    )

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.coordinates)

    @property
    def is_shared(self) -> bool:
        """Whether a rank has stages that follow one another."""
        return any(stage == following for stage, following in pairwise(self.coordinates))


class StagesMisnumbered(Cause, kind="misordered"):
    """Ranks with several stages run the stages in a different order than their numbers.

    An interleaved schedule numbers stages in a loop over the ranks, a V schedule forth and back. Layers that were
    placed for one schedule go wrong in the other, from each rank's second stage on.
    """

    why = (
        (
            "Stages are numbered in a loop (rank r of p has r and p + r), and the step runs them in a V (r and 2p - 1 "
            "- r), or the reverse"
        ),
        "The step sends a stage another stage's output",
    )
    how = (
        (
            "number the stages in the order in which the step passes activations on, and give each its layers by that "
            "number"
        ),
        "send each stage's output to the stage with the next number",
    )
