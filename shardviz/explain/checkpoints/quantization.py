"""Causes of scales and zero points that belong to blocks of a weight."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class FactorsOfBlocks(Cause):
    """Rows or columns of a matrix, or parts of them, are each multiplied by another factor.

    A merge that normalizes each rank's part (DoRA's direction, weight norm) divides by norms of parts. Scales of
    quantization groups that are counted from each rank's first one are those of other groups.

    Attributes:
        lines: What has factors: row or column.
        others: What its parts are made of: columns or rows.
        is_part: Whether parts have them; else whole lines.
        is_some_right: Whether some parts are the original's in every line: norms of parts would change all.
    """

    lines: str
    others: str
    is_part: bool
    is_some_right: bool = False
    why = (
        "{is_some_right:?|{is_part:?Each rank's part of a {lines} was divided by its own norm|Each {lines} was "
        "multiplied by a norm or a scale, or one was left out}}",
        "The scales of other {is_part:?groups of {others}|{lines}s} were used, as when {is_part:?groups|they} are "
        "counted from each rank's first one",
    )
    how = (
        "{is_some_right:?|{is_part:?join the ranks' parts before the norm is taken|compare the norms and scales of "
        "each {lines}}}",
        "{is_part:?add the groups of the ranks before it to a rank's group numbers|take the scales in the order of the "
        "{lines}s}",
    )


class OffsetsOfBlocks(Cause):
    """Each row or column of a matrix, or each part of one, has a different number added.

    Integer weights have a scale and a zero point for each row, or for each group of inputs. Some formats store zero
    points minus 1, others minus 8. Read as they are stored, every group is off by a step of its own, or by eight.

    Attributes:
        lines: What has offsets: row or column.
        others: What its parts are made of: columns or rows.
        is_part: Whether parts have them; else whole lines.
    """

    lines: str
    others: str
    is_part: bool
    why = (
        "The zero point of each {is_part:?group of {others}|{lines}} is off. Most likely it was read as stored, and "
        "the format stores it minus 1 or minus 8; or it was left out"
    )
    how = "compare how both sides make a zero point from what is stored, such as + 1 or - 8"


class WrongQuantizationScales(Cause):
    """Eight-bit values and their scales don't give the nearest numbers to the other side's.

    Values and scales are two tensors. If one of them comes from a different step or order, the product is
    wrong and nothing raises.
    """

    why = "The values or the scales belong to a different tensor or step, or are in a different order"
    how = "quantize again, and save values and scales together"


class TransposedScales(Cause):
    """Eight-bit values are right with their scales transposed.

    A weight has one scale for each block, in a matrix of its own. If only one of the two is transposed, each block
    meets the scale of a different block. The shapes still fit if the weight has as many rows of blocks as columns.
    """

    why = "The scale of block (i, j) is stored at (j, i)"
    how = "transpose the scales in the conversion, as the weight is: scales.t().contiguous()"


class InvertedScales(Cause):
    """Eight-bit values are right with one over their scales.

    Some formats store the number that values were multiplied by, others the number that gives the values back. Both are
    called a scale, and weight_scale_inv is the second kind.
    """

    why = "Each scale is one over the right one"
    how = "store what a value in eight bits is multiplied by: 1 / scale"
