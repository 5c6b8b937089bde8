"""A step that float64 cannot take, as of kernels that want bfloat16, is taken in the model's own dtype."""

from tests.live.probing import checked

WANTS_FLOAT32 = """
class Picky(nn.Linear):
    def forward(self, x):
        if x.dtype == torch.float64: raise RuntimeError("expected bfloat16 or float32")
        return super().forward(x)
def build(): return nn.Sequential(Picky(6, 8), nn.ReLU(), nn.Linear(8, 6))
"""
SWAPPED = """
from torch.distributed.tensor import DTensor, Shard
def parallelize(model, mesh):
    mine = model[0].weight.detach().chunk(2)[1 - mesh.get_rank()].clone()
    model[0].weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
"""
NEVER = """
class Broken(nn.Linear):
    def forward(self, x): raise RuntimeError("no kernel for this device")
def build(): return nn.Sequential(Broken(6, 8), nn.ReLU(), nn.Linear(8, 6))
"""


def test_a_right_model_is_stepped_in_its_own_element_types(tmp_path):
    report = checked(WANTS_FLOAT32, "dp=2", tmp_path)
    assert report.findings == ()
    (why,) = [one.why for one in report.not_checked if "float64" in one.why]
    assert "expected bfloat16 or float32" in why
    assert why.endswith("compared in the model's own dtypes")


def test_placement_findings_stay_where_float64_raises(tmp_path):
    found = checked(WANTS_FLOAT32 + SWAPPED, "dp=2", tmp_path).findings
    assert ("misordered", "0.weight") in [(one.kind, one.tensor) for one in found]


def test_placement_findings_stay_where_no_step_can_be_taken(tmp_path):
    report = checked(NEVER + SWAPPED, "dp=2", tmp_path)
    assert [(one.kind, one.tensor) for one in report.findings] == [("misordered", "0.weight")]
    assert any("no kernel for this device" in one.why for one in report.not_checked)
