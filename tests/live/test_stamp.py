import pytest
import torch
from torch import nn

from shardviz.errors import ShardvizError
from shardviz.live.capture.stamp import stamp, tied_names
from shardviz.stamping.fill import Fill


def test_ids_count_from_one_over_the_whole_model_row_major():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    stamped = stamp(model)
    assert [(s.name, s.first, s.shape) for s in stamped.stamps] == [
        ("0.weight", 1, (2, 3)),
        ("0.bias", 7, (2,)),
        ("1.weight", 9, (2, 2)),
    ]
    assert model[0].weight.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert model[1].weight.tolist() == [[9, 10], [11, 12]]


def test_buffers_are_stamped_after_parameters_whatever_their_dtype():
    model = nn.BatchNorm1d(2)
    stamped = stamp(model)
    assert [(s.name, s.role, s.first) for s in stamped.stamps] == [
        ("weight", "param", 1),
        ("bias", "param", 3),
        ("running_mean", "buffer", 5),
        ("running_var", "buffer", 7),
        ("num_batches_tracked", "buffer", 9),
    ]
    assert model.num_batches_tracked.item() == 9


def test_tied_parameters_get_one_range_and_say_whose():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    first, second = stamp(model).stamps
    assert (first.name, first.first, first.tied_to) == ("embed.weight", 1, "")
    assert (second.name, second.first, second.tied_to) == ("head.weight", 1, "embed.weight")


def test_a_dtype_that_cannot_hold_ids_is_named_and_left_alone():
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([True, False]))
    stamped = stamp(model)
    assert stamped.not_stamped == (("mask", "torch.bool cannot hold ids"),)
    assert model.mask.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_where_ids_would_collapse_a_fill_of_the_tensors_own_takes_their_place(dtype):
    model = nn.Linear(50, 50, bias=False).to(torch.bfloat16)
    model.register_buffer("packed", torch.zeros(3, 4, dtype=dtype))
    stamped = stamp(model)
    assert not stamped.not_stamped
    assert not stamped.not_applied
    assert [(one.name, one.first) for one in stamped.stamps] == [("weight", 1), ("packed", 2501)]
    assert stamped.fills["weight"] == Fill("weight", (50, 50), "bfloat16")
    assert len(model.weight.unique()) == 2500
    assert (model.packed.double() != 0).all()


def test_ids_stay_where_they_are_exact_and_beyond_16_million_elements_float32_is_filled():
    model = nn.ParameterDict({"small": nn.Parameter(torch.zeros(2, 2)), "norm": nn.Parameter(torch.zeros(3))})
    assert not stamp(model).fills
    large = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1 << 12, 1 << 12)), "norm": nn.Parameter(torch.zeros(3))})
    stamped = stamp(large)
    assert set(stamped.fills) == {"w", "norm"}
    assert not stamped.not_applied
    assert stamped.last == (1 << 24) + 3


def test_if_a_cast_follows_all_tensors_are_filled_with_what_it_keeps():
    model = nn.Linear(40, 20, bias=False)
    assert set(stamp(model, bits=8).fills) == {"weight"}
    assert not stamp(model, bits=11).fills


class _LosesWrites(torch.Tensor):
    """A tensor whose storage is not what it shows, like some views torch hands out."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_a_fill_that_did_not_take_is_reported_with_its_count(dtype):
    model = nn.Module()
    model.register_buffer("lost", torch.zeros(3, dtype=dtype).as_subclass(_LosesWrites))
    assert stamp(model).not_applied == (("lost", "3 of 3 elements did not read back as written"),)


@pytest.mark.parametrize("tied", [True, False])
def test_a_parameter_that_zero3_has_emptied_is_tied_to_itself_alone(tied):
    """DeepSpeed moves what a rank has to `ds_tensor`: all parameters are then empty, and share no storage."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
    if tied:
        model["head"].weight = model["embed"].weight
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert tied_names(model) == ([("embed.weight", "head.weight")] if tied else [])


def test_tied_weights_have_one_fill():
    model = nn.ModuleDict({"embed": nn.Embedding(40, 20), "head": nn.Linear(20, 40, bias=False)}).to(torch.bfloat16)
    model["head"].weight = model["embed"].weight
    assert {fill.name for fill in stamp(model).fills.values()} == {"embed.weight"}


def test_a_model_on_meta_has_nothing_to_stamp():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ShardvizError, match="weight is on the meta device and has no values"):
        stamp(model)
