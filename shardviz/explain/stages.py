"""Causes of a wrong pipeline: layers and stages that are not in one order, each layer on one stage."""

from __future__ import annotations

from itertools import pairwise

from shardviz.explain.cause import Cause


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
