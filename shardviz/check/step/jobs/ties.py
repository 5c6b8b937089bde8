"""Weights that are one in one job and two in another, each with the gradient of its own use."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.placement.values import BrokenTie
from shardviz.explain.step.gradients import UnsummedTiedGradients
from shardviz.relate.measures import ratio_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


def broken_ties(gradients: Mapping[str, Compared]) -> Iterator[Finding]:
    """Yield names that have one gradient in the other job, of which ranks have two terms."""
    wrong = [gradient for gradient in gradients.values() if not gradient.incomparable and gradient.wrong]
    for first, second in combinations(wrong, 2):
        if not np.array_equal(first.wanted, second.wanted):
            continue
        terms = [_whole(gradient) for gradient in (first, second)]
        are_copies = np.array_equal(terms[0], terms[1]) and first.reduced.keys() & second.reduced.keys()
        if not are_copies and first.near(terms[0] + terms[1], first.wanted):
            cause = _cause(first, second)
            members = [
                cause.finding(one.name, one.wrong, f"the gradient and that of {other} are two terms of the right one")
                for one, other in ((first, second.name), (second, first.name))
            ]
            members = [member.seen_in(one) for member, one in zip(members, (first, second), strict=True)]
            yield replace(members[0], members=tuple(members))


def _cause(first: Compared, second: Compared) -> Cause:
    """Return why two names of one weight have a term of its gradient each: by the ranks that have them."""
    if first.reduced.keys() & second.reduced.keys():
        return BrokenTie(second.name, first.name)
    is_half = ratio_of(first) == Fraction(1, 2) == ratio_of(second)
    return UnsummedTiedGradients(2) if is_half else UnsummedTiedGradients()


def _whole(gradient: Compared) -> NDArray[np.float64]:
    """Return a gradient put together of ranks' parts; NaN if one lacks a part."""
    whole = np.full(gradient.wanted.size, np.nan)
    for rank, held in gradient.reduced.items():
        whole[gradient.regions[rank].flat_ids(gradient.wanted.shape).ravel()] = held.ravel()
    return whole.reshape(gradient.wanted.shape)
