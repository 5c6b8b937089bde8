"""Weights in eight bits: rounded as torch rounds, and compared through the scales beside them, never without."""

import numpy as np
import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from shardviz.relate.casts import cast
from tests.checkpoint.maps import both, weight

EIGHT = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT).max
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


def by_row(w):
    scale = w.float().abs().amax(1, keepdim=True) / LARGEST
    return (w.float() / scale).to(EIGHT), scale


def outcomes(tmp_path, w, name, coded, scale):
    one, other = both(tmp_path, {"a.weight": w}, {"a.weight": coded, f"a.{name}": scale})
    return {
        each.name: (each.verdict, each.why)
        for each in compare_checkpoints(*map(open_checkpoint, (one, other))).outcomes
    }


def test_what_was_no_number_before_is_as_near_as_it_can_be(tmp_path):
    w = weight(16, 16)
    coded, scale = by_row(w)
    w[3, 5] = float("nan")
    coded.view(torch.uint8)[3, 5] = 0x7F
    assert outcomes(tmp_path / "both", w, "weight_scale", coded, scale)["a.weight"][0] == "cast"
    w[3, 5] = 1.0
    assert outcomes(tmp_path / "one", w, "weight_scale", coded, scale)["a.weight"][0] == "other"
