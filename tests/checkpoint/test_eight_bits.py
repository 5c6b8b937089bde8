"""Weights in eight bits: rounded as torch rounds, and compared through the scales beside them, never without."""

import numpy as np
import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from shardviz.relate.casts import cast
from tests.checkpoint.maps import both, weight

KINDS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", KINDS)
def test_eight_bits_are_rounded_as_torch_does_it(name):
    limits = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 448, 464, 464.1, 61440, 61441, 2**-10, 1.5 * 2**-9])
    some = torch.cat([weight(50_000, seed=at) * 10.0**at for at in range(-4, 6)] + [limits, -limits])
    rounded = some.to(KINDS[name]).view(torch.uint8).numpy()
    assert np.array_equal(cast(some.numpy().view("u4"), "float32", name), rounded)
    codes = torch.arange(256).to(torch.uint8)
    back = cast(codes.numpy(), name, "float32").view("f4")
    assert np.array_equal(back, codes.view(KINDS[name]).float().numpy(), equal_nan=True)
    assert cast(codes.numpy(), "uint8", name) is None


def quantized(tmp_path, scales_of, size=(64, 32)):
    """Compare a weight with its eight bits and one scale for each 16 x 16, of which something is made."""
    coarse = weight(size[0] // 16, size[1] // 16, seed=1).exp2()
    values = weight(*size) * coarse.repeat_interleave(16, 0).repeat_interleave(16, 1)
    blocks = values.view(size[0] // 16, 16, size[1] // 16, 16)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(size).to(torch.float8_e4m3fn)
    second = {"w": codes, "w_scale_inv": scales_of(scales)}
    paths = both(tmp_path, {"w": values}, second)
    return {one.name: one for one in compare_checkpoints(*map(open_checkpoint, paths)).outcomes}["w"]


@pytest.mark.parametrize("size", [(64, 64), (64, 32), (48, 32)], ids=str)
def test_scales_that_are_transposed_or_inverted_are_named(tmp_path, size):
    right = quantized(tmp_path / "right", lambda scales: scales, size)
    assert (right.verdict, right.cause_id) == ("cast", "")
    turned = quantized(tmp_path / "turned", lambda scales: scales.t(), size)
    assert (turned.verdict, turned.cause_id) == ("other", "transposed-scales")
    inverted = quantized(tmp_path / "inverted", lambda scales: 1 / scales, size)
    assert (inverted.verdict, inverted.cause_id) == ("other", "inverted-scales")
    other = quantized(tmp_path / "other", lambda scales: scales.flip(0) * 1.1, size)
    assert (other.verdict, other.cause_id) == ("other", "wrong-quantization-scales")
