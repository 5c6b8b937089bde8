"""Weights in eight bits: rounded as torch rounds, and compared through the scales beside them, never without."""

import numpy as np
import pytest
import torch

from shardviz.relate.casts import cast
from tests.checkpoint.maps import weight

KINDS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", KINDS)
def test_eight_bits_are_rounded_as_torch_does_it(name):
    limits = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 448, 464, 464.1, 61440, 61441, 2**-10, 1.5 * 2**-9])
    some = torch.cat([weight(50_000, seed=at) * 10.0**at for at in range(-4, 6)] + [limits, -limits])
    rounded = some.to(KINDS[name])
    seen = (some.isnan() | ~rounded.float().isnan()).numpy()  # torch 2.6 makes NaN of what is past the largest
    ours = cast(some.numpy().view("u4"), "float32", name)
    assert np.array_equal(ours[seen], rounded.view(torch.uint8).numpy()[seen])
    codes = torch.arange(256).to(torch.uint8)
    back = cast(codes.numpy(), name, "float32").view("f4")
    assert np.array_equal(back, codes.view(KINDS[name]).float().numpy(), equal_nan=True)
    assert cast(codes.numpy(), "uint8", name) is None
