"""shardviz's placements as torch's, for tests that lay the two beside each other."""

from __future__ import annotations

from torch.distributed.tensor import Placement, placement_types

from shardviz.layout import placements as plain


def in_torch(placement: plain.Placement) -> Placement:
    match placement:
        case plain.Shard(dim):
            return placement_types.Shard(dim)
        case plain.StridedShard(dim, factor):
            return placement_types._StridedShard(dim, split_factor=factor)
        case plain.Partial(op):
            return placement_types.Partial(op)
        case plain.Replicate():
            return placement_types.Replicate()
