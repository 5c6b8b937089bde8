import pytest
from swiglu import SwiGLU, by_rows, by_segments

from shardviz.testing import assert_layout, assert_ordered, spmd, stamp

WANTED = {"gate_up.weight": "[*/2/tp, *]", "down.weight": "[*, */tp]"}


@pytest.mark.parametrize("shard", [by_segments, by_rows])
@spmd(mesh={"tp": 2})
def test_each_rank_has_a_half_of_gate_and_a_half_of_up(mesh, shard):
    model = SwiGLU()
    stamp(model)
    shard(model, mesh["tp"])
    assert_ordered(model)
    assert_layout(model, WANTED)
