"""What failed assertions say of models with hundreds of tensors, of misspelt names, and of a few elements."""

import json
import logging
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardviz.errors import DumpError
from shardviz.testing import (
    ShardAssertionError,
    assert_clean,
    assert_layout,
    assert_ordered,
    assert_same,
    assert_tied,
    spmd,
    stamp,
)
from shardviz.testing.plugin import compat

ROOM = 500
"""Characters that a message about a deep model may have: two lines of a terminal, and a fix."""


class Deep(nn.Module):
    """Sixty layers of two weights between an embedding and a head."""

    def __init__(self, layers: int = 60) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"wq": nn.Linear(4, 4), "wo": nn.Linear(4, 4)}) for _ in range(layers)
        )
        self.head = nn.Linear(4, 8, bias=False)


def text_of(assertion, *args, **options):
    with pytest.raises(ShardAssertionError) as caught:
        assertion(*args, **options)
    return str(caught.value)


@spmd(mesh={"tp": 2})
def test_a_misspelt_pattern_gets_the_one_that_was_meant(mesh):
    model = Deep()
    text = text_of(assert_layout, model, {"layers.*.wq.weigth": "[4, 4]", "*": None})
    assert text.startswith("no tensor matches 'layers.*.wq.weigth'\n")
    assert text.endswith("did you mean layers.*.wq.weight?")
    text = text_of(assert_layout, model, {"layers.*.wq.weigth": "[4, 4]", "embed.*": None})
    assert ", and no rule matches 241 tensors: " in text
    assert len(text) < ROOM
    assert_layout(model, {"layers.*.wq.weight": "[4, 4]", "*": None})


@spmd(mesh={"tp": 2})
def test_names_without_a_rule_are_folded_over_layers(mesh):
    text = text_of(assert_layout, Deep(), {"embed.*": None, "head.*": None, "*.bias": None})
    assert text.startswith("no rule matches 120 tensors: layers.[0-59].wo.weight, layers.[0-59].wq.weight\n")


@spmd(mesh={"tp": 2})
def test_a_misspelt_name_of_a_tie_gets_the_one_that_was_meant(mesh):
    text = text_of(assert_tied, Deep(), "embed.weight", "haed.weight")
    assert text == "no rank has a tensor haed.weight\n  fix       did you mean head.weight?"
    text = text_of(assert_tied, Deep(), "xyz", "head.weight")
    assert text.endswith("it has embed.weight, head.weight, layers.0.wo.bias and 239 more")


@spmd(mesh={"tp": 2})
def test_names_with_brackets_are_rules_for_themselves(mesh):
    tensors = {f"experts[{at}].w": torch.ones(4, 4) for at in range(2)}
    assert_layout(tensors, {"experts[0].w": "[4, 4]", "experts[1].w": "[4, 4]"}, mesh=mesh)
    text = text_of(assert_layout, tensors, {"expert[1].w": "[4, 4]", "*": None}, mesh=mesh)
    assert text.endswith("did you mean experts[1].w?")
    text = text_of(assert_layout, tensors, {"experts[0].w": "[4, 4]"}, mesh=mesh)
    assert text.startswith("no rule matches experts[1].w\n")


@spmd(mesh={"tp": 2})
def test_a_reference_that_is_not_finite_is_shown_and_has_no_factor(mesh):
    for number in (float("nan"), float("inf")):
        reference = torch.ones(4, 4)
        reference[3, 1] = number
        text = text_of(assert_same, {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}, {"w": reference})
        assert f"at [3, 1] rank 1 has 1, the reference has {number:g} (" in text
        assert_same({"w": distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])}, {"w": torch.ones(2, 2)})


