"""Copies of parameters that optimizers step in their place, found by their values, or by their shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardviz.live.claims import masters


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    return list(nn.Sequential(*layers).to(dtype).parameters())


def row(params):
    return nn.Parameter(torch.cat([param.detach().flatten() for param in params]).float())


def groups(params):
    return [row([param for param in params if (param.ndim > 1) == is_matrix]) for is_matrix in (True, False)]


def each(params):
    return [nn.Parameter(param.detach().clone().float()) for param in params]


def gradients(params, stepped):
    """Return the gradient of each parameter, each element of a copy having its number in the copy."""
    for tensor in stepped:
        tensor.grad = torch.arange(float(tensor.numel())).view_as(tensor)
    weights = {param: masters.Local(str(at), "param", tuple(param.shape), param) for at, param in enumerate(params)}
    return {local.name: local.values for local in masters.gradients(weights, None, set(map(id, stepped)))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [each, lambda params: each(params)[::-1], groups, lambda params: [row(params)]])
def test_every_parameter_is_found(make, dtype):
    params = model(dtype)
    stepped = make(params)
    assert masters.link(params, stepped)
    found = gradients(params, stepped)
    assert {name: tuple(values.shape) for name, values in found.items()} == {
        str(at): tuple(param.shape) for at, param in enumerate(params)
    }
    if len(stepped) == 1:
        assert found["2"].tolist() == list(range(30, 36))
    assert [masters.is_stale(param) for param in params] == [False] * len(params)


def test_copies_with_other_values_are_found_by_their_shapes_and_are_stale():
    params = model()
    stepped = [nn.Parameter(torch.randn_like(copy)) for copy in each(params)]
    assert masters.link(params, stepped)
    assert len(gradients(params, stepped)) == len(params)
    assert all(masters.is_stale(param) for param in params)


def test_norms_of_equal_numbers_are_not_taken_for_each_other():
    """What begins with the zeros of a norm's bias may begin in any: one way to go on is left, or none is taken."""
    params = model()
    norms = row([params[3], params[6], params[7]])  # a bias, a weight and a bias, which nothing tells apart
    masters.link(params, [norms])
    assert not [name for name in gradients(params, [norms]) if name not in ("3", "6", "7")]


@pytest.mark.parametrize("others", [[torch.randn(5, 5)], [torch.randn(7)], [torch.randn(())]])
def test_other_tensors_are_no_copies(others):
    params = model()
    assert not masters.link(params, [nn.Parameter(other) for other in others])
    assert not masters.has_copies(params)


def test_a_copy_that_is_not_recognized_leaves_its_weight_unknown():
    params = model()
    stepped = each(params)[:-1]
    assert masters.link(params, [*stepped, nn.Parameter(torch.randn(9))])
    assert [masters.unknown(param) for param in params] == [False] * (len(params) - 1) + [True]
