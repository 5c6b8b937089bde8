"""Causes of checkpoint conversions that differ from their map, or in whose list of names two are exchanged."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class MisappliedFunction(Cause, kind="misordered"):
    """A conversion left out a function of its map, applied its inverse, or applied it twice.

    Functions such as rotary only reorder rows. Without them, in reverse or run again on a checkpoint that was already
    converted, every shape is right, and the model computes something else.

    Attributes:
        function: The function's name in the map.
        times: How often it was applied: 0, -1 for its inverse, or 2.
        in_torch: The same in torch's own words; empty for what has a name there.
    """

    function: str
    times: int
    in_torch: str = ""
    why = "The conversion {times:0?left out {function}|applied {function} {times:2?twice|in reverse}}"
    how = "apply {function} once in the conversion{in_torch:?: {in_torch}}"


class WrongMapNumber(Cause, kind="misordered"):
    """A conversion applied a function of its map with a different number.

    The size of a head, the number of parts or an index comes from a different model's settings. Any number that divides
    the rows gives the right shape.

    Attributes:
        function: The function's name in the map.
        rows: How many rows it reorders; 0 if its number isn't the rows of a head.
        held: The rows of a head that it was called with.
        wanted: Those of the map.
    """

    function: str
    rows: int = 0
    held: int = 0
    wanted: int = 0
    why = (
        "The conversion calls {function} with a different number than the map{rows:?: it takes the {rows} rows for "
        "{heads_held} heads of {held} rows, and they are {heads} heads of {wanted} rows}"
    )
    how = "use the numbers of the map{rows:?: {heads} heads of {wanted} rows}"

    @property
    def heads_held(self) -> int:
        """How many heads the conversion takes the rows for."""
        return self.rows // self.held

    @property
    def heads(self) -> int:
        """How many heads they are."""
        return self.rows // self.wanted


class PartsJoinedOtherwise(Cause, kind="misordered"):
    """A conversion joined the parts of a fused tensor in a different way than its map says.

    Parts one after the other, interleaved parts and reordered parts have the same shape. So have parts along another
    dim if the tensor is square.

    Attributes:
        manner: How it joined them.
        function: The function by which the map joins them; empty if only their order differs.
        dim: The dim along which the map joins them.
        in_torch: How the map joins a list of parts, in torch's own words.
    """

    manner: str
    function: str = ""
    dim: int = 0
    in_torch: str = ""
    why = "The conversion joined the parts {manner}"
    how = "join them {function:?as {function} along dim {dim}|in the map's order}{in_torch:?: {in_torch}}"


class FusedShardsJoined(Cause, kind="misordered"):
    """The shards of a fused tensor were joined without taking them apart into its parts.

    Each rank's shard of a fused weight has a piece of every part (q, k and v). Joined as they are, the pieces of the
    ranks come in turns, and the shape is right.

    Attributes:
        ranks: How many ranks' shards were joined.
        dim: The dim along which the parts are joined.
    """

    ranks: int
    dim: int
    why = "The conversion concatenates the fused shards of {ranks} ranks, each with its piece of every part"
    how = (
        "split each rank's shard into its parts, join the pieces of each part, then concatenate the parts along dim "
        "{dim}"
    )


class TransposedInConversion(Cause, kind="misordered"):
    """A conversion transposed a matrix, or did not although its map does.

    Some layers store (in, out) and others (out, in). For a square matrix both load.
    """

    why = "The conversion transposes the tensor, or doesn't although its map does"
    how = "transpose it in the conversion"


class AnotherSourceTensor(Cause):
    """A conversion made a tensor from the wrong parts, or joined the parts in the wrong order.

    Tensors of different layers or projections often have the same shape, and the parts of a stack, such as experts,
    always have.

    Attributes:
        expression: How the map makes the tensor.
        is_renumbered: Whether the parts, such as experts, are the same in a different order.
    """

    expression: str
    is_renumbered: bool = False
    kinds = ("foreign", "misordered")
    why = (
        "{is_renumbered:?The conversion numbers the parts in a different order|The conversion takes a different "
        "tensor, or joins the parts in a different order}"
    )
    how = "make it as {expression}"


class PartOverwritten(Cause):
    """A part of a fused tensor is in the place of another part, and not in its own.

    An engine copies each part to where it starts in the fused tensor. If two parts start at one place, the last to come
    stays there, and the place that nothing was written to keeps its first values.

    Attributes:
        part: The part that is in another's place.
        place: The part whose place that is.
    """

    part: str
    place: str
    why = "{part} is written to where {place} belongs, and nothing is written to its own place"
    how = "start each part where the one before it ends"


class ExchangedNames(Cause, kind="foreign"):
    """Two tensors changed places: each stands under the other's name.

    Shapes agree, so both load. Some formats have the gate before the up projection in a fused matrix, and others have
    it behind.

    Attributes:
        words: The words in which the two names differ.
        are_of_layer: Whether they are modules of a layer, which a fused tensor may have been split into.
    """

    words: tuple[str, ...]
    are_of_layer: bool = False
    why = (
        "The code that wrote the second checkpoint swaps {words}",
        "{are_of_layer:?It splits a fused tensor into {words} in the wrong order|}",
    )
    how = (
        "swap {words} in that code's list of names",
        "{are_of_layer:?split the fused tensor in the order in which the first checkpoint has the parts|}",
    )
