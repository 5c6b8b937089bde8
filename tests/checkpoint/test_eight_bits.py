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


def blocked(w, size):
    """Quantize with a scale for each block, as DeepSeek does."""
    rows, columns = (-(-one // size) for one in w.shape)
    padded = torch.zeros(rows * size, columns * size)
    padded[: w.shape[0], : w.shape[1]] = w.float()
    cut = padded.view(rows, size, columns, size)
    scale = cut.abs().amax((1, 3)) / LARGEST
    whole = (cut / scale[:, None, :, None]).to(EIGHT).view(padded.shape)
    return whole[: w.shape[0], : w.shape[1]].contiguous(), scale


def by_row(w):
    scale = w.float().abs().amax(1, keepdim=True) / LARGEST
    return (w.float() / scale).to(EIGHT), scale


def whole(w):
    scale = (w.float().abs().max() / LARGEST).reshape(1)
    return (w.float() / scale).to(EIGHT), scale


RIGHT = {
    "blocks of 128": ("weight_scale_inv", lambda w: blocked(w, 128)),
    "blocks of 64": ("weight_scale", lambda w: blocked(w, 64)),
    "rows": ("weight_scale", by_row),
    "rows, one dim": ("weight_scale", lambda w: (by_row(w)[0], by_row(w)[1].flatten())),
    "rows, rounded scales": ("weight_scale", lambda w: (by_row(w)[0], by_row(w)[1].bfloat16())),
    "one": ("weight_scale", whole),
    "one, by its reciprocal": ("weight_scale", lambda w: ((w.float() * (1 / whole(w)[1])).to(EIGHT), whole(w)[1])),
    "one without dims": ("weight_scale", lambda w: (whole(w)[0], whole(w)[1][0])),
}


def outcomes(tmp_path, w, name, coded, scale):
    one, other = both(tmp_path, {"a.weight": w}, {"a.weight": coded, f"a.{name}": scale})
    return {
        each.name: (each.verdict, each.why)
        for each in compare_checkpoints(*map(open_checkpoint, (one, other))).outcomes
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", RIGHT)
def test_a_weight_is_compared_through_its_scales(tmp_path, case, dtype):
    w = (weight(300, 200) * 0.02).to(dtype)
    name, quantize = RIGHT[case]
    found = outcomes(tmp_path, w, name, *quantize(w))
    assert list(found) == ["a.weight"]
    verdict, why = found["a.weight"]
    assert verdict == "cast"
    assert f"every value the nearest that its scale allows; a.{name} has a scale for" in why


def one_code(coded, scale):
    coded.view(torch.uint8)[100, 150] ^= 1
    return coded, scale


WRONG = {
    "one value": (one_code, "1 of 60,000 values are not the nearest that their scales allow, the first at [100, 150]"),
    "scales exchanged": (lambda coded, scale: (coded, scale.flip(0)), "values are not the nearest"),
    "the inverse": (lambda coded, scale: (coded, 1 / scale), "60,000 of 60,000 values"),
    "another step's values": (
        lambda coded, scale: (blocked(weight(300, 200, seed=5), 128)[0], scale),
        "values are not",
    ),
    "no scale for a block": (
        lambda coded, scale: (coded, torch.where(scale == scale.max(), 0, scale)),
        "values are not",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_scales_do_not_give_is_counted(tmp_path, case):
    w = weight(300, 200) * 0.02
    change, told = WRONG[case]
    verdict, why = outcomes(tmp_path, w, "weight_scale_inv", *change(*blocked(w, 128)))["a.weight"]
    assert verdict == "other"
    assert told in why


def test_without_scales_only_a_plain_cast_is_compared(tmp_path):
    w = weight(300, 200)
    one, other = both(tmp_path / "plain", {"w": w}, {"w": w.to(EIGHT)})
    (found,) = compare_checkpoints(*map(open_checkpoint, (one, other))).outcomes
    assert found.verdict == "cast"
    one, other = both(tmp_path / "scaled", {"w": w}, {"w": by_row(w)[0]})
    (found,) = compare_checkpoints(*map(open_checkpoint, (one, other))).outcomes
    assert (found.verdict, "no scales of w are known" in found.why) == ("not-compared", True)
    found = outcomes(tmp_path / "odd", w, "weight_scale", by_row(w)[0], torch.ones(7, 3, 2))
    assert found == {
        "a.weight": (
            "not-compared",
            "how its scales belong to its values [300, 200] is not known: a.weight_scale [7, 3, 2]",
        )
    }


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_scales_without_numbers_are_no_scales(tmp_path, shape):
    w = weight(16, 16)
    found = outcomes(tmp_path, w, "weight_scale", by_row(w)[0], torch.zeros(shape))
    verdict, why = found["a.weight"]
    assert verdict == "not-compared"
    assert "no scales of a.weight are known" in why


def test_a_weight_without_elements_has_no_blocks(tmp_path):
    empty = torch.zeros(0, 16)
    assert outcomes(tmp_path, empty, "weight_scale", empty.to(EIGHT), torch.ones(2, 1))["a.weight"][0] in (
        "equal",
        "cast",
    )


def test_what_was_no_number_before_is_as_near_as_it_can_be(tmp_path):
    w = weight(16, 16)
    coded, scale = by_row(w)
    w[3, 5] = float("nan")
    coded.view(torch.uint8)[3, 5] = 0x7F
    assert outcomes(tmp_path / "both", w, "weight_scale", coded, scale)["a.weight"][0] == "cast"
    w[3, 5] = 1.0
    assert outcomes(tmp_path / "one", w, "weight_scale", coded, scale)["a.weight"][0] == "other"
