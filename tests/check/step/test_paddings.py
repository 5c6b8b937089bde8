"""Weights that a job pads: what ranks have of the other job's is found, and other values are no padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.check.step.jobs.paddings import paddings_of
from shardviz.check.step.trace.traces import Kept, Weight
from shardviz.layout.mesh import Mesh
from shardviz.layout.notation import parse


def plain(values):
    return Weight(values.shape, None, Kept.of(values.shape, values, "float32"))


def padded_parts(whole, count, size, dim=0):
    """Return the parts of a weight that was made longer, to `size` slices."""
    widths = [(0, size - length if at == dim else 0) for at, length in enumerate(whole.shape)]
    longer = np.pad(whole, widths, constant_values=0.25)
    return {rank: plain(part) for rank, part in enumerate(np.split(longer, count, dim))}


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 8), st.integers(0, 1))
def test_what_ranks_have_without_padding_is_all_of_the_weight(own, count, less, dim):
    size = own * count
    whole = np.moveaxis(drawn(size - 1 - less % (own - 1), 3), 0, dim)
    parts = padded_parts(whole, count, size, dim)
    unpadded = paddings_of({"up": plain(whole)}, {"up": parts}, Mesh(("tp",), (count,)))["up"]
    own = [unpadded.part(rank, parts[rank]).values for rank in range(count)]
    assert [one.shape for one in own] == [unpadded.regions[rank].shape for rank in range(count)]
    assert np.array_equal(np.concatenate([one.values for one in own], dim), whole)


def test_copies_of_padded_parts_and_padded_dtensors_are_found():
    whole, mesh = drawn(27, 4), Mesh(("dp", "tp"), (2, 2))
    parts = padded_parts(whole, 2, 28)
    copies = {rank: parts[rank % 2] for rank in range(4)}
    regions = paddings_of({"up": plain(whole)}, {"up": copies}, mesh)["up"].regions
    assert [regions[rank].dims[0] for rank in range(4)] == [((0, 14),), ((14, 27),)] * 2
    layout = parse("[28/tp, 4]").layout(mesh)
    claimed = {rank: Weight((28, 4), layout, copies[rank].values) for rank in range(4)}
    unpadded = paddings_of({"up": plain(whole)}, {"up": claimed}, mesh)["up"]
    assert unpadded.regions == regions
    gradient = Weight((28, 4), parse("[28, 4]").layout(mesh), plain(np.ones((28, 4))).values)
    assert unpadded.part(1, gradient).values.shape == (27, 4)
    of_rows = plain(np.ones(14))
    assert unpadded.part(1, of_rows) == of_rows


def test_heads_that_ranks_share_in_another_order_are_no_padding():
    whole = drawn(4, 3)
    parts = {rank: plain(whole[rank % 2 * 2 :][:2]) for rank in range(4)}
    assert paddings_of({"up": plain(whole)}, {"up": parts}, Mesh(("tp",), (4,))) == {}


@pytest.mark.parametrize(
    "change", [lambda parts: parts[::-1], lambda parts: [parts[0], parts[0]], lambda parts: [parts[0], parts[1] + 1]]
)
def test_other_values_are_no_padded_parts(change):
    whole = drawn(27, 4)
    parts = [part.values.values for part in padded_parts(whole, 2, 28).values()]
    changed = {rank: plain(part) for rank, part in enumerate(change(parts))}
    assert paddings_of({"up": plain(whole)}, {"up": changed}, Mesh(("tp",), (2,))) == {}


def test_parts_that_are_no_longer_than_the_weight_are_left_to_others():
    whole = drawn(28, 4)
    copies = dict.fromkeys(range(2), plain(whole))
    for parts in (padded_parts(whole, 2, 28), copies):
        assert paddings_of({"up": plain(whole)}, {"up": parts}, Mesh(("tp",), (2,))) == {}
    halves = padded_parts(whole, 2, 28)
    copied = {rank: halves[rank % 2] for rank in range(4)}
    assert paddings_of({"up": plain(whole)}, {"up": copied}, Mesh(("dp", "tp"), (2, 2))) == {}
