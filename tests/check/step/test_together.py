"""A job's tensors put together from what its ranks have."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from shardviz.check.step.jobs.whole_job import put_as, put_together, together
from shardviz.check.step.trace.traces import Kept, joined_along
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.notation import parse
from shardviz.layout.placements import Partial, Replicate, Shard

MESH = Mesh(("dp", "tp"), (2, 3))
PLACEMENTS = st.sampled_from([Replicate(), Shard(0), Shard(1)])


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape)


def kept(values, dtype="float64"):
    return Kept.of(values.shape, np.asarray(values, np.float64), dtype)


def cut(values, mesh, layout):
    spans = {rank: layout.region_of_rank(rank).dims for rank in mesh.ranks}
    return {
        rank: kept(values[tuple(slice(*own[0]) if own else slice(0) for own in dims)]) for rank, dims in spans.items()
    }


@given(PLACEMENTS, PLACEMENTS, st.integers(6, 9), st.integers(6, 9))
def test_any_split_is_among_the_ways_to_put_it_together(dp, tp, rows, columns):
    values = numbers(rows, columns)
    layout = Layout.from_placements(MESH, values.shape, (dp, tp))
    regions = [layout.region(MESH.coord_of(rank)) for rank in MESH.ranks]
    assume(all(region.size and all(len(spans) == 1 for spans in region.dims) for region in regions))
    parts = cut(values, MESH, layout)
    found = [whole for way, whole in together(parts, MESH) if way == (dp, tp)]
    assert len(found) == 1
    assert np.array_equal(found[0].values, values)
    whole = put_as(parts, MESH, (dp, tp))
    assert whole is not None
    assert np.array_equal(whole.values, values)


def test_terms_of_a_sum_are_a_way_of_activations_and_not_of_weights():
    parts = {rank: kept(numbers(4, 4) * (rank + 1)) for rank in range(2)}
    mesh = Mesh(("tp",), (2,))
    sums = [whole for way, whole in together(parts, mesh) if way == (Partial("sum"),)]
    assert np.allclose(sums[0].values, numbers(4, 4) * 3)
    ways = [way for way, _ in together(parts, mesh, is_exact=True)]
    assert ways
    assert (Partial("sum"),) not in ways


def test_equal_parts_are_copies_and_nothing_else():
    parts = dict.fromkeys(range(2), kept(numbers(4, 4)))
    assert [way for way, _ in together(parts, Mesh(("tp",), (2,)))] == [(Replicate(),)]


def test_ranks_that_have_nothing_are_left_out():
    values = numbers(4, 4)
    mesh = Mesh(("pp", "tp"), (2, 2))
    ((_, whole), *_) = together({2: kept(values[:2]), 3: kept(values[2:])}, mesh)
    assert np.array_equal(whole.values, values)


def test_copies_that_differ_are_not_put_together():
    parts = {0: kept(numbers(4)), 1: kept(numbers(4) * 2)}
    assert put_as(parts, Mesh(("dp",), (2,)), (Replicate(),)) is None


def test_weights_are_put_together_as_placements_claim():
    values = numbers(12, 4)
    layout = parse("[12/tp/dp, 4]").layout(MESH, values.shape)
    parts = cut(values, MESH, layout)
    layouts = dict.fromkeys(MESH.ranks, layout)
    whole = put_together(parts, layouts)
    assert whole is not None
    assert np.array_equal(whole.values, values)
    some = put_together({rank: parts[rank] for rank in range(5)}, layouts)
    assert some is not None
    assert not some.is_whole
    assert put_together(parts | {3: kept(numbers(3, 4))}, layouts) is None


def test_parts_that_do_not_fit_are_not_joined():
    assert joined_along(0, [kept(numbers(2, 3)), kept(numbers(2, 4))]) is None
    assert joined_along(1, [kept(numbers(2, 3)), kept(numbers(2, 4))]).shape == (2, 7)
    assert joined_along(1, [kept(numbers(2))]) is None
