"""The held layout is derived exactly, whatever the notation can say."""

from __future__ import annotations

import random
import time
from itertools import product

import pytest

from shardviz.check.order.infer.layout import holds, infer_layout
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Coord, Mesh, parse_mesh
from shardviz.layout.notation import parse, write
from shardviz.layout.region import Region
from tests.lanes import at_night


def held_by(layout: Layout) -> dict[Coord, Region]:
    return {coord: layout.region(coord) for coord in layout.mesh.coords()}


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ("fsdp=2,tp=4", "[12, 12]"),
        ("fsdp=2,tp=4", "[12/tp/fsdp, 12]"),
        ("fsdp=2,tp=4", "[12/fsdp/tp, 12]"),
        ("fsdp=2,tp=4", "[12, 12/tp]"),
        ("fsdp=2,tp=4", "[12/tp, 12/fsdp]"),
        ("fsdp=2,tp=4", "[24/3/tp, 8]"),
        ("fsdp=2,tp=4", "[24/3/tp/fsdp, 8]"),
        ("fsdp=2,tp=4", "[24/tp/3/fsdp, 8]"),
        ("dp=2,fsdp=3,tp=2", "[13/tp/fsdp, 5]"),
        ("fsdp=2,tp=2", "[(12/3/fsdp)/tp, 3]"),
        ("a=2,b=2,c=2,d=2,e=2", "[64/e/c/a/d/b, 3]"),
        ("a=3,b=2,c=2", "[7/b, 11/c/a, 2]"),
    ],
)
def test_the_layout_that_made_the_shards_is_found(mesh: str, text: str) -> None:
    layout = parse(text).layout(parse_mesh(mesh))
    found = infer_layout(layout.mesh, layout.shape, held_by(layout))
    assert found is not None
    assert write(found) == text


@pytest.mark.parametrize("text", ["[1/fsdp/tp]", "[3/tp/fsdp, 2]", "[0/tp]", "[]", "[5/fsdp, 3/tp]"])
def test_empty_shards_and_tensors_fit_their_own_claim(text: str) -> None:
    layout = parse(text).layout(parse_mesh("fsdp=2,tp=4"))
    assert infer_layout(layout.mesh, layout.shape, held_by(layout), layout) is layout
    assert infer_layout(layout.mesh, layout.shape, held_by(layout)) is not None


def test_a_missing_rank_does_not_stop_inference() -> None:
    layout = parse("[12/tp/fsdp, 12]").layout(parse_mesh("fsdp=2,tp=4"))
    held = held_by(layout)
    del held[1, 2]
    found = infer_layout(layout.mesh, layout.shape, held)
    assert found is not None
    assert write(found) == "[12/tp/fsdp, 12]"


def test_reversed_coordinates_are_no_layout() -> None:
    layout = parse("[12/tp]").layout(parse_mesh("tp=4"))
    held = {(3 - coord[0],): region for coord, region in held_by(layout).items()}
    assert infer_layout(layout.mesh, layout.shape, held) is None


def test_one_axis_on_two_dims_is_no_layout() -> None:
    mesh = parse_mesh("tp=2")
    held = {(i,): Region((((6 * i, 6 * i + 6),), ((6 * i, 6 * i + 6),))) for i in range(2)}
    assert infer_layout(mesh, (12, 12), held) is None


def test_flat_parameters_of_fsdp1_are_found_too() -> None:
    layout = parse("[flat(10, 10)/fsdp]").layout(parse_mesh("dp=2,fsdp=4"))
    claimed = parse("[flat(10, 10)/dp]").layout(parse_mesh("dp=2,fsdp=4"))
    claimed = Layout(claimed.mesh, layout.shape, claimed.chains, flat=claimed.flat)
    found = infer_layout(layout.mesh, (100,), held_by(layout), claimed)
    assert found is not None
    assert write(found) == "[flat(10, 10)/fsdp]"


def test_the_layout_of_a_thousand_ranks_is_found() -> None:
    mesh = Mesh(("dp", "fsdp", "tp"), (4, 32, 8))
    layout = parse("[8192/tp/fsdp, 28672]").layout(mesh)
    held = {coord: layout.region(coord) for coord in product(range(4), range(32), range(8))}
    found = infer_layout(mesh, layout.shape, held)
    assert found is not None
    assert write(found) == "[8192/tp/fsdp, 28672]"


def random_layout(draw: random.Random) -> Layout:
    """Split up to three dims over some axes of a mesh of up to four, with a number here and there."""
    mesh = Mesh(("a", "b", "c", "d")[: (ndim := draw.randint(1, 4))], tuple(draw.choices([2, 3, 4], k=ndim)))
    chains = [[str(size)] for size in draw.choices([1, 3, 4, 5, 6, 7, 8, 12, 13, 24], k=draw.randint(1, 3))]
    for axis in draw.sample(mesh.axes, draw.randint(0, ndim)):
        draw.choice(chains).extend([draw.choice("23"), axis] if draw.random() < 0.2 else [axis])
    return parse(f"[{', '.join(map('/'.join, chains))}]").layout(mesh)


@pytest.mark.parametrize("seed", [*range(3), *at_night(range(3, 8))])
def test_whatever_ranks_are_missing_a_layout_that_fits_the_others_is_found(seed: int) -> None:
    for number in range(100):
        draw = random.Random(1000 * seed + number)
        layout = random_layout(draw)
        whole = held_by(layout)
        held = {coord: whole[coord] for coord in draw.sample(list(whole), draw.randint(1, len(whole)))}
        found = infer_layout(layout.mesh, layout.shape, held)
        assert found is not None, (write(layout), layout.mesh, held)
        assert holds(found, held)


def test_a_search_that_finds_nothing_ends_soon() -> None:
    mesh = Mesh(tuple("abcdef"), (2,) * 6)
    regions = held_by(parse("[4096/a/c, 4096/b]").layout(mesh))
    draw = random.Random(0)
    some = draw.sample(list(regions), 20)
    held = dict(zip(some, draw.sample([regions[coord] for coord in some], 20), strict=True))
    started = time.process_time()
    assert infer_layout(mesh, (4096, 4096), held) is None
    assert time.process_time() - started < 5
