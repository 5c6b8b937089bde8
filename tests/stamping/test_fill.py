"""Fills: what their values promise, in every dtype."""

import math
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.region import Region
from shardviz.reference.lookup import WINDOW, locate, place_single_values
from shardviz.stamping.fill import BLOCK, CODES, Fill, can_fill, looks_filled
from tests.lanes import at_night, cases

FLOATS = {"float64": np.float64, "float32": np.float32, "float16": np.float16}

DIGEST = "a7e9626021a1d7c1033f3fe18e89a69c"
"""Of fills in all types, as version 1 has them."""


def numbers(fill):
    """Return a fill's values; bfloat16 as the float32 that it is the upper half of."""
    if fill.dtype == "bfloat16":
        return (fill.bits.astype("u4") << 16).view(np.float32)
    return fill.bits.view(FLOATS.get(fill.dtype, np.dtype(fill.dtype) if "int" in fill.dtype else None))


@pytest.mark.parametrize("dtype", [*FLOATS, "bfloat16"])
def test_values_are_finite_below_one_and_never_zero(dtype):
    values = np.abs(numbers(Fill("w", (300, 400), dtype)).astype(np.float64))
    assert np.isfinite(values).all()
    assert values.min() > 0
    assert values.max() < 1


@pytest.mark.parametrize("dtype", [name for name in CODES if name.startswith("float8")])
def test_no_value_of_a_byte_is_zero_infinite_or_nan(dtype):
    """The largest exponent is infinity or NaN in some of these types, and 0x80 NaN in others; none is in a fill."""
    bits = np.unique(Fill("w", (5000,), dtype).bits)
    assert len(bits) == 1 << CODES[dtype].bits
    if dtype != "float8_e8m0fnu":
        exponents = (bits & 0x7F) >> CODES[dtype].mantissa
        assert exponents.min() > 0
        assert exponents.max() < (0x7F >> CODES[dtype].mantissa)


@pytest.mark.parametrize("dtype", [name for name in CODES if "int" in name])
def test_integers_are_positive(dtype):
    values = numbers(Fill("w", (5000,), dtype))
    assert values.min() > 0


@pytest.mark.parametrize("dtype", CODES)
def test_all_values_of_a_small_tensor_differ(dtype):
    most = min(1 << CODES[dtype].bits, 1 << 15)
    fill = Fill("norm.weight", (most,), dtype)
    assert fill.is_distinct
    assert len(np.unique(fill.bits)) == most


@pytest.mark.parametrize("dtype", CODES)
def test_a_fill_depends_on_the_name_alone_and_is_the_same_for_ever(dtype):
    one, other = Fill("layers.0.w", (64, 32), dtype).bits, Fill("layers.1.w", (64, 32), dtype).bits
    assert np.mean(one == other) < 0.1
    assert np.array_equal(one, Fill("layers.0.w", (2048,), dtype).bits.reshape(64, 32))


def test_the_values_of_version_1_are_these():
    """Files are full of them: a change here makes every stamped copy unreadable, and needs another version."""
    fills = [Fill("w", shape, dtype) for dtype in CODES for shape in ((100,), (3, 50_000))]
    assert blake2b(b"".join(fill.bits.tobytes() for fill in fills), digest_size=16).hexdigest() == DIGEST


@cases(100)
@given(st.lists(st.integers(0, 12), max_size=3), st.sampled_from(list(CODES)), st.data())
def test_a_part_is_cut_from_the_whole(shape, dtype, data):
    fill = Fill("w", tuple(shape), dtype)
    dims = []
    for size in shape:
        ends = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
        dims.append(((ends[0], ends[1]),) if ends[0] < ends[1] else ())
    slices = tuple(slice(*ranges[0]) if ranges else slice(0, 0) for ranges in dims)
    assert np.array_equal(fill.read(Region(tuple(dims))), fill.bits[slices])


def test_a_part_of_several_ranges_and_of_many_blocks_is_cut_from_the_whole():
    fill = Fill("w", (3, BLOCK + 7), "bfloat16")
    region = Region((((2, 3), (0, 1)), ((BLOCK - 5, BLOCK + 7), (3, 9))))
    rows = np.concatenate([fill.bits[2:3], fill.bits[0:1]])
    assert np.array_equal(fill.read(region), np.concatenate([rows[:, BLOCK - 5 :], rows[:, 3:9]], 1))
    assert np.array_equal(fill.read(Region.whole(fill.shape)), fill.bits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", *at_night(["float32", "float16", "int8"])])
def test_windows_are_found_once_along_every_dim(dtype):
    """Of half a million windows of sixteen none comes twice, in rows, in columns or in another tensor."""
    seen, count = set(), 0
    for name in ("a", "b"):
        table = Fill(name, (512, 480), dtype).bits
        for lines in (table, table.T):
            windows = np.lib.stride_tricks.sliding_window_view(lines, WINDOW, 1).reshape(-1, WINDOW)
            sums = (windows.astype(np.uint64) * (np.arange(WINDOW, dtype=np.uint64) * 2 + 1) ** 9).sum(1)
            seen |= set(sums.tolist())
            count += len(sums)
    assert len(seen) == count


def test_a_float32_cut_to_its_upper_half_is_the_bfloat16_and_fits_into_float16():
    wide, narrow = Fill("w", (200, 100), "float32").bits, Fill("w", (200, 100), "bfloat16").bits
    rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("u2")
    assert np.array_equal(rounded, narrow)
    values = (narrow.astype("u4") << 16).view(np.float32)
    assert np.array_equal(values.astype(np.float16).astype(np.float32), values)


def test_flags_and_complex_numbers_have_no_fill():
    assert not any(map(can_fill, ("bool", "complex64", "float4_e2m1fn_x2")))


@cases(40)
@given(st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(2, 4096), st.integers(0, 99))
def test_any_permutation_of_a_norm_is_placed_element_by_element(dtype, size, seed):
    whole = Fill("norm.weight", (size,), dtype).bits
    order = np.random.default_rng(seed).permutation(size)
    local = whole[order]
    ids = place_single_values(local, whole, locate(local, whole))
    assert np.array_equal(ids, order + 1)


@cases(40)
@given(st.sampled_from(["bfloat16", "float16"]), st.integers(4, 2000), st.floats(0.01, 2), st.integers(0, 99))
def test_a_norm_that_was_never_loaded_is_not_placed_by_chance(dtype, size, scale, seed):
    whole = Fill("norm.weight", (size,), dtype).bits
    drawn = np.random.default_rng(seed).normal(1, scale, size).astype(np.float32)
    local = (drawn.view("u4") >> 16).astype("u2") if dtype == "bfloat16" else drawn.astype(np.float16).view("u2")
    for other in (local, np.zeros_like(local), np.full_like(local, local[0])):
        assert not place_single_values(other, whole, np.zeros(size, np.int64)).any()


def test_drawn_weights_do_not_look_filled_and_fills_do():
    rng = np.random.default_rng(0)
    for spread in np.geomspace(1e-3, 10, 30):
        drawn = {"normal": rng.normal(0, spread, 4000), "uniform": rng.uniform(-spread, spread, 4000)}
        for values in drawn.values():
            assert not looks_filled(values.astype(np.float32).view("u4"), "float32")
            assert not looks_filled((values.astype(np.float32).view("u4") >> 16).astype("u2"), "bfloat16")
    for dtype in CODES:
        assert looks_filled(Fill("w", (4000,), dtype).bits, dtype)
        assert math.prod(Fill("w", (), dtype).bits.shape) == 1
