"""Batches that are split along other dims than their rows: context parallel, and models whose rows come second."""

import pytest

from shardviz.errors import ProbeError
from tests.lanes import at_night, recorded
from tests.live.probing import checked

ATTENTION = """
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional
BATCH_AXES = {"dp": 0, "cp": 1}

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.group = None

    def gathered(self, part):
        return part if self.group is None else all_gather_tensor_autograd(part.contiguous(), 1, self.group)

    def forward(self, tokens, labels):
        query, key, value = self.qkv(tokens).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(query, self.gathered(key), self.gathered(value))
        return self.out(seen)

def build(): return Attention()
def batch(): return torch.randn(5, 9, 6), torch.randn(5, 9, 6)
def loss(model, batch): return (model(*batch) - batch[1]).square().mean()
def parallelize(model, mesh):
    model.group = mesh.get_group("cp")
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("all"))
"""


@recorded
def test_context_parallel_needs_no_step_of_its_own(tmp_path):
    report = checked(ATTENTION, "dp=2,cp=2", tmp_path)
    assert report.findings == ()
    assert report.not_checked == ()


@recorded
def test_attention_that_meets_only_its_own_keys_is_found_and_never_compared_part_by_part(tmp_path):
    bug = "def parallelize(model, mesh): fully_shard(model, mesh=mesh['dp', 'cp']._flatten('all'))\n"
    report = checked(ATTENTION + bug, "dp=2,cp=2", tmp_path)
    assert "output" in {finding.tensor for finding in report.findings}


@recorded
def test_gradients_that_were_not_summed_over_the_sequences_axis_are_found(tmp_path):
    bug = """
def parallelize(model, mesh):
    model.group = mesh.get_group("cp")
    fully_shard(model, mesh=mesh["dp"])
"""
    report = checked(ATTENTION + bug, "dp=2,cp=2", tmp_path)
    assert {finding.kind for finding in report.findings} == {"unreduced-gradient"}


@pytest.mark.parametrize(
    ("forward", "unchecked"),
    [
        ("mean = self.gathered(super().forward(tokens, labels)).mean(1); return mean[:, None]", ()),
        *at_night(
            [
                ("return self.gathered(super().forward(tokens, labels))", ()),
                ("return super().forward(tokens, labels).transpose(0, 1)", ()),
            ],
            recorded,
        ),
        ("return super().forward(tokens, labels).flatten(0, 1)", ("has merged into one",)),
    ],
    ids=["pooled", "gathered", "sequence-first", "flattened"],
)
def test_outputs_are_found_where_the_model_put_the_batchs_dims(forward, unchecked, tmp_path):
    model = f"""
class Other(Attention):
    def forward(self, tokens, labels): {forward}
def build(): return Other()
def loss(model, batch): return model(*batch).square().mean()
"""
    report = checked(ATTENTION + model, "dp=2,cp=2", tmp_path)
    assert report.findings == ()
    assert len(report.not_checked) == len(unchecked)
    assert all(text in one.why for text, one in zip(unchecked, report.not_checked, strict=True))


SECOND = """
BATCH_AXES = {"dp": 1}
def batch(): return torch.randn(3, 12, 6)
"""


@recorded
def test_rows_may_be_another_dim_than_the_first(tmp_path):
    report = checked(SECOND, "dp=4", tmp_path)
    assert report.findings == report.not_checked == ()


@recorded
def test_a_mean_over_each_ranks_own_rows_is_compared_part_by_part_along_that_dim(tmp_path):
    report = checked(SECOND + "def loss(model, batch): return model(batch).mean(1).square().sum()\n", "dp=4", tmp_path)
    assert report.findings == ()
    (note,) = report.not_checked
    assert "compared over the parts" in note.why


@pytest.mark.parametrize(
    ("axes", "rows", "says"),
    [
        ("{'dp': 1}", "12, 2, 6", "the batch has 2 elements in dim 1 for 3 ranks"),
        *at_night(
            [
                ("{'dp': -1}", "12, 6", "BATCH_AXES splits dim -1 over dp"),
                ("{'dp': 'rows'}", "12, 6", "BATCH_AXES splits dim 'rows' over dp"),
            ]
        ),
    ],
)
def test_a_dim_that_cannot_be_split_is_reported_in_a_line(axes, rows, says, tmp_path):
    with pytest.raises(ProbeError, match=says):
        checked(f"BATCH_AXES = {axes}\ndef batch(): return torch.randn({rows})\n", "dp=3", tmp_path, alone=True)
