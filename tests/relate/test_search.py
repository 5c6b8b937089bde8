"""Relations that are applied to random tensors on random meshes are found again, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.relate.relations import Filled, Located, Pair, Pending, Permuted, Rounded, Scaled
from shardviz.relate.search import num_links, relation_of
from shardviz.relate.tolerance import ELEMENT, EPSILON, Bound
from tests.lanes import cases
from tests.relate.making import KINDS, NARROW, Made, flat, make, part
from tests.relate.replaying import replay

SEEDS = st.integers(0, 2**32 - 1)
TWO = [frozenset(pair) for pair in combinations(KINDS, 2)]
UNFOUND = frozenset({"exchange", "zeros", "permute", "order", "offset", "pending"})
"""Of two of these in a row, some ranks may be left without a chain: each hides what the other is seen by."""


def replayed(made: Made) -> list[bool]:
    """Return for each rank that has a chain whether the chain gives what the rank holds."""
    right = []
    for group in relation_of(made.pair).groups:
        for rank in group.ranks if group.chain is not None else ():
            given, held = replay(group.chain, made.pair, rank)
            size = float(np.abs(made.pair.wanted).max())
            right.append(given.shape == held.shape and np.allclose(given, held, 1e-5, 1e-5 * size))
    return right


@cases(300)
@given(SEEDS, st.sampled_from(KINDS))
def test_a_relation_is_recognized_on_every_rank(seed: int, kind: str) -> None:
    made = make(seed, frozenset({kind}))
    if made is not None:
        assert all(right := replayed(made))
        assert len(right) == len(made.pair.held)


@cases(300)
@given(SEEDS, st.sampled_from(TWO))
def test_two_relations_in_a_row_are_recognized_or_said_to_be_unknown(seed: int, kinds: frozenset[str]) -> None:
    made = make(seed, kinds)
    if made is not None:
        right = replayed(made)
        assert all(right)
        assert kinds <= UNFOUND or len(right) == len(made.pair.held)


@cases(200)
@given(SEEDS, st.sampled_from([frozenset(), frozenset({"noise"})]))
def test_nothing_is_made_up_where_nothing_was_done(seed: int, kinds: frozenset[str]) -> None:
    made = make(seed, kinds)
    assert made is not None
    chain = relation_of(made.pair).chain
    assert chain is not None
    assert num_links(chain, made.pair.claimed) == 0


@pytest.mark.parametrize("text", ["tp=2", "dp=2,tp=2"])
def test_fsdp1s_flat_ranges_are_recognized_uneven_ones_too(text: str) -> None:
    rng, mesh = np.random.default_rng(0), parse_mesh(text)
    wanted = rng.standard_normal((5, 7))
    pair = flat(Pair(wanted, {}, None, mesh), offset=3, total=41)
    halved = {rank: values * 0.5 for rank, values in pair.held.items()}
    chain = relation_of(replace(pair, held=halved)).chain
    assert chain is not None
    assert chain[1:] == (Scaled(0.5),)


def make_pair(wanted: np.ndarray, held: dict[int, np.ndarray], claimed: Layout | None, **more: object) -> Pair:
    return Pair(wanted, held, claimed, claimed.mesh if claimed else parse_mesh("tp=2"), **more)


def drawn(shape: tuple[int, ...] = (8, 6), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def rows(ranks: int = 2, shape: tuple[int, ...] = (8, 6)) -> Layout:
    return Layout(parse_mesh(f"tp={ranks}"), shape, (("tp",), *((),) * (len(shape) - 1)))


@pytest.mark.parametrize("shape", [(2, 3, 2, 6, 3), (2, 2, 6, 2, 2, 3)])
def test_a_part_of_many_dims_is_found_with_and_without_a_claim(shape: tuple[int, ...]) -> None:
    wanted, mesh = drawn(shape), parse_mesh("tp=2")
    layout = Layout(mesh, shape, tuple(("tp",) if size == 6 else () for size in shape))
    held = {rank: 3 * part(wanted, layout, rank) for rank in mesh.ranks}
    for claimed in (layout, None):
        assert relation_of(Pair(wanted, held, claimed, mesh)).chain == (Located(layout), Scaled(3.0))


def test_what_is_within_the_bound_is_the_same() -> None:
    wanted, layout = drawn(), rows()
    held = {rank: part(wanted, layout, rank) * (1 + 3e-7) for rank in (0, 1)}
    assert relation_of(make_pair(wanted, held, layout, bound=NARROW)).chain == (Located(layout),)


def test_a_missing_rank_makes_a_sum_unknown_and_never_a_missing_term() -> None:
    wanted = drawn()
    layout = Layout(parse_mesh("tp=3"), (8, 6), ((), ()), partial=(("tp", "sum"),))
    terms = [drawn(seed=seed) for seed in (1, 2)]
    held = {0: terms[0], 1: terms[1]}  # rank 2 has wanted - terms[0] - terms[1]
    groups = relation_of(make_pair(wanted, held, layout)).groups
    assert [group.chain for group in groups] == [None]
    held[2] = wanted - terms[0] - terms[1]
    assert relation_of(make_pair(wanted, held, layout, bound=NARROW)).chain is not None


def test_equal_copies_are_never_taken_for_terms_of_a_sum() -> None:
    wanted = drawn()
    layout = Layout(parse_mesh("tp=2"), (8, 6), ((), ()))
    chain = relation_of(make_pair(wanted, {0: wanted / 2, 1: wanted / 2}, layout)).chain
    assert chain == (Located(layout), Scaled(0.5))


def test_two_axes_may_be_pending_each_with_its_own_reduction() -> None:
    mesh = parse_mesh("dp=2,tp=2")
    layout = Layout(mesh, (8, 6), ((), ()), partial=(("dp", "sum"), ("tp", "max")))
    held = {rank: drawn(seed=rank) for rank in mesh.ranks}
    wanted = np.maximum(held[0] + held[2], held[1] + held[3])
    pair = make_pair(wanted, held, layout, bound=NARROW)
    related = relation_of(pair)
    assert related.chain is not None
    assert num_links(related.chain, layout) == 0
    assert all(np.allclose(*replay(related.chain, pair, rank)) for rank in mesh.ranks)


def test_a_quick_search_finds_placements_and_factors_but_no_order() -> None:
    mesh = parse_mesh("tp=2")
    wanted = np.random.default_rng(0).normal(size=(8, 6))
    layout = Layout(mesh, wanted.shape, (("tp",), ()))
    halves = {rank: wanted[4 * rank :][:4] / 2 for rank in range(2)}
    turned = {rank: wanted[::-1][4 * rank :][:4] for rank in range(2)}
    pairs = [Pair(wanted, held, layout, mesh) for held in (halves, turned)]
    assert relation_of(pairs[0], is_refined=False) == relation_of(pairs[0])
    assert relation_of(pairs[1]).chain is not None
    assert relation_of(pairs[1], is_refined=False).chain is None


def test_a_slice_may_stand_twice() -> None:
    wanted, layout = drawn(), rows()
    order = (0, 1, 2, 3, 0, 1, 2, 3)
    held = {rank: part(wanted[list(order)], layout, rank) for rank in (0, 1)}
    chain = relation_of(make_pair(wanted, held, layout)).groups[0].chain
    assert chain is not None
    assert np.array_equal(replay(chain, make_pair(wanted, held, layout), 1)[0], wanted[:4])


def test_memory_that_was_never_written_is_told_from_wrong_values() -> None:
    wanted, layout = drawn(), rows()
    held = {0: part(wanted, layout, 0), 1: np.full((4, 6), np.nan)}
    first, second = relation_of(make_pair(wanted, held, layout)).groups
    assert (first.ranks, first.chain) == ((0,), (Located(layout),))
    assert second.ranks == (1,)
    assert isinstance(second.chain[0], Filled)
    assert np.isnan(second.chain[0].value)


def test_one_exchanged_pair_of_600_rows_does_not_hide_in_the_norm() -> None:
    wanted = drawn((600, 4))
    layout = Layout(parse_mesh("tp=2"), (600, 4), ((), ()))
    swapped = wanted.copy()
    swapped[[3, 500]] = swapped[[500, 3]]
    chain = relation_of(make_pair(wanted, {0: swapped, 1: swapped}, layout, bound=Bound(4 * EPSILON["bfloat16"]))).chain
    assert chain is not None
    assert isinstance(chain[0], Permuted)
    assert (chain[0].order[3], chain[0].order[500]) == (500, 3)


def test_a_sum_that_was_rounded_afterwards_is_seen_through() -> None:
    wanted = drawn()
    layout = Layout(parse_mesh("tp=2"), (8, 6), ((), ()))
    coarse = np.round(wanted * 64) / 64
    terms = {0: coarse - 1.0, 1: wanted * 0 + 1.0}
    pair = make_pair(coarse, terms, layout)
    assert relation_of(pair).chain == (Located(layout), Pending("tp"))


def test_numbers_that_nearly_are_a_multiple_of_one_axes_sum_are_terms_over_both() -> None:
    held = {rank: np.array([value]) for rank, value in enumerate((276.38697, 281.68707, 275.80939, 282.30368))}
    mesh = parse_mesh("dp=2,cp=2")
    pair = Pair(np.array([np.sum([*held.values()])]), held, None, mesh, Bound(ELEMENT["float32"]))
    assert {link.axis for link in relation_of(pair).chain or () if isinstance(link, Pending)} == {"dp", "cp"}
    copies = {0: held[0], 1: held[0], 2: held[1], 3: held[1]}  # over cp they are copies, and no terms
    chain = relation_of(replace(pair, held=copies, wanted=(held[0] + held[1]) / 2)).chain or ()
    assert [link.axis for link in chain if isinstance(link, Pending)] == ["dp"]


def test_rounding_is_exact_to_the_bit() -> None:
    wanted, layout = drawn(), rows()
    bits = wanted.astype(np.float32).view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    cut = bits & np.uint32(0xFFFF0000)  # cut off instead of rounded
    rounded, cut_off = (values.view(np.float32).astype(np.float64) for values in (even, cut))
    as_held = [{rank: part(values, layout, rank) for rank in (0, 1)} for values in (rounded, cut_off)]
    first, second = (relation_of(make_pair(wanted, held, layout, bound=NARROW)).chain for held in as_held)
    assert first == (Located(layout), Rounded("bfloat16"))
    assert second is None