@spmd(mesh={"tp": 2})
def test_all_names_that_one_side_lacks_are_named_at_once(mesh):
    text = text_of(assert_same, Deep(), Deep(40))
    assert text.startswith("the reference has no param layers.[40-59].wo.bias, layers.[40-59].wo.weight, ")
    assert "(80 in all)\n" in text
    assert len(text) < ROOM
    text = text_of(assert_same, {"blocks.0.w": torch.ones(2)}, {"block.0.w": torch.ones(2)})
    assert text.startswith("the reference has no activation blocks.0.w; only the reference has activation block.0.w\n")


@spmd(mesh={"tp": 2})
def test_a_model_that_was_cast_after_it_was_stamped_is_one_reason_for_all_layers(mesh):
    model = Deep()
    stamp(model)
    text = text_of(assert_ordered, model.to(torch.bfloat16))
    assert text.startswith("the order of embed.weight, layers.[0-59].wq.weight, ")
    assert "\n  242 tensors (embed.weight, layers.[0-59].wq.weight, " in text
    assert len(text.splitlines()) == 3


@spmd(mesh={"tp": 2})
def test_one_row_that_differs_is_not_another_seed(mesh):
    whole = torch.randn(64, 16)
    off = whole.clone()
    off[7] += 1
    model, reference = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
    reference.weight = nn.Parameter(whole)
    for weight in (off, distribute_tensor(off, mesh, [Shard(1)]), distribute_tensor(off, mesh, [Shard(0)])):
        model.weight = nn.Parameter(weight)
        text = text_of(assert_same, model, reference)
        assert text.startswith("weight: 16 of 1,024 elements are not the reference's, all of [7:8, 0:16], on ")
        assert "Some code wrote or changed only these elements" in text
        assert "seed" not in text
    off[7] = 0
    model.weight = nn.Parameter(off)
    assert "these elements: they are zero" in text_of(assert_same, model, reference)
    assert "Only the inputs of these elements differ" in text_of(assert_same, {"out": off}, {"out": whole})


@spmd(mesh={"tp": 2})
def test_a_shard_that_differs_as_a_whole_is_one_ranks_own_and_all_of_them_another_seed(mesh):
    whole = torch.randn(64, 16)
    model, reference = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
    reference.weight = nn.Parameter(whole)
    off = distribute_tensor(whole, mesh, [Shard(0)])
    torch.manual_seed(5)
    if distributed.get_rank() == 1:
        off.to_local().normal_()
    model.weight = nn.Parameter(off)
    text = text_of(assert_same, model, reference)
    assert text.startswith(
        "weight: 512 of 1,024 elements are not the reference's, all of [32:64, 0:16], on 1 of 2 ranks"
    )
    assert "These ranks drew the weight from a different seed" in text
    model.weight = nn.Parameter(torch.randn(64, 16))
    text = text_of(assert_same, model, reference)
    assert text.startswith("weight: 1,024 of 1,024 elements are not the reference's, on 2 of 2 ranks: at [")
    assert "drew from different seeds" in text


def test_a_checkpoint_is_clean_or_has_the_findings_of_check(tmp_path):
    weights = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4)}
    save_file(weights, tmp_path / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_clean(tmp_path)
    assert_clean(tmp_path / "model-1.safetensors")
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ShardAssertionError, match=r"model-1\.safetensors"):
        assert_clean(tmp_path)


def test_an_error_about_a_path_ends_in_the_line_of_the_test(tmp_path):
    with pytest.raises(DumpError, match="does not exist") as caught:
        assert_clean(tmp_path / "nowhere")
    assert [entry.name for entry in caught.traceback.filter(caught)] == [
        "test_an_error_about_a_path_ends_in_the_line_of_the_test"
    ]


def test_records_that_a_logger_shows_to_nobody_are_not_shown(capfd):
    logger = logging.getLogger("c10d-of-this-test")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    with ExitStack() as stack:
        compat.catch_logs(stack, logging.DEBUG)
        logging.getLogger("other").debug("shown")
        logger.addHandler(logging.NullHandler())
        logger.debug("hidden")
    shown = capfd.readouterr().err
    assert "shown" in shown
    assert "hidden" not in shown
