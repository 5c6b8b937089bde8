"""Probes that say how the sequence is split, on real ranks: torch's own context_parallel is seen as it is."""

import pytest

from shardviz.check.run import report_on
from shardviz.errors import ProbeError
from tests.live.probing import run_probe

PROBE = """
import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
SEQUENCE = {"table": 0}
class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(24, 4))
def build(): return Encoded()
def parallelize(model, mesh): pass
def balanced(mesh):
    tokens = torch.arange(24).view(1, 24)
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
        return tokens.clone()
"""


def test_what_context_parallel_reorders_is_held_against_what_was_cut_by_hand(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(
        PROBE + "def sequence(mesh):\n"
        "    mine = torch.arange(24).chunk(3)[mesh.get_local_rank()]\n"
        "    return {'tokens': balanced(mesh), 'labels': balanced(mesh), 'positions': mine}\n"
    )
    report = report_on(run_probe(str(probe), "cp=3", tmp_path / "dump"))
    (found,) = report.findings
    assert (found.kind, found.tensor, found.held) == ("sequence-order", "positions", "[24/cp]")
    assert "chunks i and 5-i of 6" in found.intended
    assert report.not_checked == ()


@pytest.mark.parametrize("probe", ["cp", "quiet/head_and_tail"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_one_order_for_all_that_goes_along_the_sequence_is_right_on_any_mesh(probe, ranks, tmp_path):
    report = report_on(run_probe(probe, f"cp={ranks}", tmp_path / "dump"))
    assert report.findings == ()


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("torch.arange(3)", r"sequence\(mesh\) returned Tensor"),
        ("{'tokens': torch.rand(3)}", r"returned torch.float32\[3\] as 'tokens'"),
        ("{'tokens': torch.tensor([-1, 2])}", "returned position -1 in 'tokens'"),
        ("{'table': torch.arange(3)}", "returned 'table', which is the name of a tensor in the model"),
    ],
)
def test_what_are_no_positions_is_said_in_one_line(returned, says, tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(PROBE + f"def sequence(mesh): return {returned}\n")
    with pytest.raises(ProbeError, match=says):
        run_probe(str(probe), "cp=2", tmp_path / "dump")
