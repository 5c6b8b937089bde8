"""Causes of a module that gets other ranks' parts of a sequence, or terms of a sum, and joins them wrongly."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class JoinedFromAfar(Cause):
    """Ranks join what comes from the nearest rank right, and what comes from farther away wrong.

    A state that a rank passes on goes through the ranks between. Each of them changes it: it decays, is multiplied by
    their gates, or is scaled anew. Code that adds up the parts of all ranks before leaves that out. It is right with
    two ranks, so small tests pass. A window that is longer than a rank's part has the same ranks wrong, if only one
    neighbor sends its part.

    Attributes:
        module: The module.
        right: The coordinates whose result is right, as `0-1`.
        wrong: Those whose result is wrong.
        side: The ranks that parts come from: `before` or `after`.
        place: The lines that run once for each of these ranks, as `model.py:48`; empty if that isn't known.
        near: What comes from so many ranks is joined right.
        num_wrong: How many coordinates are wrong.
    """

    module: str
    axis: str
    right: str
    wrong: str
    side: str
    place: str = ""
    near: int = 1
    num_wrong: int = 2
    why = (
        "In {module:called}, what comes from {near:1?the rank just|the {near} nearest ranks} {side} along {axis} is "
        "joined right: coordinates {right} are right. What comes from farther away isn't, so "
        "{num_wrong:1?coordinate {wrong} is|coordinates {wrong} are} wrong: what the ranks between do to it (a decay, "
        "a gate, a rescaling) is left out, or it never arrives",
        "Positions, a mask or a table are wrong in {num_wrong:1?the part of coordinate|the parts of coordinates} "
        "{wrong}",
    )
    how = (
        "{place:?in {place}, change|in {module:called}, change} what is joined so far by each rank between, with that "
        "rank's own factor, before its part is added: gather these factors over {axis}, too",
        "compare positions and masks of these parts with the unsharded model's",
    )


class WrongDenominator(Cause):
    """Each row is the unsharded model's times a number: what it is divided by is wrong.

    A softmax divides by the sum of its exponentials. Blocks that are computed one by one are merged by their
    log-sum-exp. All numerators are right here, so every key counts in the right proportion. Only the sum differs: a
    block's log-sum-exp lacks its maximum, or something counts once a block that belongs there once, such as an
    attention sink.

    Attributes:
        module: The module.
        size: How many neighboring features share a number.
        is_smaller: Whether results are too small.
        is_of_row: Whether all features of a row share its number.
        ranks: The ranks that are wrong.
        place: The lines that run once for each of the ranks before, as `model.py:57`; empty if that isn't known.
    """

    module: str
    size: int
    is_smaller: bool
    is_of_row: bool
    ranks: tuple[int, ...]
    place: str = ""
    why = (
        "In {module:called}, each {size} features of a row are the unsharded model's times a number of their own. "
        "{is_of_row:?A number of each position, such as a gate, a temperature or the statistic of a norm, is wrong or "
        "that of a different position|So all weights are in the right proportion. Most likely the denominator (the "
        "log-sum-exp) is too {is_smaller:?large: something counts in it more than once, such as an attention sink once "
        "for each block of keys|small: something is missing in it, such as the sum of a block or its maximum}}",
        "{is_of_row:?If it is attention with one head, its denominator (the log-sum-exp) is too {is_smaller:?large: "
        "something counts in it more than once, such as a sink once for each block of keys|small: something is missing "
        "in it, such as the sum of a block or its maximum}|}",
    )
    how = (
        "{is_of_row:?count the positions by which rows are multiplied from the beginning of the whole sequence, and "
        "compare what each row is multiplied or divided by with the unsharded model's|"
        "{place:?in {place}|in {module:called}}, {is_smaller:?count a sink or a bias in the denominator once: in one "
        "block, or after all blocks are merged|merge blocks by torch.logaddexp of their whole log-sum-exp, each with "
        "its maximum}}",
        "{is_of_row:?{place:?in {place}|in {module:called}}, {is_smaller:?count a sink or a bias in the denominator "
        "once: in one block, or after all blocks are merged|merge blocks by torch.logaddexp of their whole "
        "log-sum-exp, each with its maximum}|}",
    )


class ConcatenatedTerms(Cause, kind="wrong-shape"):
    """Terms of a sum are gathered side by side instead of being added.

    An all_gather is used instead of an all_reduce. The result is larger than it should be along one dim, and code
    that does not check its shape goes on with it.

    Attributes:
        dim: The dim along which they were joined.
        vector: A bias that is added after the sum; empty if there is none.
    """

    axis: str
    dim: int
    vector: str = ""
    why = (
        "The ranks' parts along {axis} are terms of a sum. The code concatenates them along dim {dim} instead of "
        "adding them"
    )
    how = "all_reduce the parts over {axis} instead of gathering them{vector:?, and add {vector} after the sum}"
