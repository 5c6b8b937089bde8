"""A probe's own optimizer: what it makes of gradients and weights, right and wrong, on real ranks."""

import pytest

from tests.live.probing import checked


@pytest.mark.parametrize(
    "text",
    [
        """
def optimizer(model, mesh):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return torch.optim.AdamW(model.parameters())
""",
        """
class Zeroing(torch.optim.AdamW):
    def step(self):
        super().step()
        self.zero_grad(set_to_none=False)
def optimizer(model, mesh): return Zeroing(model.parameters())
""",
    ],
    ids=["it clips them", "it zeroes them"],
)
def test_gradients_are_those_that_backward_left_whatever_the_optimizer_makes_of_them(text, tmp_path):
    report = checked(text, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())
