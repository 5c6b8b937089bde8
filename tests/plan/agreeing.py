"""Compares a plan with what real ranks wrote: what each rank holds, and what it sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.text import Fold

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from shardviz.dump.read import DumpFiles
    from shardviz.dump.records.files import RankRecord

ROLES = ("param", "buffer", "grad", "optim")
"""What stays in memory between steps."""


def held(record: RankRecord) -> dict[tuple[str, str, str], tuple[object, ...]]:
    """Return what a rank holds before and after its step, by name, role and moment."""
    found = {}
    for tensor in record.tensors:
        body = record.bodies[tensor.body]
        moment = "step" if body.role in ("grad", "optim") else "initial"
        if body.moment != moment or body.role not in ROLES:
            continue
        claim = None if body.layout is None else record.layouts[body.layout]
        mesh = None if claim is None else (record.meshes[claim.mesh].axes, record.meshes[claim.mesh].ranks)
        layout = None if claim is None else (mesh, claim.placements, claim.shape, claim.flat, claim.own_axes)
        dtype = body.dtype if moment == "step" else ""  # a probe steps in float64, and holds its own
        for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names():
            found[name, body.role, body.moment] = body.shape, body.local_shape, dtype, layout
    return found


def sent(record: RankRecord) -> Counter[tuple[object, ...]]:
    """Return what a rank sent, as `show --comms` counts it."""
    from collections import Counter

    found: Counter[tuple[object, ...]] = Counter()
    for one in record.collectives:
        key = (one.op, one.axes, one.size, one.module, one.when)
        found[(*key, "times")] += one.count
        found[(*key, "bytes")] += one.bytes
    return found


def differences(real: DumpFiles, planned: DumpFiles, *, with_step: bool) -> Iterator[str]:
    """Yield every difference, a line each."""
    if sorted(real.ranks) != sorted(planned.ranks):
        yield f"ranks {sorted(real.ranks)} != {sorted(planned.ranks)}"
    for rank in real.ranks:
        one, other = held(real.ranks[rank]), held(planned.ranks[rank])
        if not any(moment == "step" for _, _, moment in one):
            other = {key: value for key, value in other.items() if key[2] != "step"}
        if real.ranks[rank].tied != planned.ranks[rank].tied:
            yield f"rank {rank} tied: real {real.ranks[rank].tied}, planned {planned.ranks[rank].tied}"
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                yield f"rank {rank} {key}: real {one.get(key)}, planned {other.get(key)}"
        if with_step and sent(real.ranks[rank]) != sent(planned.ranks[rank]):
            mine, theirs = sent(real.ranks[rank]), sent(planned.ranks[rank])
            for what in sorted(mine.keys() | theirs.keys(), key=str):
                if mine[what] != theirs[what]:
                    yield f"rank {rank} {what}: real {mine[what]}, planned {theirs[what]}"
