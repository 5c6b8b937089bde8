"""A step that says more than numbers: it raises, a rank has no gradient, a result has another shape than it should."""

import pytest

from tests.lanes import at_night, recorded
from tests.live.probing import checked

CASES = {
    "only the sharded step raises": (
        """
class Odd(nn.Linear):
    def forward(self, x):
        if BROKEN and hasattr(self, "sharded"): raise ValueError("seven is odd")
        return super().forward(x)
def build(): return nn.Sequential(Odd(6, 8), nn.Linear(8, 6))
def parallelize(model, mesh):
    model[0].sharded = True
    fully_shard(model, mesh=mesh["dp"])
""",
        "raised",
        "in module 0: seven is odd; 0.weight is [8/dp, 6], 0.bias is [8/dp]",
    ),
    "one rank has no gradient": (
        """
from torch import distributed
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x):
        parts = self.one(x)
        if not BROKEN or len(x) == 12 or distributed.get_rank() == 0: parts = parts + self.other(x)
        return parts
def build(): return Experts()
def parallelize(model, mesh):
    model.mesh = mesh
def step(model, batch, mesh):
    loss = model(batch).square().mean()
    loss.backward()
    for p in model.parameters():
        if p.grad is not None and not BROKEN: distributed.all_reduce(p.grad, distributed.ReduceOp.AVG)
    return loss
""",
        "unreduced-gradient",
        ".grad is None",
    ),
    "copies are put side by side": (
        """
from torch import distributed
class Gathered(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        if not BROKEN or not getattr(self, "sharded", False): return out
        return torch.cat([out, out], 1)
def build(): return Gathered(6, 8)
def parallelize(model, mesh):
    model.sharded = True
    fully_shard(model, mesh=mesh["dp"])
""",
        "wrong-shape",
        "[12, 16] over all ranks",
    ),
}


@pytest.mark.parametrize(
    ("text", "kind", "words"), [next(iter(CASES.values())), *at_night([*CASES.values()][1:], recorded)], ids=CASES
)
def test_a_contradiction_is_a_finding(text, kind, words, tmp_path):
    findings = checked(text + "\nBROKEN = True", "dp=2", tmp_path).findings
    assert any(finding.kind == kind and words in finding.summary for finding in findings), findings


def test_an_output_that_every_rank_has_whole_is_no_part_of_it(tmp_path):
    report = checked(
        """
from torch.distributed.nn.functional import all_gather
class Whole(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return torch.cat(all_gather(out)) if len(x) < 12 else out
def build(): return Whole(6, 8)
def parallelize(model, mesh): fully_shard(model, mesh=mesh["dp"])
def loss(model, batch): return model(batch).square().mean()
""",
        "dp=2",
        tmp_path,
    )
    assert not [finding for finding in report.findings if finding.kind == "wrong-shape"]


def test_a_step_that_clears_its_gradients_is_not_checked(tmp_path):
    cleared = """
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    model.zero_grad()
    return loss.detach()
"""
    report = checked(cleared, "dp=2", tmp_path)
    assert report.findings == ()
    assert report.not_checked


def test_a_machine_that_cannot_run_the_step_is_no_finding(tmp_path):
    lacking = """
class Lacking(nn.Linear):
    def forward(self, x):
        if hasattr(self, "sharded"): raise RuntimeError("Found no NVIDIA driver on your system")
        return super().forward(x)
def build(): return nn.Sequential(Lacking(6, 8), nn.Linear(8, 6))
def parallelize(model, mesh):
    model[0].sharded = True
    fully_shard(model, mesh=mesh["dp"])
"""
    report = checked(lacking, "dp=2", tmp_path)
    assert report.findings == ()
    assert any("this machine cannot run it: rank 0 raised RuntimeError" in entry.why for entry in report.not_checked)


def test_a_step_whose_unsharded_twin_cannot_run_says_that_a_loss_is_missing(tmp_path):
    two = """
def batch(): return torch.randn(12, 6), torch.randn(12, 6)
def step(model, rows, mesh):
    loss = (model(rows[0]) - rows[1]).square().mean()
    loss.backward()
    return loss.detach()
"""
    report = checked(two, "dp=2", tmp_path)
    assert report.findings == ()
    assert any("no loss(model, batch)" in entry.why for entry in report.not_checked)
