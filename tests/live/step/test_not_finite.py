"""A sharded step that makes NaN or infinity where the unsharded one does not: it is a finding, never an error."""

import pytest

from tests.lanes import at_night, recorded
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
BUFFER = """
class Adds(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("zeros", torch.zeros(6))
    def forward(self, x): return super().forward(x) + self.zeros
def build(): return Adds()
def initialize(model, mesh):
    if mesh.get_local_rank(): model.zeros.copy_({number})
"""


@pytest.mark.parametrize("number", ["float('nan')", *at_night(["float('inf')", "-float('inf')"])])
def test_an_output_that_is_not_finite_is_found_with_its_module(number, tmp_path):
    (found,) = checked(ODD.format(number=number), "dp=2", tmp_path).findings
    assert (found.kind, found.tensor, found.module) == ("wrong-value", "output", "2")
    assert found.summary.startswith("the output is NaN or infinite in ")


@recorded
def test_copies_of_zero_with_and_without_a_sign_are_equal(tmp_path):
    signed = BUFFER.format(number="-torch.zeros(6)")
    assert checked(signed, "dp=2", tmp_path / "signed").findings == ()
    tiny = BUFFER.format(number="torch.full((6,), 1e-45)")
    assert [(one.kind, one.tensor) for one in checked(tiny, "dp=2", tmp_path / "tiny").findings] == [
        ("unreplicated", "zeros")
    ]
