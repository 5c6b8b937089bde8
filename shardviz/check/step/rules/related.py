"""Results that one relation makes of the unsharded model's, where no rule that knows more of the place has spoken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.check.step.rules.losses import exponentials_of
from shardviz.check.step.words import WHAT, claimed_text
from shardviz.explain.changed import AddedNumber, OnlyZerosThere, RoundedResult, TransposedResult
from shardviz.explain.templates import number
from shardviz.relate.factors import common_factor
from shardviz.relate.relations import Filled, Offset, Rounded, Transposed
from shardviz.relate.tolerance import FEW

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.relate.relations import Relation


def check_related(result: Compared) -> Finding | None:
    """Return the finding if all wrong ranks have what is wanted but for the same one relation."""
    if result.role == "scalar" or any(result.values[rank].size <= FEW for rank in result.wrong):
        return None  # fewer numbers are some other relation by chance
    link = _shared(result)
    cause = _cause(result, link) if link is not None else None
    if link is None or cause is None:
        return None
    return cause.finding(
        result.name, result.wrong, f"the {WHAT[result.role]} is {_text(result, link)}", claimed=claimed_text(result)
    )


def _shared(result: Compared) -> Relation | None:
    """Return the only relation of all wrong ranks; None if they have none, several, or not the same."""
    chains = {result.changes_of(rank) for rank in result.wrong}
    links = chains.pop() if len(chains) == 1 else None
    return links[0] if links is not None and len(links) == 1 else None


def _cause(result: Compared, link: Relation) -> Cause | None:
    of_all = set(result.wrong) == set(result.reduced)
    if isinstance(link, Offset):
        return exponentials_of(result, link.number) or AddedNumber(link.number, result.wrong, of_all)
    if isinstance(link, Filled) and not link.value and result.role == "output":
        return OnlyZerosThere(result.wrong, of_all)
    if isinstance(link, Rounded) and not _is_scaled(result):
        return RoundedResult(link.dtype)
    return TransposedResult(link.dims) if isinstance(link, Transposed) else None


def _is_scaled(result: Compared) -> bool:
    """Whether a factor of nearly 1 explains the values as well as a rounding does."""
    pairs = [(result.reduced[rank], result.wanted_of(rank)) for rank in result.wrong]
    factor = common_factor(pairs)
    return factor is not None and all(result.near(held, factor * due) for held, due in pairs)


def _text(result: Compared, link: Relation) -> str:
    if isinstance(link, Offset):
        return f"{result.whose} {'plus' if link.number > 0 else 'minus'} {number(abs(link.number))}"
    if isinstance(link, Filled):
        largest = max(abs(float(result.wanted.max())), abs(float(result.wanted.min())), math.ulp(0.0))
        return f"0 in every element, and the largest of {result.whose} is {number(largest)}"
    if isinstance(link, Rounded):
        return f"{result.whose} rounded to {link.dtype}"
    return f"{result.whose} with its dims in another order"
