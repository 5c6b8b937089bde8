"""Assertions on real ranks: quiet where all is right, and what they say where it is not."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardviz
from shardviz.errors import MeshError, NotationError, ShardvizError
from shardviz.live.capture.stamp import stamps_of
from shardviz.testing import (
    ShardAssertionError,
    assert_clean,
    assert_layout,
    assert_ordered,
    assert_reduced,
    assert_replicated,
    assert_same,
    assert_tied,
    spmd,
    stamp,
)
from tests.testing.models import LAYOUTS, MLP, parallelize

FSDP_TP = {"fsdp": 2, "tp": 2}


def text_of(assertion, *args, **options):
    with pytest.raises(ShardAssertionError) as caught:
        assertion(*args, **options)
    return str(caught.value)


def left_to_right(mesh):
    """A weight split over tp and then fsdp, labeled as if it were the other way round."""
    model = nn.Linear(3, 12, bias=False)
    stamp(model)
    local = model.weight.detach().chunk(4)[mesh.get_local_rank("tp")].chunk(2)[mesh.get_local_rank("fsdp")]
    label = {"placements": (Shard(0), Shard(0)), "run_check": False, "shape": (12, 3), "stride": (3, 1)}
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, **label))
    return model


# Order


@spmd(mesh=FSDP_TP)
def test_tensor_parallel_under_fsdp_is_in_order(mesh):
    model = MLP()
    stamp(model)
    assert_ordered(parallelize(model, mesh))


@spmd(mesh={"fsdp": 2, "tp": 4})
def test_data_out_of_order_names_claimed_held_the_picture_and_the_fix(mesh):
    lines = text_of(assert_ordered, left_to_right(mesh)).splitlines()
    assert lines[:5] == [
        "weight: 7 of 8 ranks do not hold the elements their placements claim: the axes split the dim in a different "
        "order",
        "  ranks     1-7",
        "  claimed   [12/fsdp/tp, 3]",
        "  held      [12/tp/fsdp, 3]",
        "",
    ]
    assert any(line.split()[:4] == ["2:4", "│", "1", "│"] and "✗ 4" in line for line in lines)
    label = "label the local tensors by (_StridedShard(0, split_factor=4), Shard(0)), as fully_shard does, "
    assert label in lines[-2]
    page = "shardviz explain cut-inner-first"
    assert lines[-1] == f"  see       pytorch#129229, pytorch#129206, pytorch#130760; {page}"


@spmd(mesh={"tp": 2})
def test_a_bfloat16_model_is_checked_and_one_that_is_cast_afterwards_gets_no_verdict(mesh):
    model = nn.Linear(20, 20, bias=False).to(torch.bfloat16)
    stamp(model)
    assert_ordered(model)
    model = nn.Linear(20, 20, bias=False)
    stamp(model)
    text = text_of(assert_ordered, model.to(torch.bfloat16))
    ids = "ids up to 400 are not exact in torch.bfloat16, to"
    assert text.startswith(f"the order of weight cannot be checked:\n  weight: {ids}")
    assert "cast the model before stamp(model), not afterwards" in text


@spmd(mesh={"tp": 2})
def test_a_model_that_was_not_stamped_is_a_mistake_of_the_test(mesh):
    with pytest.raises(ShardvizError, match="the model was not stamped"):
        assert_ordered(MLP())


# Layout


@spmd(mesh=FSDP_TP)
def test_layouts_by_name_hold_whatever_the_sizes(mesh):
    model = parallelize(MLP(), mesh)
    assert_layout(model, LAYOUTS)
    assert_layout(model.up.weight, "float32[24/tp/fsdp, 12]")
    assert_layout({"w": model.down.bias}, {"w": "[12/fsdp]"})


@spmd(mesh=FSDP_TP)
def test_another_layout_shows_what_is_claimed_and_what_is_intended(mesh):
    text = text_of(assert_layout, parallelize(MLP(), mesh), LAYOUTS | {"up.weight": "[*/fsdp/tp, *]"})
    assert text.startswith(
        "up.weight: 4 of 4 ranks claim float32[24/tp/fsdp, 12], not the intended [*/fsdp/tp, *]\n"
        "  ranks     0-3\n"
        "  claimed   float32[24/tp/fsdp, 12]\n"
        "  intended  [*/fsdp/tp, *]\n\n"
    )
    assert "  fix       expect [24/tp/fsdp, 12]: fully_shard cuts the shards of tensor parallel again, " in text
    text = text_of(assert_layout, parallelize(MLP(), mesh), {"down.weight": "[*/fsdp, *]"})
    assert "  fix       place it by (Shard(0), Replicate()), or expect [12/fsdp, 24/tp]\n" in text


@spmd(mesh=FSDP_TP)
def test_the_state_of_an_optimizer_has_layouts_too(mesh):
    model = parallelize(MLP(), mesh)
    model(torch.ones(4, 12)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert_layout(optimizer, {"*.step": "[]", "0.exp_avg*": "[*/tp/fsdp, *]", "*": None})


@spmd(mesh={"tp": 2})
def test_a_parameter_without_a_rule_and_a_rule_without_a_parameter_fail(mesh):
    model = MLP()
    assert_layout(model, {"up.weight": "[24, 12]", "*": None})
    assert text_of(assert_layout, model, {"up.*": None, "down.bias": None}).startswith("no rule matches down.weight\n")
    unused = text_of(assert_layout, model, {"*": None, "xyz": "[*]"})
    assert unused.startswith("no tensor matches 'xyz'\n  fix       remove the rule, or correct its pattern: it has ")
    hidden = text_of(assert_layout, model, {"up.*": None, "*.bias": None, "down.weight": None, "up.bias": "[*]"})
    assert hidden.startswith("'up.bias' is never used: earlier rules match all that it does: 'up.*'\n")
    stateless = text_of(assert_layout, torch.optim.Adam(model.parameters()), {"*": None})
    assert stateless.endswith("no tensors: an optimizer has none before its first step")


@spmd(mesh={"tp": 2})
def test_a_plain_tensor_is_not_taken_for_a_sharded_one(mesh):
    text = text_of(assert_layout, torch.ones(4, 4), "[*/tp, *]")
    assert text.startswith("tensor: 2 of 2 ranks have a plain tensor, not the intended [*/tp, *]\n")


@spmd(mesh={"tp": 2})
def test_a_layout_that_cannot_be_read_or_names_no_axis_is_a_mistake_of_the_test(mesh):
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(NotationError, match="at column 4"):
        assert_layout(tensor, "[4/")
    with pytest.raises(MeshError):
        assert_layout(tensor, "[4/ep]")


@spmd(mesh={"tp": 2})
def test_a_replicated_tensor_is_whole_on_every_rank(mesh):
    assert_layout(distribute_tensor(torch.ones(3), mesh, [Replicate()]), "[3] =tp")


# Copies


@spmd(mesh={"dp": 2, "tp": 2})
def test_copies_that_differ_along_one_axis_are_equal_along_the_other(mesh):
    torch.manual_seed(mesh.get_local_rank("dp"))
    model = nn.Linear(2, 2, bias=False)
    assert_replicated(model, axis="tp")
    text = text_of(assert_replicated, model, axis="dp")
    assert text.startswith("weight: copies differ along dp: 2 of 4 ranks differ from the other copies; at [0, 0] of")
    assert "  ranks     2-3\n" in text
    assert "  intended  =dp\n" in text
    assert "draws from a seed that depends on the rank" in text


@spmd(mesh={"dp": 2})
def test_copies_that_are_near_each_other_have_stepped_apart(mesh):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    model.weight.data += 0.01 * mesh.get_local_rank("dp")
    assert "ranks along dp have drifted since" in " ".join(text_of(assert_replicated, model, axis="dp").split())
    model.bias.data = torch.full((2,), mesh.get_local_rank("dp") + 1.0)  # began at zero: nothing in common
    text = text_of(assert_replicated, model, axis="dp")
    assert "have drifted since" in text
    assert "seed" not in text


@spmd(mesh={"dp": 2})
def test_gradients_of_a_rank_are_compared_if_asked_for(mesh):
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    model(torch.ones(1, 2) * (1 + mesh.get_local_rank("dp"))).sum().backward()
    assert_replicated(model, axis="dp")
    text = text_of(assert_replicated, model, axis="dp", of=("param", "grad"))
    assert text.startswith("weight: copies of the gradient differ along dp: 1 of 2 ranks")
    assert "seed" not in text


@spmd(mesh={"dp": 2, "fsdp": 2})
def test_replicas_of_uneven_shards_are_compared_shard_by_shard(mesh):
    model = nn.Linear(3, 3)
    fully_shard(model, mesh=mesh)
    assert_replicated(model, axis="dp")
    text = text_of(assert_replicated, model, axis="fsdp")
    assert text.startswith("bias, weight: 2 tensors, such as bias: it is split over fsdp, but equal")


@spmd(mesh={"dp": 2})
def test_an_axis_that_is_not_there_is_a_mistake_of_the_test(mesh):
    with pytest.raises(MeshError, match="tp"):
        assert_replicated(nn.Linear(1, 1), axis="tp")
    with pytest.raises(MeshError, match="tp"):
        assert_reduced(nn.Linear(1, 1), axis="tp")
    with pytest.raises(MeshError, match=r"rule '\*\.up': '\[\*/dp/tp\]' does not fit mlp\.up: mesh .* no axis 'tp'"):
        assert_layout({"mlp.up": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, {"*.up": "[*/dp/tp]"})
    with pytest.raises(ShardvizError, match=r"rule 'up': "):
        assert_layout({"up": torch.ones(2)}, {"up": "[*/dp"})


@spmd(mesh={"dp": 2})
def test_gradients_that_nobody_sums_are_found(mesh):
    model = nn.Linear(2, 2, bias=False)
    model(torch.full((1, 2), 1.0 + distributed.get_rank())).sum().backward()
    text = text_of(assert_reduced, model)
    assert text.startswith("weight: the gradient differs along dp: rank 0 and rank 1 differ by up to 1\n")
    assert "copy the result back: grad.copy_(result)" in text
    distributed.all_reduce(model.weight.grad)
    assert_reduced(model)


@spmd(mesh={"dp": 4})
def test_a_gradient_that_differs_on_a_rank_while_the_others_agree_names_that_rank(mesh):
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.ones(2, 2)
    assert_reduced(model)
    model.weight.grad += 0.5 * (distributed.get_rank() == 2)
    text = text_of(assert_reduced, model)
    assert text.startswith("weight: the gradient differs along dp: rank 2 by up to 0.5, and all other copies agree\n")
    assert "changes the gradient on rank 2 alone" in text
    model.weight.grad = torch.ones(2, 2) * (distributed.get_rank() == 2)  # as of an expert that no other rank uses
    assert "wraps the parameter, so your own code must reduce .grad" in text_of(assert_reduced, model)
    model.weight.grad = torch.ones(2, 2) * (distributed.get_rank() // 2)  # no side has more
    assert "wraps the parameter, so your own code must reduce .grad" in text_of(assert_reduced, model)


@spmd(mesh={"dp": 2, "tp": 2})
def test_of_weights_cut_by_hand_the_axis_of_their_copies_is_named(mesh):
    model = nn.Linear(2, 2, bias=False)
    model(torch.full((1, 2), 1.0 + mesh["tp"].get_local_rank())).sum().backward()
    assert "compare axis='dp' alone" in text_of(assert_reduced, model)
    assert_reduced(model, axis="dp")
    model.weight.grad += mesh["dp"].get_local_rank()
    assert text_of(assert_reduced, model, axis="dp").startswith("weight: the gradient differs along dp: ")


@spmd(mesh={"dp": 2})
def test_rounding_is_no_missing_sum(mesh):
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), 1.0 + distributed.get_rank() * 2**-23)
    assert_reduced(model)


@spmd(mesh={"dp": 2})
def test_a_model_without_gradients_has_none_to_compare(mesh):
    assert text_of(assert_reduced, nn.Linear(2, 2)).startswith("no parameter has a gradient on any rank\n")


# Values


@spmd(mesh=FSDP_TP)
def test_a_sharded_step_is_the_unsharded_one(mesh):
    reference = MLP().double()
    model = parallelize(copy.deepcopy(reference), mesh)
    batch = torch.randn(8, 12, dtype=torch.float64)
    model(batch.chunk(2)[mesh.get_local_rank("fsdp")]).square().mean().backward()
    reference(batch).square().mean().backward()
    assert_same(model, reference)
    assert_reduced(model)


@spmd(mesh={"tp": 2})
def test_a_pending_sum_is_made_before_it_is_compared(mesh):
    whole = torch.arange(6.0)
    part = DTensor.from_local(whole / 2, mesh, [Partial()], run_check=False)
    assert_same(part, whole)
    text = text_of(assert_same, DTensor.from_local(whole, mesh, [Partial()], run_check=False), whole)
    assert text.startswith("tensor: the value is 2 times the reference's, the size of tp\n")


@spmd(mesh={"tp": 2})
def test_two_layouts_of_the_same_tensor_are_the_same(mesh):
    whole = torch.randn(5, 3)
    assert_same(distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)]))


@spmd(mesh={"tp": 2})
def test_one_element_that_is_off_is_shown_with_its_index_and_rank(mesh):
    whole = torch.zeros(4, 4)
    off = whole.clone()
    off[3, 1] = 0.5
    text = text_of(assert_same, distribute_tensor(off, mesh, [Shard(0)]), whole)
    assert text.startswith(
        "tensor: 1 of 16 elements is not the reference's, on 1 of 2 ranks: at [3, 1] rank 1 has 0.5, the reference has "
        "0 (rtol 1.3e-06, atol 1e-05)\n  ranks     1\n  claimed   [4/tp, 4]\n"
    )
    assert_same(distribute_tensor(off, mesh, [Shard(0)]), whole, atol=0.5)


@spmd(mesh={"tp": 2})
def test_a_tolerance_that_is_not_given_is_the_dtypes(mesh):
    whole = torch.ones(4, 4)
    near = distribute_tensor(whole + 5e-6, mesh, [Shard(0)])
    assert_same(near, whole)
    assert_same(near, whole, rtol=1e-3)
    assert "(rtol 1.3e-06, atol 0)" in text_of(assert_same, near, whole, atol=0.0)
    assert "(rtol 0, atol 1e-06)" in text_of(assert_same, near, whole, rtol=0.0, atol=1e-6)


@spmd(mesh={"tp": 2})
def test_nan_is_the_same_as_nothing(mesh):
    whole = torch.tensor([1.0, float("nan")])
    assert "has nan, the reference has nan" in text_of(assert_same, whole, whole)


@spmd(mesh={"tp": 2})
def test_a_shape_or_a_name_that_the_reference_lacks_is_reported(mesh):
    assert "its shape is [2, 2]" in text_of(assert_same, torch.ones(2, 2), torch.ones(4))
    text = text_of(assert_same, MLP(), nn.Linear(2, 2))
    assert text.startswith(
        "the reference has no param down.bias, down.weight, up.bias, up.weight (4 in all); only the reference has "
        "param bias, weight (2 in all)\n"
    )


# Ties


@spmd(mesh={"tp": 2})
def test_ties_are_storage_not_equal_values(mesh):
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    assert text_of(assert_tied, model, "embed.weight", "head.weight").startswith(
        "head.weight: it does not share storage with embed.weight on 2 ranks\n"
    )
    assert "the names were never tied" in text_of(assert_tied, model, "embed.weight", "head.weight")
    model["head"].weight = model["embed"].weight
    assert_tied(model, "embed.weight", "head.weight")
    reference = copy.deepcopy(model)
    assert_same(model, reference)
    model["body"] = nn.Linear(2, 2)
    reference["body"] = copy.deepcopy(model["body"])
    with torch.no_grad():
        model["head"].weight.mul_(1.0078)
    text = " ".join(text_of(assert_same, model, reference).split())
    assert "1.0078 times the reference's on every rank; these 2 names are those of one tensor, and the 2 other" in text
    assert "changes this one 2 times: once for each of its names" in text
    assert "clips" not in text
    with torch.no_grad():
        for weight in model["body"].parameters():
            weight.mul_(1.0078)
    text = " ".join(text_of(assert_same, model, reference).split())
    assert "Code that changes this weight multiplies it by a different number" in text
    assert "once for each of its names" not in text
    assert text_of(assert_tied, model, "embed.weight", "tail").startswith("no rank has a tensor tail\n")


# Dumps


@spmd(mesh=FSDP_TP)
def test_a_dump_of_the_same_model_passes_the_same_assertions_in_one_process(mesh, shard_dump):
    model = MLP()
    stamps = stamp(model)
    shardviz.capture(parallelize(model, mesh), shard_dump, mesh=mesh, stamps=stamps)
    assert_clean(shard_dump)
    with pytest.raises(ShardvizError, match="assert_clean checks a dump, not a FSDPMLP\n"):
        assert_clean(model)
    assert_ordered(str(shard_dump))
    assert_layout(shard_dump, LAYOUTS)


@spmd(mesh={"fsdp": 2, "tp": 4})
def test_a_dump_with_a_finding_is_not_clean(mesh, shard_dump):
    model = left_to_right(mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps_of(model))
    assert text_of(assert_clean, shard_dump).startswith("weight: 7 of 8 ranks do not hold the elements")


@spmd(mesh={"fsdp": 2})
def test_a_dump_in_which_nothing_was_checked_is_not_clean(mesh, shard_dump):
    model = nn.Linear(4, 4)
    stamps = stamp(model)
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    assert_clean(shard_dump, strict=True)
    model.extra = nn.Parameter(distribute_tensor(torch.rand(4, 4), mesh, [Shard(0)]))
    bare = shard_dump.with_name("bare.shardviz")
    shardviz.capture(model, bare, mesh=mesh)
    assert text_of(assert_clean, bare).startswith("nothing was checked in 3 tensors: ")
    later = shard_dump.with_name("later.shardviz")
    shardviz.capture(model, later, mesh=mesh, stamps=stamps)
    assert_clean(later)
    assert "1 check could not be made, and strict=True requires all\n  extra: " in text_of(
        assert_clean, later, strict=True
    )


def test_without_ranks_there_is_nothing_to_compare():
    with pytest.raises(ShardvizError, match="mark the test with @spmd"):
        assert_layout(nn.Linear(1, 1), "[*]")


@spmd(mesh={"dp": 2})
def test_large_copies_of_which_a_dump_has_digests_alone_are_compared(mesh):
    torch.manual_seed(mesh.get_local_rank("dp"))
    text = text_of(assert_replicated, nn.Linear(256, 256), axis="dp")
    assert "2 tensors, such as bias: copies differ along dp" in text


@spmd(mesh={"dp": 2})
def test_one_element_of_a_copy_that_differs_is_not_of_another_seed(mesh):
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    model.weight.data[3, 4] += 0.01 * mesh.get_local_rank("dp")
    text = text_of(assert_replicated, model, axis="dp")
    assert "at [3, 4] of the shard" in text
    assert "seed" not in text
