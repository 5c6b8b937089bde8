"""A sharded step that makes NaN or infinity where the unsharded one does not: it is a finding, never an error."""

import pytest

from tests.lanes import at_night
from tests.live.probing import checked

ODD = """
def build(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Odd(8, 6))
def parallelize(model, mesh):
    model[2].sharded = True
    fully_shard(model, mesh=mesh["dp"])
class Odd(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return torch.where(out > 0, {number}, out) if hasattr(self, "sharded") else out
"""


@pytest.mark.parametrize("number", ["float('nan')", *at_night(["float('inf')", "-float('inf')"])])
def test_an_output_that_is_not_finite_is_found_with_its_module(number, tmp_path):
    (found,) = checked(ODD.format(number=number), "dp=2", tmp_path).findings
    assert (found.kind, found.tensor, found.module) == ("wrong-value", "output", "2")
    assert found.summary.startswith("the output is NaN or infinite in ")
