"""Shards that repeat each other: drawn on every rank with one seed, or built so and split rightly."""

import pytest

from tests.live.probing import checked

EXPERTS = """
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch import distributed
BATCH_AXES = ()
del batch
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter({values})
def build(): return Experts()
def parallelize(model, mesh): model.w = nn.Parameter(distribute_tensor(model.w.data, mesh, [Shard({dim})]))
"""
COPIED = "torch.randn(3, 2).repeat(4, 1, 1)"
DRAWN = "torch.randn(4, 3, 2)"
ONE_SEED = """
def initialize(model, mesh):
    torch.manual_seed(5)
    model.w.to_local().data.normal_()
"""
ONE_FILE = """
def initialize(model, mesh):
    local = model.w.to_local().data
    distributed.broadcast(local, 0)
"""


@pytest.mark.parametrize(
    ("values", "dim"), [(COPIED, 0), ("torch.randn(3, 1).repeat(1, 8)", 1), ("torch.randn(2, 5).repeat(2, 1)", 0)]
)
def test_parts_that_were_built_alike_are_no_identical_shards(values, dim, tmp_path):
    assert checked(EXPERTS.format(values=values, dim=dim), "dp=2", tmp_path).findings == ()


@pytest.mark.parametrize("values", [COPIED, DRAWN])
@pytest.mark.parametrize("after", [ONE_SEED, ONE_FILE])
def test_shards_that_were_drawn_or_loaded_alike_are(values, after, tmp_path):
    report = checked(EXPERTS.format(values=values, dim=0) + after, "dp=2", tmp_path)
    wanted = [] if (values, after) == (COPIED, ONE_FILE) else ["identical-shards"]  # what is sent is what is there
    assert [one.kind for one in report.findings] == wanted
