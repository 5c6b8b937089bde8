"""A module whose result is wrong because ranks hold the rows or columns of its weight in another order.

The order itself may be right: a job may keep a weight permuted, and use it so. It is a cause where a module is the
first wrong one, and where the modules of other layers have theirs in order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from shardviz.explain.modules import UnlikeLayers
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.dump.dump import Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.region import Ranges

MAX_LISTED = 4


def check_order_of_weights(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if a weight of the first wrong module is out of order, and those of other layers are not."""
    if (first.direction, first.way) != ("forward", "within") or not first.module:
        return None
    weights = evidence.dump.by_name("stamped", "param")
    others = [call.module for call in evidence.calls.alike(first.call)]
    for name, tensor in weights.items():
        module, _, own = name.rpartition(".")
        found = _out_of_order(tensor) if module == first.module else {}
        alike = [weights[f"{other}.{own}"] for other in others if f"{other}.{own}" in weights] if found else []
        if alike and not any(map(_out_of_order, alike)):
            return _finding(name, found)
    return None


def _out_of_order(tensor: Tensor) -> Mapping[int, int]:
    """Return the first dim along which each rank has what it holds in another order; ranks in order are left out."""
    found = {}
    for rank, shard in tensor.shards.items():
        dims = [dim for dim, spans in enumerate(shard.body.held or ()) if not _is_rising(spans)]
        if dims:
            found[rank] = dims[0]
    return found


def _is_rising(spans: Ranges) -> bool:
    return all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def _finding(name: str, dims: Mapping[int, int]) -> Finding:
    ranks = tuple(sorted(dims))
    dim = dims[ranks[0]]
    return UnlikeLayers(name, dim).finding(
        name,
        ranks,
        f"dim {dim} of {name} is in another order on {named_ranks(ranks, MAX_LISTED)} than in the unsharded model; "
        "the weights of other layers are in order",
    )
