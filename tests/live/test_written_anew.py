"""Plain tensors that are written again where the model is sharded: rightly, or by some ranks only."""

import pytest

from shardviz.check.run import check_dump
from shardviz.cli import main
from tests.lanes import recorded
from tests.live.probing import HEAD, checked

ROPE = """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)
    def frequencies(self): return {frequencies}
    def forward(self, x): return self.linear(x) * torch.cat([self.inv_freq.cos(), self.inv_freq.sin()])
def build(): return Rotary()
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
    model.inv_freq = {written}
"""
RIGHT = "1 / 10000 ** (torch.arange(3) / 3)"


@recorded
def test_a_buffer_that_every_rank_computes_again_is_left_to_the_step(tmp_path):
    report = checked(ROPE.format(frequencies=RIGHT, written="model.frequencies()"), "dp=2", tmp_path)
    assert report.findings == ()
    ((name, why),) = [(one.tensor, one.why) for one in report.not_checked]
    assert name == "inv_freq"
    assert why.startswith("every rank computes it again after the model is filled, with equal results")


@recorded
@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("model.frequencies() * 2", "wrong-value"),
        ("model.frequencies() + 0.5 + mesh.get_rank()", "unreplicated"),
        ("torch.zeros(3)", "missing"),
    ],
)
def test_a_buffer_that_is_computed_again_and_wrong_is_found(written, kind, tmp_path):
    report = checked(ROPE.format(frequencies=RIGHT, written=written), "dp=2", tmp_path)
    assert kind in {finding.kind for finding in report.findings}


ZEROS = """
def build(): return nn.Sequential(nn.Linear(6, 6))
def parallelize(model, mesh):
    if mesh.get_rank() == {rank}: nn.init.zeros_(model[0].bias)
del batch, BATCH_AXES
"""


def test_zeros_on_some_ranks_where_others_have_the_whole_are_not_passed_over(tmp_path):
    report = checked(ZEROS.format(rank=1), "dp=2", tmp_path / "zeros")
    ((name, why),) = [(one.tensor, one.why) for one in report.not_checked]
    assert (name, report.findings) == ("0.bias", ())
    assert why.startswith("1 of 2 ranks hold only zeros (rank 1 first) where the others hold all of it")
    whole = checked(ZEROS.format(rank=2), "dp=2", tmp_path / "whole")
    assert (whole.findings, whole.not_checked) == ((), ())


def test_zeros_on_some_ranks_do_not_hide_what_was_expected(tmp_path):
    report = checked(ZEROS.format(rank=1) + 'expect = {"0.bias": "[*/dp]"}\n', "dp=2", tmp_path)
    assert {(finding.kind, finding.tensor) for finding in report.findings} == {("wrong-placement", "0.bias")}


PADDED = """
from torch.distributed.tensor import Replicate
def build(): return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
def parallelize(model, mesh):
    weight = model[0].weight.detach()
    model[0].weight = nn.Parameter(torch.cat([weight, weight.new_zeros(2, 4)]))
    model[0].num_embeddings = 8
    parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
def batch(): return torch.arange(12).view(4, 3) % 6
BATCH_AXES = ()
"""


@recorded
def test_a_weight_that_is_padded_where_it_is_sharded_is_a_layout(tmp_path):
    probe = tmp_path / "padded.py"
    probe.write_text(HEAD + PADDED)
    assert main(["probe", str(probe), "--mesh", "dp=4", "-o", str(tmp_path / "dump.shardviz")]) == 0
    report = check_dump(tmp_path / "dump.shardviz")
    assert (report.findings, report.not_checked) == ((), ())


CUT = """
class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.arange(24, dtype=torch.{dtype}).view(6, 4))
def build(): return Quantised()
def parallelize(model, mesh): model.q = model.q.chunk(2)[{part}].clone()
del batch, BATCH_AXES
"""


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_small_integers_that_are_cut_by_hand_are_parts_and_no_copies(dtype, tmp_path):
    right = checked(CUT.format(dtype=dtype, part="mesh.get_rank()"), "dp=2", tmp_path / "right")
    assert right.findings == ()
    wrong = checked(CUT.format(dtype=dtype, part="0"), "dp=2", tmp_path / "wrong")
    assert {finding.kind for finding in wrong.findings} == {"missing", "duplicated"}
