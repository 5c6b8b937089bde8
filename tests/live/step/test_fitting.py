"""Which part of the unsharded model's values ranks have: splits, terms of a sum, and what looks like terms."""

import pytest
import torch

from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Partial, Replicate, Shard
from shardviz.live.step.trace.fitting import Allowed, fitting
from shardviz.relate.sums import placements_of_sum

MESH = Mesh(("dp", "tp"), (2, 2))
WHOLE = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()


def test_a_rank_has_the_part_of_its_coordinate():
    parts = {rank: WHOLE.chunk(2, 1)[rank % 2] for rank in MESH.ranks}
    for rank, values in parts.items():
        found = list(fitting(values, WHOLE, MESH, rank, Allowed(1e-9)))
        assert (Replicate(), Shard(1)) in found
    assert not list(fitting(parts[0], WHOLE, MESH, 3, Allowed(1e-9)))


def terms(split):
    first = WHOLE * split
    return {rank: (first if rank % 2 == 0 else WHOLE - first).numpy() for rank in MESH.ranks}


def placed(values):
    def fits(rank, total):
        return fitting(torch.from_numpy(total), WHOLE, MESH, rank, Allowed(1e-9))

    return placements_of_sum(values, MESH, fits, 1e-9)


def test_different_terms_are_those_of_a_sum_over_their_axis():
    found = placed(terms(torch.linspace(0, 1, 6, dtype=torch.float64)))
    assert found == (Replicate(), Partial("sum"))


@pytest.mark.parametrize("share", [0.5])
def test_one_number_times_the_whole_on_every_rank_is_a_scale_and_no_sum(share):
    assert placed(terms(share)) is None


def test_all_of_it_on_one_rank_and_zeros_on_the_other_are_terms():
    found = placed(terms(1.0))
    assert found == (Replicate(), Partial("sum"))


def test_terms_of_one_rank_alone_are_no_sum():
    own = {0: (WHOLE * 0.3).numpy(), 2: (WHOLE * 0.3).numpy()}
    assert placed(own) is None
