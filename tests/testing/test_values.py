"""Assertions on values of all kinds: rounding, another order, complex, meta, buffers, no values at all."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardviz.errors import ShardvizError
from shardviz.testing import ShardAssertionError, assert_layout, assert_reduced, assert_replicated, assert_same, spmd
from tests.lanes import at_night
from tests.testing.models import MLP, parallelize

FSDP_TP = {"fsdp": 2, "tp": 2}


def text_of(assertion, *args, **options):
    with pytest.raises(ShardAssertionError) as caught:
        assertion(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night([torch.float16, torch.float32])], ids=str)
@spmd(mesh=FSDP_TP)
def test_sums_that_another_layout_rounds_otherwise_are_the_same(mesh, dtype):
    reference = MLP().to(dtype)
    model = parallelize(copy.deepcopy(reference), mesh)
    batch = torch.randn(64, 12).to(dtype)
    output = model(batch.chunk(2)[mesh.get_local_rank("fsdp")])
    output.square().mean().backward()
    whole = reference(batch)
    whole.square().mean().backward()
    assert_same(model, reference)
    assert_same(DTensor.from_local(output.detach(), mesh["fsdp"], [Shard(0)]), whole.detach())


@spmd(mesh={"fsdp": 2, "tp": 4})
def test_a_gradient_that_is_off_by_half_is_found_in_bfloat16(mesh):
    reference = MLP().to(torch.bfloat16)
    model = parallelize(copy.deepcopy(reference), mesh)
    batch = torch.randn(64, 12).to(torch.bfloat16)
    model(batch.chunk(2)[mesh.get_local_rank("fsdp")]).square().sum().backward()  # FSDP2 takes the mean
    reference(batch).square().sum().backward()
    text = text_of(assert_same, model, reference, of=("grad",))
    assert text.splitlines()[0].endswith(": the gradient is 1/2 of the reference's, 1 over the size of fsdp")


@spmd(mesh=FSDP_TP)
def test_values_in_another_order_are_reported_by_what_is_held(mesh):
    whole = torch.randn(8, 6)
    local = whole.chunk(2)[mesh.get_local_rank("tp")].chunk(2)[mesh.get_local_rank("fsdp")].contiguous()
    lines = text_of(assert_same, DTensor.from_local(local, mesh, [Shard(0), Shard(0)]), whole).splitlines()
    assert lines[:4] == [
        "tensor: the values are the reference's, but 2 of 4 ranks do not hold the elements their placements claim: the "
        "axes split the dim in a different order",
        "  ranks     1-2",
        "  claimed   [8/fsdp/tp, 6]",
        "  held      [8/tp/fsdp, 6]",
    ]
    assert any("label the local tensors by (_StridedShard(0, split_factor=2), Shard(0))" in line for line in lines)
    assert any(line.startswith("  cause ") for line in lines)


@spmd(mesh={"tp": 2})
def test_weights_are_said_to_be_reordered_rounded_or_exchanged_and_not_to_be_drawn_again(mesh):
    def first_line(**changes):
        model = copy.deepcopy(reference)
        for name, value in changes.items():
            model[name].weight.data = value.clone()
        plan = {"up": ColwiseParallel(), "gate": ColwiseParallel()}
        text = text_of(assert_same, parallelize_module(model, mesh, plan), reference)
        assert "seed" not in text
        assert "step" not in text
        return text.splitlines()[0]

    reference = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("up", "gate", "plain")})
    up, gate, plain = (reference[name].weight.data for name in ("up", "gate", "plain"))
    line = first_line(plain=plain.view(2, 4, 8).transpose(0, 1).reshape(8, 8))
    assert line.startswith("plain.weight: the values are the reference's in another order: dim 0 is in the order of")
    assert "dim 0 is in the order of view(1, 2, 4, 1)" in first_line(up=up.view(2, 4, 8).transpose(0, 1).reshape(8, 8))
    assert first_line(up=up.bfloat16().float()) == "up.weight: it has the reference's values, rounded to bfloat16"
    assert "gate.weight: it holds what the reference has as up.weight" in first_line(up=gate, gate=up)
    text = text_of(assert_same, nn.ParameterDict({"w": plain}), nn.ParameterDict({"w": up}))
    assert "drew from different seeds" in text


@spmd(mesh={"tp": 4})
def test_exchanged_shards_are_named_though_values_repeat_and_in_any_dtype(mesh):
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(64, 32).to(dtype)
        whole[5] = whole[6]
        local = whole.chunk(4)[[0, 2, 1, 3][mesh.get_local_rank("tp")]].contiguous()
        text = text_of(assert_same, DTensor.from_local(local, mesh, [Shard(0)]), whole)
        assert text.startswith("tensor: the values are the reference's, but 2 of 4 ranks do not hold the elements")
        assert "rank" in text.partition("cause")[2]


@spmd(mesh={"tp": 2})
def test_a_local_tensor_of_a_shape_that_its_placements_do_not_give_is_said_to_be_one(mesh):
    rows = 5 if mesh.get_rank() else 3
    uneven = DTensor.from_local(torch.zeros(rows, 4), mesh, [Shard(0)], shape=torch.Size((8, 4)), stride=(4, 1))
    assert "doesn't have the shape that its placements give this rank" in text_of(assert_same, uneven, torch.ones(8, 4))


@spmd(mesh={"tp": 2})
def test_a_shard_that_two_ranks_hold_is_missing_and_duplicated_as_in_a_check(mesh):
    whole = torch.randn(8, 16)
    text = text_of(assert_same, DTensor.from_local(whole[:4].contiguous(), mesh, [Shard(0)]), whole)
    assert "64 of 128 elements are on no rank" in text
    assert "have up to 2 copies instead of 1" in text


@spmd(mesh={"tp": 2})
def test_weights_that_differ_are_not_blamed_on_the_batch(mesh):
    whole = {"w": torch.randn(8, 16)}
    own = whole["w"].clone() + distributed.get_rank()
    model, reference = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
    with torch.no_grad():
        model.weight.copy_(own)
        reference.weight.copy_(whole["w"])
    text = text_of(assert_same, model, reference)
    assert "likely    These ranks drew the weight from a different seed" in text
    with torch.no_grad():
        model.weight.zero_()
    assert "hold only zeros: nothing wrote to this memory" in text_of(assert_same, model, reference)
    assert "computed it from different weights" in text_of(assert_same, own.sin(), whole["w"].cos())


@spmd(mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_an_increment_of_another_axis_coordinate_is_named(mesh, axis):
    model, reference = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
    added = torch.randn(8, 16)
    model.weight = nn.Parameter(distribute_tensor(reference.weight.detach().clone(), mesh["tp"], [Shard(0)]))
    with torch.no_grad():
        reference.weight += added
        model.weight.to_local().add_(added.chunk(2)[mesh.get_local_rank(axis)])
    if axis == "dp":
        text = text_of(assert_same, model, reference)
        assert "chooses a rank's part by the coordinate along dp, not tp" in text
    else:
        assert_same(model, reference)


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_weights_that_an_optimizer_left_behind_are_said_before_gradients_that_it_did_not_clear(mesh, when):
    model, reference = nn.Linear(16, 8), nn.Linear(16, 8)
    model.load_state_dict(reference.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if when == "before" else None
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if when == "after" else optimizer
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for module, stepped in ((model, optimizer), (reference, own)):
        module(torch.ones(4, 16)).square().mean().backward()
        if stepped is not None:
            stepped.step()
            stepped.zero_grad()
    if when == "after":
        assert_same(model, reference)
        return
    text = text_of(assert_same, model, reference)
    assert "elements are not the reference's" in text
    assert ("steps the parameters from before sharding" in text) is (when == "before")


@spmd(mesh={"tp": 2})
def test_a_wrong_shape_says_which_side_is_smaller(mesh):
    whole = torch.randn(8, 4)
    assert "Dim 0 of the sharded side has 4 of the reference's 8" in text_of(assert_same, whole[:4], whole)
    assert "The reference is smaller: dim 0 has 4 of the sharded side's 8" in text_of(assert_same, whole, whole[:4])
    assert "Neither is a part of the other" in text_of(assert_same, whole, whole.T)


@spmd(mesh={"tp": 2})
def test_a_reference_that_differs_from_rank_to_rank_is_a_mistake_of_the_test(mesh):
    own = torch.full((3,), float(distributed.get_rank()))
    assert_same(own, own)
    text = text_of(assert_same, torch.zeros(3), own)
    assert text.startswith("activation tensor: the reference is not the same on every rank\n")


@spmd(mesh={"pp": 2})
def test_tensors_that_only_some_ranks_have_are_reported_by_those(mesh):
    name = f"layers.{distributed.get_rank()}"
    assert_same({name: torch.ones(2)}, {name: torch.ones(2)})
    off = torch.tensor([1.0, 1.0 + distributed.get_rank()])
    if distributed.get_rank() == 0:
        assert_same({name: off}, {name: torch.ones(2)})
    else:
        assert "layers.1: 1 of 2 elements is not the reference's, on 1 of 1 rank" in text_of(
            assert_same, {name: off}, {name: torch.ones(2)}
        )


@spmd(mesh={"tp": 2})
def test_infinities_that_are_wanted_are_not_what_is_off(mesh):
    assert_same(torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]))
    text = text_of(assert_same, torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 2.0]))
    assert "at [1] rank 0 has 1, the reference has 2" in text


@spmd(mesh={"tp": 2})
def test_both_parts_of_a_complex_buffer_are_compared(mesh):
    model = nn.Module()
    model.register_buffer("freqs", torch.full((4,), 1j, dtype=torch.complex64))
    reference = copy.deepcopy(model)
    assert_same(model, reference)
    if distributed.get_rank() == 1:
        model.freqs[2] *= 2
    assert "at [2, 1] rank 1 has 2, the reference has 1" in text_of(assert_same, model, reference)
    assert "at [2, 1] of the shard rank 0 has 1, rank 1 2" in text_of(assert_replicated, model, axis="tp")


@spmd(mesh={"fsdp": 2})
def test_weights_that_a_copy_left_out_are_told_by_those_that_are_equal(mesh):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        reference[2].weight.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(5)))
    text = text_of(assert_same, model, reference)
    assert "leaves these out: 5 others are equal" in text
    assert "seeds" not in text
    for parameter in reference.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6))
    assert "seeds" in text_of(assert_same, model, reference)


@spmd(mesh={"fsdp": 2})
def test_a_model_on_the_meta_device_has_a_layout_but_no_values(mesh):
    with torch.device("meta"):
        model = MLP()
    fully_shard(model, mesh=mesh)
    assert_layout(model, {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"})
    with pytest.raises(ShardvizError, match=r"up.weight is on the meta device and has no values to compare"):
        assert_replicated(model, axis="fsdp")
    with pytest.raises(ShardvizError, match="on the meta device"):
        assert_same(model, MLP())


@spmd(mesh={"fsdp": 2})
def test_rules_for_parameters_say_nothing_of_buffers(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model, mesh=mesh)
    assert_layout(model, {"0.weight": "[*/fsdp, *]", "*": "[*/fsdp]"})
    text = text_of(assert_layout, model, {"*.running_mean": "[*/fsdp]", "*": None})
    assert text.startswith("1.running_mean: 2 of 2 ranks have a plain tensor, not the intended [*/fsdp]\n")


@spmd(mesh={"fsdp": 2})
def test_a_rule_with_another_dtype_is_not_told_to_place_it_otherwise(mesh):
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    fully_shard(model, mesh=mesh)
    text = text_of(assert_layout, model, "float32[*/fsdp, *]")
    assert "  fix       make it float32, or expect bfloat16[4/fsdp, 4]\n" in text
    fix = "expect [4/fsdp, 4]: [*/fsdp] does not fit the shape [4, 4]"
    assert fix in text_of(assert_layout, model, "[*/fsdp]")


@spmd(mesh={"fsdp": 2})
def test_weights_that_fsdp_gathered_for_forward_say_so(mesh):
    model = MLP()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model(torch.ones(2, 12))
    assert "FSDP2 gathers a root's weights for forward" in text_of(
        assert_layout, model, {"up.*": "[*/fsdp]", "*": None}
    )


@spmd(mesh={"dp": 2, "tp": 2})
def test_gradients_under_no_sync_are_reported_without_a_guess_of_their_reduction(mesh):
    model = nn.parallel.DistributedDataParallel(MLP())
    with model.no_sync():
        model(torch.full((1, 12), 1.0 + distributed.get_rank())).sum().backward()
    text = text_of(assert_reduced, model)
    assert "the gradient differs along dp and tp: rank 0 and rank 2" in text
    assert "no_sync() was on in the last backward" in text
    assert "ReduceOp.AVG for a mean" in text
