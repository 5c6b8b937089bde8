"""Plain tensors that are written again where the model is sharded: rightly, or by some ranks only."""

import pytest

from tests.live.probing import checked

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
