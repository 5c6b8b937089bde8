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
        *at_night(
            [("return super().forward(tokens, labels).flatten(0, 1)", ("has merged into one",))],
            recorded,
        ),
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
