"""A module that normalizes by the statistics of a rank's own part of the features, where those of all are meant.

RMSNorm divides each row by its root mean square, LayerNorm takes off its mean first. Of a part of the features both are
other numbers: the rank's output is then the unsharded model's times one number per row, plus one more for LayerNorm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.forward.reason import Reason
from shardviz.explain.modules import NormOfSplitFeatures
from shardviz.layout.region import indices
from shardviz.relate.factors import factors_of_rows
from shardviz.relate.tolerance import FEW, LEAST_STATISTIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump


def check_normalized(evidence: Evidence, one: Compared) -> Reason | None:
    """Return the reason if the first odd module's output is the unsharded model's, times a number of each row's."""
    _, odd = evidence.activations.first_odd
    reference = evidence.dump.find("reference", "activation", odd.name) if odd is not None else None
    if odd is None or reference is None or not reference.shape:
        return None
    whole = evidence.dump.values(reference.first, odd.name)
    parts = _parts(evidence.dump, odd.name, whole.shape[-1])
    bare = _bare(evidence.dump, odd.name, whole)
    shards = evidence.dump.by_name("step", "activation")[odd.name].shards
    if not parts.keys() >= shards.keys() or bare is None:
        return None
    for rank, shard in shards.items():
        got = _bare(evidence.dump, odd.name, evidence.dump.values(shard, odd.name), parts[rank])
        if got is None or not _is_row_by_row(got, bare[..., parts[rank]], one.tolerance):
            return None
    return _reason(odd.name, min(map(len, parts.values())), whole.shape[-1], _splitting(evidence.dump, odd.name))


def _parts(dump: Dump, name: str, size: int) -> Mapping[int, NDArray[np.int64]]:
    """Return the features whose elements a module's weight has on each rank; nothing where no rank has a part."""
    stamped = dump.stamped.get(f"{name}.weight")
    if stamped is None or stamped.shape != (size,):
        return {}
    held = {rank: shard.held for rank, shard in stamped.shards.items()}
    parts = {rank: np.asarray(indices(own.dims[0])) for rank, own in held.items() if own is not None}
    return parts if all(FEW <= len(part) < size for part in parts.values()) else {}


def _bare(
    dump: Dump, name: str, values: NDArray[np.float64], features: NDArray[np.int64] | None = None
) -> NDArray[np.float64] | None:
    """Return an output without the module's own weight and bias; None where its last dim is not these features."""
    for suffix in ("bias", "weight"):
        parameter = dump.find("reference", "param", f"{name}.{suffix}")
        if parameter is not None:
            vector = dump.values(parameter.first, f"{name}.{suffix}")
            vector = vector if features is None else vector[features]
            if values.shape[-1:] != vector.shape or (suffix == "weight" and not np.all(vector)):
                return None
            values = values - vector if suffix == "bias" else values / vector
    return values


def _is_row_by_row(got: NDArray[np.float64], due: NDArray[np.float64], tolerance: float) -> bool:
    """Whether each row is another row times a number, plus a number, and not all of these are 1 and 0."""
    if got.shape != due.shape:
        return False
    got, due = got.reshape(-1, got.shape[-1]), due.reshape(-1, due.shape[-1])
    centred, other = got - got.mean(1, keepdims=True), due - due.mean(1, keepdims=True)
    factors = factors_of_rows(centred, other)
    if factors is None:
        return False
    left = np.abs(centred - factors * other).max()
    return bool(
        left <= 10 * tolerance * max(1.0, float(np.abs(got).max())) and np.any(np.abs(factors - 1) > LEAST_STATISTIC)
    )


def _splitting(dump: Dump, name: str) -> str:
    claimed = dump.stamped[f"{name}.weight"].claimed
    chain = claimed.chains[0] if claimed is not None else ()
    return " and ".join(link for link in chain if isinstance(link, str)) or "the mesh"


def _reason(name: str, part: int, size: int, axes: str) -> Reason:
    return Reason(
        NormOfSplitFeatures(name, axes),
        f"on every rank each row of the output of {name} is the unsharded model's times a number of its own: ranks "
        f"normalize by the statistics of their {part} of {size} features",
        tensor=name,
    )
