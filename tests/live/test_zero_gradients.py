"""Adapters of which one matrix is zero: the other's gradient shows nothing, and that is said."""

from tests.live.probing import checked

ADAPTED = """
from torch.nn.parallel import DistributedDataParallel
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 6))
        self.b = nn.Parameter(torch.SCALE(6, 2))
    def forward(self, x): return self.base(x) + x @ self.a.T @ self.b.T
def build(): return nn.Sequential(Adapted(), nn.Tanh(), Adapted())
def parallelize(model, mesh): return DistributedDataParallel(model)
"""

FROZEN = "def build(): return nn.Sequential(Adapted(), Adapted()).requires_grad_(False).append(nn.Linear(6, 6))"


def test_gradients_that_are_zero_everywhere_are_reported_to_show_nothing_once_for_all(tmp_path):
    report = checked(ADAPTED.replace("SCALE", "zeros"), "dp=2", tmp_path)
    assert report.findings == ()
    assert [(entry.tensor, entry.why) for entry in report.not_checked] == [
        (
            "",
            "[0,2].a: their 2 gradients are zero in every element, so a missing or repeated reduction would not show",
        )
    ]


def test_of_gradients_that_are_not_zero_and_of_frozen_parameters_nothing_is_reported(tmp_path):
    report = checked(ADAPTED.replace("SCALE", "randn"), "dp=2", tmp_path / "drawn")
    assert (report.findings, report.not_checked) == ((), ())
    report = checked(ADAPTED.replace("SCALE", "zeros") + FROZEN, "dp=2", tmp_path / "frozen")
    assert (report.findings, report.not_checked) == ((), ())
    report = checked(ADAPTED.replace("SCALE", "zeros"), "dp=1", tmp_path / "alone")
    assert (report.findings, report.not_checked) == ((), ())
