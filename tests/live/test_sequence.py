"""Probes that say how the sequence is split, on real ranks: torch's own context_parallel is seen as it is."""

import pytest

from shardviz.check.run import report_on
from shardviz.errors import ProbeError
from tests.lanes import at_night, recorded
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


@recorded
@pytest.mark.parametrize("probe", ["cp", "quiet/head_and_tail"])
@pytest.mark.parametrize("ranks", [1, 3, *at_night([2, 6])])
def test_one_order_for_all_that_goes_along_the_sequence_is_right_on_any_mesh(probe, ranks, tmp_path):
    report = report_on(run_probe(probe, f"cp={ranks}", tmp_path / "dump"))
    assert report.findings == ()


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("torch.arange(3)", r"sequence\(mesh\) returned Tensor"),
        *at_night(
            [
                ("{'tokens': torch.tensor([-1, 2])}", "returned position -1 in 'tokens'"),
                (
                    "{'labels': (torch.arange(3), {'offset': None})}",
                    "returned {'offset': None} with the positions of 'labels'",
                ),
                ("{'tokens': torch.rand(3)}", r"returned torch.float32\[3\] as 'tokens'"),
                ("{'labels': (torch.arange(3), {'ofset': 1})}", "returned {'ofset': 1} with the positions of 'labels'"),
                ("{'table': torch.arange(3)}", "returned 'table', which is the name of a tensor in the model"),
            ]
        ),
    ],
)
def test_what_are_no_positions_is_reported_in_one_line(returned, says, tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(PROBE + f"def sequence(mesh): return {returned}\n")
    with pytest.raises(ProbeError, match=says):
        run_probe(str(probe), "cp=2", tmp_path / "dump")


LABELS = """
def own(row, mesh):
    chunks = row.chunk(2 * mesh.size())
    rank = mesh.get_local_rank()
    return torch.cat([chunks[rank], chunks[2 * mesh.size() - 1 - rank]])
def shifted(row, by): return torch.cat([row[by:], torch.full((by,), -100)])
def sequence(mesh):
    tokens = torch.arange(24)
    return {"labels": (%s, {"offset": 1, "ignore": -100}), "tokens": own(tokens, mesh)}
"""


def labeled(labels, tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(PROBE.replace('SEQUENCE = {"table": 0}', "") + LABELS % labels)
    return report_on(run_probe(str(probe), "cp=3", tmp_path / "dump"))


@pytest.mark.parametrize(
    ("labels", "shift"), [("own(shifted(tokens, 2), mesh)", -1), ("own(tokens, mesh)", +1)], ids=["twice", "never"]
)
def test_labels_with_another_offset_than_was_said_are_named(labels, shift, tmp_path):
    (found,) = labeled(labels, tmp_path).findings
    assert (found.kind, found.tensor, found.ranks) == ("sequence-order", "labels", (0, 1, 2))
    assert f"shift labels by {shift:+d} positions" in found.fix


def test_labels_in_another_order_than_the_tokens_are_found(tmp_path):
    (found,) = labeled("shifted(tokens, 1).chunk(3)[mesh.get_local_rank()]", tmp_path).findings
    assert (found.kind, found.tensor) == ("sequence-order", "labels")
    assert "shifted more or less often" not in found.cause


def test_labels_shifted_after_the_split_are_found_where_a_stretch_ends_within_a_rank(tmp_path):
    report = labeled("shifted(own(tokens, mesh), 1)", tmp_path)
    (found,) = report.findings
    assert (found.kind, found.tensor) == ("sequence-order", "labels")
    assert "-100 stands where the sequence has position" in report.not_checked[0].why
