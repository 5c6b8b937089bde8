"""Causes of logged statistics that are made of ranks' parts."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class StatisticOfParts(Cause):
    """A logged statistic is that of each rank's part, or a mean or sum of these.

    A norm, a deviation or a largest number of the whole is no mean of those of the parts. What is logged is near it, as
    parts are alike, and differs by the root of the number of ranks if squares are averaged instead of summed.

    Attributes:
        statistic: What it should be of the whole.
        way: What is logged.
        remedy: How it is made of the parts.
    """

    statistic: str
    way: str
    remedy: str
    kinds = ("wrong-value",)
    why = "What is logged is {way}, and that isn't the {statistic} of the whole"
    how = "{remedy}"
