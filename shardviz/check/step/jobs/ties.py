"""Weights that are one in one job and two in another, each with the gradient of its own use."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.placement.values import BrokenTie

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.explain.finding import Finding


def broken_ties(gradients: Mapping[str, Compared]) -> Iterator[Finding]:
    """Yield names that have one gradient in the other job, of which ranks have two terms."""
    wrong = [gradient for gradient in gradients.values() if not gradient.incomparable and gradient.wrong]
    for first, second in combinations(wrong, 2):
        wholes = [_whole(gradient) for gradient in (first, second)]
        if np.array_equal(first.wanted, second.wanted) and first.near(wholes[0] + wholes[1], first.wanted):
            members = [
                BrokenTie(second.name, first.name)
                .finding(one.name, one.wrong, f"the gradient and that of {other.name} are two terms of the right one")
                .seen_in(one)
                for one, other in ((first, second), (second, first))
            ]
            yield replace(members[0], members=tuple(members))


def _whole(gradient: Compared) -> NDArray[np.float64]:
    """Return a gradient put together of ranks' parts; NaN if one lacks a part."""
    whole = np.full(gradient.wanted.size, np.nan)
    for rank, held in gradient.reduced.items():
        whole[gradient.regions[rank].flat_ids(gradient.wanted.shape).ravel()] = held.ravel()
    return whole.reshape(gradient.wanted.shape)
